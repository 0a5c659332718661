"""Which ranks get copies of which experts: greedy slots, and transports that even out the ranks.

Greedy slots spread the hottest experts, and rows then stay near. A transport moves as few experts as it can: it hands
what a rank has too much to ranks that have too little, expert by expert, as in Walker's alias method (1977): every step
fills one rank or empties one, so n ranks are even after at most n - 1 copies, unless an expert is too small for a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import shares

TRIALS = 12  # of a transport's cap, where even ranks are out of reach


def homes(owners: Sequence[int], ranks: int) -> np.ndarray:
    """[E, n] bool: which rank each expert lives on."""
    return np.asarray(owners)[:, None] == np.arange(ranks)


def greedy(totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int, per_node: int, top: int) -> np.ndarray:
    """[E, n] bool: who has which expert. The next slot goes to the expert with the most rows per copy, which makes the
    largest part of an expert as small as it can be (theory of apportionment: a divisor method); only the `top` hottest
    get any."""
    return place(greedy_numbers(totals, top, ranks * spare, ranks - 1), totals, owners, ranks, spare, per_node)


def greedy_numbers(totals: np.ndarray, top: int, slots: int, most: int) -> np.ndarray:
    """[E]: how many copies besides the home, `slots` in all and at most `most` of one expert."""
    found = np.zeros(len(totals), dtype=np.int64)
    parts = np.zeros(len(totals))
    hot = hottest(totals, top)
    parts[hot] = totals[hot]
    for _ in range(slots if most else 0):
        expert = int(parts.argmax())
        if parts[expert] <= 0:
            break
        found[expert] += 1
        parts[expert] = totals[expert] / (found[expert] + 1) if found[expert] < most else 0
    return found


def hottest(totals: np.ndarray, top: int) -> np.ndarray:
    """The `top` experts with the most rows, those without rows left out."""
    order = np.argsort(-totals, kind="stable")[:top]
    return order[totals[order] > 0]


def place(numbers: np.ndarray, totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int,
          per_node: int) -> np.ndarray:
    """[E, n] bool: `numbers` [E] copies of every expert, the hottest first: each on a node that does not have it yet,
    of these on the one with the most free slots, and there on the rank with the most."""
    held = homes(owners, ranks)
    nodes = shares.nodes_of(ranks, per_node)
    free = np.full(ranks, spare)
    for expert in np.argsort(-totals, kind="stable"):
        for _ in range(int(numbers[expert])):
            can = np.flatnonzero(~held[expert] & (free > 0))
            if not len(can):
                break
            has = np.bincount(nodes[held[expert]], minlength=ranks) > 0
            room = np.bincount(nodes, weights=free, minlength=ranks)
            rank = can[np.lexsort((-free[can], nodes[can], -room[nodes[can]], has[nodes[can]]))[0]]
            held[expert, rank] = True
            free[rank] -= 1
    return held


def transport(loads: np.ndarray, owners: Sequence[int], spare: int) -> np.ndarray:
    """[E, n] int64: the rows of every expert that each rank works on. loads [n, E]: rows by source rank and expert.

    All ranks get the same number of rows to within one, if at most `spare` copies on each rank can do that; otherwise
    the busiest gets as few as a search of its cap finds. At most n - 1 copies, and those that small experts force.
    """
    ranks, totals = len(loads), loads.sum(0)
    load = shares.by_owner(totals, owners, ranks)
    rows, busiest = _move(loads, totals, owners, even(load), spare)
    low, high = -(-int(load.sum()) // ranks), busiest
    if high <= low:
        return rows
    for _ in range(TRIALS):
        if high - low <= max(1, low >> 10):
            break
        cap = (low + high) // 2
        tried, busiest = _move(loads, totals, owners, np.full(ranks, cap), spare)
        if busiest < high:
            rows, high = tried, busiest
        if busiest > cap:
            low = cap
    held = (rows > 0) | homes(owners, ranks)
    chosen = shares.copied(held)
    if len(chosen):
        base = rows.sum(0) - rows[chosen].sum(0)
        rows[chosen] = shares.level(totals[chosen], held[chosen], base)
    return rows


def even(load: np.ndarray) -> np.ndarray:
    """[n]: as many rows for every rank to within one. Where it is one more, it is for those that have just these, then
    for those with the most."""
    each, more = divmod(int(load.sum()), len(load))
    targets = np.full(len(load), each)
    targets[np.lexsort((-load, load != each + 1))[:more]] += 1
    return targets


def _move(loads: np.ndarray, totals: np.ndarray, owners: Sequence[int], targets: np.ndarray,
          spare: int) -> tuple[np.ndarray, int]:
    """(rows [E, n], the most rows of a rank) after copies have taken what ranks have above their targets."""
    ranks = len(targets)
    rows = totals[:, None] * homes(owners, ranks)
    want = targets - rows.sum(0)  # of every rank: how many rows it lacks
    free = np.full(ranks, spare)
    mine = [np.flatnonzero(np.asarray(owners) == rank) for rank in range(ranks)]
    while want.min() < 0:
        hot = int(want.argmin())
        over, sizes = -int(want[hot]), rows[mine[hot], hot]
        lack = np.where(free > 0, np.maximum(want, 0), 0)
        cold = _partner(lack, over, int(sizes.max()))
        if cold is None:
            break
        slack = int(want[free > 0].sum() + np.minimum(want[free == 0], 0).sum())  # what may stay empty in the end
        amount = _amount(over, int(lack[cold]), int(sizes.max()), int(free[cold]), slack)
        expert = _expert(mine[hot], sizes, amount, rows[mine[hot], cold], loads[cold, mine[hot]])
        if not rows[expert, cold]:
            free[cold] -= 1
        rows[expert, hot] -= amount
        rows[expert, cold] += amount
        want[hot] += amount
        want[cold] -= amount
    return rows, int((targets - want).max())


def _partner(lack: np.ndarray, over: int, largest: int) -> int | None:
    """The rank that takes rows from one that has `over` too many, and an expert of `largest` rows."""
    if not lack.any():
        return None
    enough = np.flatnonzero(lack >= over)
    if len(enough) and largest >= over:
        return int(enough[lack[enough].argmin()])
    fits = np.where(lack <= largest, lack, 0)
    return int(fits.argmax()) if fits.any() else int(lack.argmax())


def _amount(over: int, lack: int, largest: int, free: int, slack: int) -> int:
    """How many rows go over: what is too much; but what fills the taker, if it could not be filled later."""
    if over < lack and (free > 1 or lack - over <= slack):
        return min(over, largest)
    return min(lack, largest)


def _expert(experts: np.ndarray, sizes: np.ndarray, amount: int, there: np.ndarray, local: np.ndarray) -> int:
    """Of a rank's experts with at least `amount` rows: one that the taker has, or one of which it has most rows."""
    able = np.flatnonzero(sizes >= amount)
    best = np.lexsort((-sizes[able], -np.minimum(local[able], amount), there[able] == 0))[0]
    return int(experts[able[best]])
