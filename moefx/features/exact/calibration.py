"""Copies that were planned by a forecast, corrected after the gate: the calibration of Hecate (section 4.2).

    before the call    copies by a forecast; each rank leaves a slot free if it has several spare ones
    behind the gate    the rows that are there are shared out among these copies, and more copies come into free slots,
                       if what they save takes longer than they are late by

So what a forecast knows travels beside other work, and what jumps is caught. Hecate runs its algorithm 1 again behind
the gate; here a transport finds what comes. Numbers of rows as in `after_gate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance, decide, quotas, tables
from moefx.placement.score import ROWS_ALONE, Costs
from moefx.placement.tables import Plan

GAIN = 0.02  # of the work: what copies must save beyond what they are late by


def forecast(loads: np.ndarray, owners: Sequence[int], slots: tuple[int, int], costs: Costs | None = None,
             per_node: int = 1) -> Plan:  # fmt: skip
    """The plan before the call, by expected loads [n, E]: "auto" with costs, else "balanced"."""
    room, spare = slots
    used = room + max(1, spare - 1)
    found = decide.plan("auto" if costs else "balanced", loads, owners, (room, used - room), costs, per_node)
    ranks, places = np.divmod(found.slots, used)
    return Plan(np.where(found.slots < 0, -1, ranks * (room + spare) + places), found.ends)


def plan(counts: np.ndarray, before: np.ndarray, slots: tuple[int, int], per_node: int = 1, costs: Costs | None = None,
         *, is_weighed: bool = True) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """counts [n, E]: the rows that there are. before [E, P]: global slots of experts and their copies, homes in column
    0. -> (slots [E, P], the same and those that came; quota [n, E, P] int64: the rows of every source). costs: None
    weighs rows alone; without `is_weighed` copies come whatever they cost."""
    table, quota, _ = _planned(counts, before, slots, per_node, costs, is_weighed=is_weighed)
    return table, quota


def seconds(expected: np.ndarray, real: np.ndarray, owners: Sequence[int], slots: tuple[int, int], costs: Costs,
            per_node: int = 1) -> float:  # fmt: skip
    """Of a step with the loads `real` [n, E], of which `expected` was the forecast; as `decide.weighed`."""
    before = forecast(expected, owners, slots, costs, per_node).slots
    *_, late = _planned(real, before, slots, per_node, costs)
    return late + costs.exposed(tables.held(before, len(real), sum(slots)), owners, per_node)


def _planned(counts: np.ndarray, before: np.ndarray, slots: tuple[int, int], per_node: int, costs: Costs | None, *,
             is_weighed: bool = True) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """As `plan`, and the seconds of experts, exchanges, and what copies are late by."""
    ways, costs, cap = decide.WAYS if costs else ("balanced",), costs or ROWS_ALONE, sum(slots)
    held, owners = tables.held(before, len(counts), cap), before[:, 0] // cap
    _, quota, kept = decide.dispatched(ways, counts, held, owners, costs, per_node)
    after = _evened(counts, held, owners, slots[1], per_node, GAIN if is_weighed else 0.0)
    if after is not None:
        _, more, seconds = decide.dispatched(ways, counts, after, owners, costs, per_node)
        came = after & ~held | balance.homes(owners, len(counts))
        seconds += costs.after_gate().exposed(came, owners, per_node)
        if seconds < (1 - GAIN) * kept or not is_weighed:
            table = _extended(before, after & ~held, slots)
            return table, _by_place(counts, more, after, table, cap), seconds
    return before, _by_place(counts, quota, held, before, cap), kept


def _evened(counts: np.ndarray, held: np.ndarray, owners: np.ndarray, spare: int, per_node: int,
            slack: float) -> np.ndarray | None:  # fmt: skip
    """[E, n] bool: who has which expert behind a transport, for which an expert on a rank is one that lives there; None
    where nothing came, or the busiest rank has no more than this much above the mean without."""
    totals, ranks = counts.sum(0), len(counts)
    rows, chosen = balance.homes(owners, ranks) * totals[:, None], quotas.copied(held)
    base = rows.sum(0) - rows[chosen].sum(0)
    rows[chosen] = quotas.level(totals[chosen], held[chosen], base)
    if rows.sum(0).max() <= max(-(-int(totals.sum()) // ranks), (1 + slack) * totals.sum() / ranks):
        return None
    free = spare - held.sum(0) + np.bincount(owners, minlength=ranks)
    experts, at = np.nonzero(rows)
    sources, place = counts[:, experts], np.full(len(held), -1)
    place[chosen] = np.arange(len(chosen))
    shared = place[experts] >= 0
    sent = quotas.split(counts[:, chosen], rows[chosen], per_node)
    sources[:, shared] = sent[:, place[experts[shared]], at[shared]]
    found, moved = held.copy(), balance.transport(sources, at.tolist(), free.tolist()) > 0
    for expert, to in zip(experts, moved):
        found[expert] |= to
    return found if (found & ~held).any() else None


def _extended(before: np.ndarray, came: np.ndarray, slots: tuple[int, int]) -> np.ndarray:
    """The table with copies of experts on these ranks, came [E, n] bool, in the first slots that are free."""
    (room, spare), found = slots, before.copy()
    used = set(before[before >= 0].tolist())
    for expert, rank in np.argwhere(came).tolist():
        first = rank * (room + spare) + room
        slot = next(slot for slot in range(first, first + spare) if slot not in used)
        used.add(slot)
        found[expert, np.flatnonzero(found[expert] < 0)[0]] = slot
    return found


def _by_place(counts: np.ndarray, quota: np.ndarray, held: np.ndarray, table: np.ndarray, cap: int) -> np.ndarray:
    """[n, E, P]: the rows of every source by expert and place; quota [n, k, n] of the experts with copies."""
    found, chosen = np.zeros((*counts.shape, table.shape[1]), dtype=np.int64), quotas.copied(held)
    found[:, :, 0] = counts
    found[:, chosen] = tables.by_place(quota, table[chosen], cap)
    return found
