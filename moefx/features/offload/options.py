"""The strategies of MPipeMoE, values of `keep`, and its formula, one of `formula`."""

from __future__ import annotations

VALUES = {
    "keep": {
        "mpipemoe-s1": "MPipeMoE, table 2: rows before and between the experts' products wait on the host",
        "mpipemoe-s2": "the first are sent again, the second wait there",
        "mpipemoe-s3": "the first wait there, the second are computed again",
        "mpipemoe-s4": "both are made again",
    },
    "formula": {"mpipemoe": "one of its four strategies of what is kept, by equation 10"},
}
