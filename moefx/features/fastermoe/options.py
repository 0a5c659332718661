"""A value of `placement`."""

VALUES = {"policy": {"fastermoe": "all ranks get the experts whose copies pay, and keep their rows for them"}}
