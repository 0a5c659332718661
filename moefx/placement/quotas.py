"""Which of its copies works on the rows of an expert, by the rank where the rows are: the dispatch.

    local     Hecate (section 4.4): a rank that has the expert keeps its rows; otherwise the ranks of its node that have
              it get equal parts, otherwise all ranks that have it
    node      the ranks of the source's node that have the expert get equal parts, otherwise all that have it
    balanced  the ranks work on as equal numbers of rows as this placement allows, then as few rows travel as these
              numbers allow
    capacity  as local, until a rank has as many rows as the busiest one under balanced; the rest where fewest are

Numbers of rows alone count, all of them integers: the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moefx.errors import MoefxError

WAYS = ("local", "node", "balanced", "capacity")
SWEEPS = 24  # of `level`; most placements are even after four


def dispatch(ways: Sequence[str], loads: np.ndarray, held: np.ndarray, owners: Sequence[int],
             per_node: int) -> list[np.ndarray]:
    """By each of these ways, [n, k, n] int64: the rows of each source rank, by the k experts that have copies
    (`copied(held)`) and the rank that works on them. loads [n, E] int64: rows by source rank and expert; held [E, n]
    bool: who has which expert; per_node: consecutive ranks on one node."""
    if unknown := [way for way in ways if way not in WAYS]:
        raise MoefxError(f"there is no dispatch {unknown[0]!r}", hint=f"one of {', '.join(WAYS)}")
    chosen = copied(held)
    counts, held, nodes = loads[:, chosen], held[chosen], nodes_of(len(loads), per_node)
    base = by_owner(loads.sum(0), owners, len(loads)) - by_owner(counts.sum(0), np.asarray(owners)[chosen], len(loads))
    even = level(counts.sum(0), held, base) if {"balanced", "capacity"} & {*ways} else base
    made = {
        "local": lambda: _evenly(counts, held, nodes, local=True),
        "node": lambda: _evenly(counts, held, nodes, local=False),
        "balanced": lambda: split(counts, even, per_node),
        "capacity": lambda: split(counts, _nearby(counts, held, base, nodes, (base + even.sum(0)).max()), per_node),
    }
    return [made[way]() for way in ways]


def copied(held: np.ndarray) -> np.ndarray:
    """[k]: the experts that several ranks have."""
    return np.flatnonzero(held.sum(1) > 1)


def group_of(ranks: int, per_node: int) -> int:
    """How many consecutive ranks share a node. Where nodes do not divide the axis, as many as surely do."""
    return ranks if per_node >= ranks else math.gcd(ranks, per_node)


def nodes_of(ranks: int, per_node: int) -> np.ndarray:
    """[n]: the node of each rank."""
    return np.arange(ranks) // group_of(ranks, per_node)


def by_owner(totals: np.ndarray, owners: Sequence[int], ranks: int) -> np.ndarray:
    """[n] int64: the sum of totals [E] over the experts that live on each rank."""
    return np.bincount(owners, weights=totals, minlength=ranks).astype(np.int64)  # exact up to 2 ** 53


def level(totals: np.ndarray, held: np.ndarray, base: np.ndarray) -> np.ndarray:
    """[k, n] int64: rows of experts, spread over the ranks that have them so that the busiest has as few as possible.

    totals [k]: rows of every expert; held [k, n] bool; base [n]: rows that a rank has besides. Expert after expert is
    poured over its ranks as water is; this never makes the busiest busier, and ends where no expert could do better,
    which is the optimum of a flow (the sum of squares is convex).
    """
    where: list[list[int]] = [[] for _ in held]
    for expert, rank in np.argwhere(held).tolist():
        where[expert].append(rank)
    return np.array(fill(totals.tolist(), where, base.tolist()), dtype=np.int64).reshape(held.shape)


def fill(totals: Sequence[int], where: Sequence[Sequence[int]], load: list[int]) -> list[list[int]]:
    """`level` in plain numbers, which are faster than arrays for so few: [k][n] rows. where [k]: the ranks that have
    each expert; load [n]: rows that a rank has besides, with these rows afterwards."""
    rows = [[0] * len(load) for _ in where]
    sharing: list[list[int]] = [[] for _ in load]
    for expert, ranks in enumerate(where):
        for rank in ranks:
            sharing[rank].append(expert)
    enough = -(-(sum(load) + sum(totals)) // len(load)) * (1 + 1 / 256)
    order = sorted(range(len(where)), key=lambda expert: -totals[expert])
    stale = [True] * len(where)  # where others have changed what ranks have since an expert was poured
    for _ in range(SWEEPS):
        for expert in order:
            if stale[expert]:
                for rank in _pour(totals[expert], where[expert], load, rows[expert]):
                    for other in sharing[rank]:
                        stale[other] = True
                stale[expert] = False
        if not any(stale) or max(load) <= enough:
            break
    return rows


def split(counts: np.ndarray, rows: np.ndarray, per_node: int) -> np.ndarray:
    """[n, k, n] int64: who sends whom how many rows, if of every expert each rank gets as many as `rows` [k, n] says.
    counts [n, k]: the rows of every source; both have the same sum per expert. As many as possible stay on their rank,
    then on their node."""
    ranks, experts = counts.shape
    found = np.zeros((ranks, experts, ranks), dtype=np.int64)
    here = np.arange(ranks)
    stay = np.minimum(counts.T, rows)
    found[here, :, here] = stay.T
    sent, taken = counts.T - stay, rows - stay  # [k, n] both
    group = group_of(ranks, per_node)
    if 1 < group < ranks:
        shape = (experts, ranks // group, group)
        inside = _meet(sent.reshape(shape), taken.reshape(shape))  # [k, nodes, s, d]
        sent, taken = sent - inside.sum(3).reshape(sent.shape), taken - inside.sum(2).reshape(sent.shape)
        nodes = np.arange(ranks // group)
        found.reshape(len(nodes), group, experts, len(nodes), group)[nodes, :, :, nodes] += inside.transpose(1, 2, 0, 3)
    return found + _meet(sent, taken).transpose(1, 0, 2)


def _meet(sent: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """[.., s, d]: what goes from where to where, if both sides are laid out in a line, one after the other."""
    ends, tails = sent.cumsum(-1)[..., :, None], taken.cumsum(-1)[..., None, :]
    starts, heads = ends - sent[..., :, None], tails - taken[..., None, :]
    return np.maximum(np.minimum(ends, tails) - np.maximum(starts, heads), 0)


def _evenly(counts: np.ndarray, held: np.ndarray, nodes: np.ndarray, *, local: bool) -> np.ndarray:
    """[n, k, n]: the dispatch of Hecate; without `local` a rank's own copy is one of its node's."""
    near = held & (nodes[:, None, None] == nodes)  # [n, k, n]
    allowed = np.where(near.any(2, keepdims=True), near, held)
    if local:
        own = np.eye(len(counts), dtype=bool)[:, None, :] & held
        allowed = np.where(own.any(2, keepdims=True), own, allowed)
    return _parts(counts, allowed)


def _parts(counts: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """[s, k, n]: counts [s, k] in equal parts over the ranks that are allowed ([s, k, n] bool). What is left over goes
    to other ranks for every source, so that their sums are equal, too."""
    among = allowed.sum(2)
    each, more = np.divmod(counts, among)
    start = more.cumsum(0) - more
    place = allowed.cumsum(2) - 1
    return allowed * (each[:, :, None] + ((place - start[:, :, None]) % among[:, :, None] < more[:, :, None]))


def _pour(total: int, ranks: Sequence[int], load: list[int], rows: list[int]) -> Sequence[int]:
    """Pour `total` into these ranks for equal levels, in place of the `rows` that they have of it; `load` is how full
    they are with them. -> the ranks for which this changes anything."""
    if len(ranks) == 2:  # most experts with copies: three times as fast
        low, high = ranks
        level, other = load[low] - rows[low], load[high] - rows[high]
        if level > other:
            low, high, level, other = high, low, other, level
        above = max(0, total + level - other) // 2
        if rows[high] == above and rows[low] == total - above:
            return ()
        rows[low], rows[high] = total - above, above
        load[low], load[high] = level + rows[low], other + above
        return ranks
    filled = sorted([(load[rank] - rows[rank], rank) for rank in ranks])
    volume = count = 0
    for level, _ in filled:
        if count and count * level - volume >= total:
            break
        volume, count = volume + level, count + 1
    height, more = divmod(total + volume, count)
    changed = []
    for place, (level, rank) in enumerate(filled):
        new = height - level + (place < more) if place < count else 0
        if new != rows[rank]:
            load[rank], rows[rank] = level + new, new
            changed.append(rank)
    return changed


def _nearby(counts: np.ndarray, held: np.ndarray, base: np.ndarray, nodes: np.ndarray, cap: int) -> np.ndarray:
    """[k, n]: rows by expert and rank, where rows stay on their rank and node as long as no rank has more than `cap`;
    rows for which that leaves no room go where fewest are."""
    own = np.where(held, counts.T, 0)
    wanted, free = own.sum(0), np.maximum(cap - base, 0)
    stay = np.where(wanted > free, own * free // np.maximum(wanted, 1), own)
    load, rows = (base + stay.sum(0)).tolist(), stay.tolist()
    left = np.add.reduceat(counts.T - stay, np.flatnonzero(np.diff(nodes, prepend=-1)), axis=1).tolist()  # by node
    order = np.argsort(-counts.sum(0), kind="stable").tolist()
    where: list[list[list[int]]] = [[[] for _ in left[0]] for _ in held]
    node_of = nodes.tolist()
    for expert, rank in np.argwhere(held).tolist():
        where[expert][node_of[rank]].append(rank)
    for expert in order:
        for node, here in enumerate(where[expert]):
            amount = min(left[expert][node], sum(max(cap - load[rank], 0) for rank in here))
            if amount:
                _add(amount, here, load, rows[expert])
                left[expert][node] -= amount
    for expert in order:
        if rest := sum(left[expert]):
            _add(rest, [rank for here in where[expert] for rank in here], load, rows[expert])
    return np.array(rows, dtype=np.int64).reshape(held.shape)


def _add(amount: int, ranks: list[int], load: list[int], rows: list[int]) -> None:
    """Pour more rows into these ranks."""
    more = [0] * len(rows)
    _pour(amount, ranks, load, more)
    for rank in ranks:
        rows[rank] += more[rank]
