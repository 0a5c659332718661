"""Which ranks get copies of which experts: greedy slots, over all ranks or node by node, and transports.

Greedy slots spread the hottest experts, and rows then stay near. A transport evens out ranks, and moves as few experts
as it can: it hands what a rank has too much to ranks that have too little, expert by expert, as in Walker's alias
method (1977): every step fills one rank or empties one, so n ranks are even after at most n - 1 copies, unless an
expert is too small for a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from moefx.placement import shares

TRIALS = 8  # of a transport's cap, where even ranks are out of reach
SWAPS = 128  # trials of single copies in such a case, for all ranks together


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


def by_node(totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int, per_node: int, top: int) -> np.ndarray:
    """[E, n] bool: who has which expert. The `top` hottest come to every node once, so that their rows need not leave
    it; then slots that are left go to the experts with the most rows per copy, inside the nodes that have them. Always
    to the rank with the fewest rows."""
    held, free, nodes = homes(owners, ranks), np.full(ranks, spare), shares.nodes_of(ranks, per_node)
    members = [np.flatnonzero(nodes == node) for node in range(int(nodes[-1]) + 1)]
    hot = hottest(totals, top)
    rows = totals << 10  # of an expert, in each node that has it; integers, since a product's sums must not be rounded
    rows[hot] //= len(members)
    load = rows @ held
    for expert in hot:
        for here in members:
            can = here[free[here] > 0]
            if len(can) and not held[expert, here].any():
                rank = can[load[can].argmin()]
                held[expert, rank] = True
                free[rank] -= 1
                load[rank] += rows[expert]
    for here in members:
        parts = np.where(held[:, here].any(1), rows, 0)
        while free[here].any() and parts.any():
            expert = int(parts.argmax())
            can, have = here[(free[here] > 0) & ~held[expert, here]], here[held[expert, here]]
            if not len(can):
                parts[expert] = 0
                continue
            rank, part = can[load[can].argmin()], rows[expert] // (len(have) + 1)
            load[have] += part - parts[expert]
            load[rank] += part
            held[expert, rank], parts[expert] = True, part
            free[rank] -= 1
    return held


def transport(loads: np.ndarray, owners: Sequence[int], spare: int) -> np.ndarray:
    """[E, n] int64: the rows of every expert that each rank works on. loads [n, E]: rows by source rank and expert.

    All ranks get the same number of rows to within one, if at most `spare` copies on each rank can do that; otherwise
    the busiest gets as few as a search of its cap finds. At most n - 1 copies, and those that small experts force.
    """
    ranks, totals = len(loads), loads.sum(0)
    load = shares.by_owner(totals, owners, ranks)
    rows, busiest = first, _ = _move(loads, totals, owners, even(load), spare)
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
    return min((_swapped(each, totals, owners, spare) for each in (first, rows)), key=lambda each: each.sum(0).max())


def _swapped(rows: np.ndarray, totals: np.ndarray, owners: Sequence[int], spare: int) -> np.ndarray:
    """Where slots are too few: rows [E, n] poured again over the ranks that have the experts, after a search of single
    copies that come, or take another's place, and make the ranks more even."""
    held = (rows > 0) | homes(owners, rows.shape[1])
    best = found = _poured(totals, held, owners)
    left, going = SWAPS // rows.shape[1], True
    while going:
        going = False
        for tried in itertools.islice(_swaps(found.sum(0), held, owners, spare), left):
            left -= 1
            new = _poured(totals, tried, owners)
            if (new.sum(0) ** 2).sum() < (found.sum(0) ** 2).sum():
                held, found, going = tried, new, True
                best = min(best, new, key=lambda each: each.sum(0).max())
                break
    return best


def _swaps(load: np.ndarray, held: np.ndarray, owners: Sequence[int], spare: int) -> Iterator[np.ndarray]:
    """Who has which expert, if a rank with few rows has an expert of the busiest one, too."""
    copies = held & ~homes(owners, len(load))
    for rank in np.argsort(load, kind="stable")[:-1]:
        full = copies[:, rank].sum() >= spare
        for expert in np.flatnonzero(held[:, load.argmax()] & ~held[:, rank]):
            for gone in np.flatnonzero(copies[:, rank]) if full else [expert]:
                tried = held.copy()
                tried[gone, rank] = False
                tried[expert, rank] = True
                yield tried


def _poured(totals: np.ndarray, held: np.ndarray, owners: Sequence[int]) -> np.ndarray:
    """[E, n]: rows of every expert, over the ranks that have it, as even as that can be."""
    chosen = shares.copied(held)
    rows = totals[:, None] * homes(owners, held.shape[1])
    rows[chosen] = 0
    rows[chosen] = shares.level(totals[chosen], held[chosen], rows.sum(0))
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
    ranks, owners = len(targets), np.asarray(owners)
    rows = totals[:, None] * homes(owners, ranks)
    want = targets - rows.sum(0)  # of every rank: how many rows it lacks
    free = np.full(ranks, spare)
    mine = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    while want.min() < 0 and ((want > 0) & (free > 0)).any():
        hot, cold, amount = _step(rows, want, free, mine)
        experts = mine[hot]
        expert = experts[_expert(rows[experts, hot], amount, rows[experts, cold], loads[cold, experts])]
        if not rows[expert, cold]:
            free[cold] -= 1
        rows[expert, hot] -= amount
        rows[expert, cold] += amount
        want[hot] += amount
        want[cold] -= amount
    return rows, int((targets - want).max())


def _step(rows: np.ndarray, want: np.ndarray, free: np.ndarray, mine: list[np.ndarray]) -> tuple[int, int, int]:
    """Who gives whom how many rows of one expert: the hottest rank that brings one of both to its target. If there is
    none, because experts are too small, the hottest one gives what it can."""
    lack = np.where(free > 0, np.maximum(want, 0), 0)
    slack = int(lack.sum() + np.minimum(want, 0).sum())  # what ranks may lack in the end
    for hot in np.argsort(want, kind="stable").tolist():
        if want[hot] >= 0:
            break
        over, largest = -int(want[hot]), int(rows[mine[hot], hot].max())
        enough = lack >= over
        empties = enough & ((free > 1) | (lack - over <= slack)) & (over <= largest)
        if empties.any():
            return hot, int(np.where(empties, lack, lack.max() + 1).argmin()), over
        fills = enough & (lack <= largest)  # even if the giver then takes from others
        if fills.any():
            cold = int(np.where(fills, lack, lack.max() + 1).argmin())
            return hot, cold, int(lack[cold])
        fills = (lack > 0) & (lack <= largest)
        if fills.any():
            cold = int(np.where(fills, lack, 0).argmax())
            return hot, cold, int(lack[cold])
    hot, cold = int(want.argmin()), int(lack.argmax())
    most = int(lack[cold]) if free[cold] == 1 else min(-int(want[hot]), int(lack[cold]))
    return hot, cold, min(most, int(rows[mine[hot], hot].max()))


def _expert(sizes: np.ndarray, amount: int, there: np.ndarray, local: np.ndarray) -> int:
    """Of a rank's experts with at least `amount` rows: one that the taker has, or one of which it has most rows."""
    able = np.flatnonzero(sizes >= amount)
    return able[np.lexsort((-sizes[able], -np.minimum(local[able], amount), there[able] == 0))[0]]
