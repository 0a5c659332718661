"""A value of `placement`."""

VALUES = {"placement": {"fastermoe": "all ranks get the experts whose copies pay, and keep their rows for them"}}
