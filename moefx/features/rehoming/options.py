"""The option `rehome_every`."""

from moefx.options.declare import NUMBER, Allowed, option

FIELDS = {"placement": {
    "rehome_every": option(0, Allowed(NUMBER.test, "a number of optimizer steps, or 0 for never"), """
        After so many optimizer steps experts move for good, with the optimizer's state, so that nodes have equal loads
        (Hecate, Algorithm 2). Needs a policy. 0: never."""),
}}  # fmt: skip
