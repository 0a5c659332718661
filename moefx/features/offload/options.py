"""The strategies of MPipeMoE, values of `keep`, and its formula, one of `formula`."""

from __future__ import annotations

VALUES = {
    "keep": {  # of rows before and between the experts' products (table 2)
        "mpipemoe-s1": "MPipeMoE: experts' rows wait on the host",
        "mpipemoe-s2": "those that arrive are sent again",
        "mpipemoe-s3": "inner ones are computed again",
        "mpipemoe-s4": "both are made again",
    },
    "formula": {"mpipemoe": "one of its four strategies of what is kept, by equation 10"},
}
