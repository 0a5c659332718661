"""A value of `placement`, and what else may be said of it."""

from moefx.options.declare import NUMBER, Allowed, option, or_none

VALUES = {"placement": {"llep": "in the step, ranks above their capacity give rows to the least loaded ones"}}
_FACTOR = Allowed(lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 1 <= v < float("inf"),
                  "a number from 1 on")

FIELDS = {"placement": {
    "llep_capacity": option(1.1, _FACTOR, """
        LLEP's alpha: a rank's capacity, as a multiple of the mean of all ranks."""),
    "llep_rows": option(None, or_none(NUMBER), """
        LLEP's m: fewer rows than this do not travel to another rank with an expert's weights, unless they are the
        last ones. None: as many as take as long to compute as the weights take to travel, by the machine; without one
        1024."""),
    "llep_threshold": option(1.3, _FACTOR, """
        LLEP's lambda: nothing moves if the busiest rank has at most this multiple of the mean."""),
}}  # fmt: skip
