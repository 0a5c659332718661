"""Values of `placement`."""

VALUES = {"placement": {
    "exact": "in the step, from its own rows, so that all ranks compute equally many, to within one",
    "calibrated": 'as "auto" or "balanced"; in the step it adds copies that the forecast missed',
}}  # fmt: skip
