"""What `explain` says of r: to how many of the ranks that share an expert a token's rows go."""

from __future__ import annotations

import math
from typing import Any

from moefx.planning.plans import RegionPlan


def lines_of(plan: RegionPlan) -> list[str]:
    """T(r), r* and f* of a region, and the best predicted time with each r that is open; nothing where experts are on
    one rank each."""
    found = plan.adaptive
    if found is None:
        return []
    most, best = max(found.seconds, default=1), best_by_degree(plan)
    lines = []
    for r in sorted(found.seconds, reverse=True):
        said = f"forward and backward {1e3 * best[r]:.3f} ms at best" if r in best else "not open"
        what = {0: "no row moves", most: "weights stay"}.get(r, f"weights are gathered over {most // max(r, 1)} ranks")
        lines.append(f"r = {r} ({what}): {said}; T({r}) = {1e3 * found.seconds[r]:.3f} ms = {found.formulas[r]}")
    best_r = ""
    if most > 1:  # with one rank to an expert there is no r between
        gain = (f"with more than f* = {found.crossover:.3g} times the rows r = 1 is faster than r = {most}; "
                if found.crossover < math.inf else f"r = {most} is faster than r = 1 whatever the rows; ")  # fmt: skip
        best_r = f"r* = {found.optimum:.3g}; {gain}"
    lines.append(f"{best_r}q = {found.rows:.0f} bytes of rows, p = {found.weights:.0f} of weights")
    return lines


def best_by_degree(plan: RegionPlan) -> dict[int, float]:
    """Seconds of the fastest candidate, by r."""
    most = 1 if plan.adaptive is None else max(plan.adaptive.seconds, default=1)
    found: dict[int, float] = {}
    for each in plan.candidates:
        r = most if each.choice.r is None else each.choice.r
        found[r] = min(each.seconds, found.get(r, math.inf))
    return found


def as_dict(plan: RegionPlan) -> dict[str, Any] | None:
    """The same as data; None: there is no r to choose."""
    found = plan.adaptive
    if found is None:
        return None
    best = best_by_degree(plan)
    table = [{"r": r, "transfers_s": seconds, "formula": str(found.formulas[r]), "best_s": best.get(r)}
             for r, seconds in found.seconds.items()]  # fmt: skip
    is_open = max(found.seconds, default=1) > 1
    return {"optimum": found.optimum if is_open else None, "crossover": found.crossover if is_open else None,
            "rows_bytes": found.rows, "weights_bytes": found.weights, "by_r": table}  # fmt: skip
