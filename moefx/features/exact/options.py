"""Values of `placement`."""

VALUES = {"placement": {
    "exact": "in the step, from its own rows: equally many, to within one",
    "calibrated": 'as "auto" or "balanced", and in the step copies that the forecast missed',
}}  # fmt: skip
