"""A value of `placement`."""

VALUES = {"placement": {"hecate": "between steps, by Hecate's Algorithm 1"}}
