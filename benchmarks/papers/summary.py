"""All claims of all papers beside ours: one row each.

    python benchmarks/papers/summary.py [--out benchmarks/results/papers.md]

Takes a minute or two, nearly all of it for Hecate.
"""

from __future__ import annotations

import hecate
import mpipemoe
import parm
import schemoe
import tutel
from common import HEADER, Claim, table, write

PAPERS = {"Parm": parm, "ScheMoE": schemoe, "MPipeMoE": mpipemoe, "Tutel": tutel, "Hecate": hecate}


NOT_TRIED = (
    "Parm: table V (whole models)",
    "ScheMoE: table 6 and whatever else is about accuracy; Faster-MoE's rows",
    "MPipeMoE: speed-ups over FastMoE and FasterMoE (figure 8), which depend on these systems' own costs",
    "Tutel: the gap between P1 and P2 (figure 3), of which neither W nor E nor the tokens are given; SwinV2-MoE",
    "Hecate: figures 13 to 15 (memory, batch sizes, intervals of re-sharding)",
)


def rows(paper: str, claims: list[Claim]) -> list[list[str]]:
    return [[paper, *claim.cells()] for claim in claims]


def report() -> str:
    """The table in Markdown."""
    found = {name: module.claims() for name, module in PAPERS.items()}
    every = [claim for claims in found.values() for claim in claims]
    lines = [
        "# The papers' figures beside ours", "",
        "Made by `python benchmarks/papers/summary.py` from the scripts beside it. Nothing is measured here: ours come "
        "from the simulator and the cost model, with the presets of `moefx/costmodel/machines.py`. `bound` is what may "
        "be off for a row to count as reproduced; `fitted` says what was chosen so that figures of the same paper come "
        "out.", "",
    ]  # fmt: skip
    lines += table(("system", "rows", "within their bounds", "of those where nothing was fitted"),
                   [[name, str(len(claims)), str(sum(claim.holds for claim in claims)), _of_free(claims)]
                    for name, claims in found.items()] + [
                    ["all", str(len(every)), str(sum(claim.holds for claim in every)), _of_free(every)]])  # fmt: skip
    lines += ["", "## Rows", "",
              *table(("system", *HEADER), [row for name, claims in found.items() for row in rows(name, claims)])]
    lines += ["", "Not tried:", "", *(f"* {each}" for each in NOT_TRIED)]
    return "\n".join([*lines, ""])


def _of_free(claims: list[Claim]) -> str:
    free = [claim for claim in claims if not claim.fitted]
    return f"{sum(claim.holds for claim in free)} of {len(free)}"


if __name__ == "__main__":
    write(report, "papers.md", __doc__)
