"""The option `rehome_every`."""

from moefx.options.declare import NUMBER, Allowed, option

FIELDS = {"placement": {
    "rehome_every": option(0, Allowed(NUMBER.test, "a number of optimizer steps, or 0 for never"), """
        Experts move for good after this many optimizer steps, with the optimizer's state, so that nodes have equal
        loads (Hecate, Algorithm 2). It needs a policy. 0: never."""),
}}  # fmt: skip
