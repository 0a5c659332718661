"""The strategies of MPipeMoE, values of `keep`, and its formula, one of `formula`."""

from __future__ import annotations

VALUES = {
    "keep": {  # of rows before and between the experts' products (table 2)
        "mpipemoe-s1": "rows before and between the experts' products wait on the host (MPipeMoE)",
        "mpipemoe-s2": "the former are sent again, the latter wait on the host",
        "mpipemoe-s3": "the former wait on the host, the latter are computed again",
        "mpipemoe-s4": "the former are sent again, the latter computed again",
    },
    "formula": {"mpipemoe": "one of its four strategies for `keep`, by equation 10"},
}
