"""Hecate's algorithm 1 (sparse materialisation): which experts are copied in a step.

Source: Hecate, section 4.2. What the text leaves open is filled in: the hottest experts are defined before the branch;
parts of slots are in proportion to the loads, with the largest remainders; ranks without free slots take no part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance
from moefx.placement.score import Costs


def algorithm_1(loads: np.ndarray, owners: Sequence[int], spare: int, costs: Costs, per_node: int) -> np.ndarray:
    """A `placement.decide.Proposal`: t is what the machine hides."""
    totals, ranks = loads.sum(0), len(loads)
    hot = balance.hottest(totals, len(totals))
    return materialise(totals, owners, ranks, overlap(costs, hot, owners, ranks, per_node), spare, per_node)


def overlap(costs: Costs, hot: np.ndarray, owners: Sequence[int], ranks: int, per_node: int) -> int:
    """How many of these experts, in their order, can be copied to all ranks in the time that hides it: the t of
    algorithm 1, by the tighter of both passes."""
    low, high = 0, len(hot)
    while low < high:
        middle = (low + high + 1) // 2
        held = np.ones((middle, ranks), dtype=bool)
        times = costs.gathers(held, np.asarray(owners)[hot[:middle]], per_node)
        if all(each <= hidden for each, hidden in zip(times, costs.hidden)):
            low = middle
        else:
            high = middle - 1
    return low


def materialise(totals: np.ndarray, owners: Sequence[int], ranks: int, overlap: int, spare: int,
                per_node: int) -> np.ndarray:
    """Algorithm 1. [E, n] bool: who has which expert. totals [E]: rows of every expert; overlap: how many experts can
    be gathered in the time that hides it (t); spare: how many copies a rank can hold (m)."""
    overlap = min(overlap, len(totals))
    spare = min(spare, overlap)
    hot = balance.hottest(totals, overlap)
    if overlap <= spare:
        held = balance.homes(owners, ranks)
        held[hot] = True
        return held
    return balance.place(_in_proportion(totals, hot, ranks * spare, ranks - 1), totals, owners, ranks, spare, per_node)


def _in_proportion(totals: np.ndarray, hot: np.ndarray, slots: int, most: int) -> np.ndarray:
    """[E]: copies of the hot experts in proportion to their rows, `slots` in all, at most `most` of each."""
    found = np.zeros(len(totals), dtype=np.int64)
    if not len(hot):
        return found
    parts, rest = np.divmod(totals[hot] * slots, totals[hot].sum())
    parts[np.argsort(-rest, kind="stable")[: slots - int(parts.sum())]] += 1
    found[hot] = np.minimum(parts, most)
    return found
