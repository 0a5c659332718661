"""A value of `placement`."""

VALUES = {"placement": {"fastermoe": "in the step, all ranks get the experts whose copies pay, for their own rows"}}
