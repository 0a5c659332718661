"""Which of its copies works on the rows of an expert, by the rank where the rows are: the dispatch.

    local     Hecate (section 4.4): a rank that has the expert keeps its rows; otherwise the ranks of its node that have
              it get equal parts, otherwise all ranks that have it
    node      the ranks of the source's node that have the expert get equal parts, otherwise all that have it
    balanced  the ranks work on as equal numbers of rows as this placement allows, then as few rows travel as these
              numbers allow
    capacity  as local, but no rank gets more rows than the busiest one under balanced

Numbers of rows alone count, all of them integers: the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moefx.errors import MoefxError

WAYS = ("local", "node", "balanced", "capacity")
SWEEPS = 24  # of `level`; most placements are even after four


def dispatch(way: str, loads: np.ndarray, held: np.ndarray, owners: Sequence[int], per_node: int) -> np.ndarray:
    """[n, k, n] int64: the rows of each source rank, by the k experts that have copies (`copied(held)`) and the rank
    that works on them. loads [n, E] int64: rows by source rank and expert; held [E, n] bool: who has which expert;
    per_node: consecutive ranks on one node."""
    if way not in WAYS:
        raise MoefxError(f"there is no dispatch {way!r}", hint=f"one of {', '.join(WAYS)}")
    chosen = copied(held)
    counts, held = loads[:, chosen], held[chosen]
    if way in ("local", "node"):
        return _evenly(counts, held, nodes_of(len(loads), per_node), local=way == "local")
    base = _at_home(loads, owners, chosen)
    rows = level(counts.sum(0), held, base)
    if way == "capacity":
        rows = _nearby(counts, held, base, nodes_of(len(loads), per_node), (base + rows.sum(0)).max())
    return split(counts, rows, per_node)


def copied(held: np.ndarray) -> np.ndarray:
    """[k]: the experts that several ranks have."""
    return np.flatnonzero(held.sum(1) > 1)


def nodes_of(ranks: int, per_node: int) -> np.ndarray:
    """[n]: the node of each rank. Where nodes do not divide the axis, as many ranks share one as surely do."""
    return np.arange(ranks) // math.gcd(ranks, per_node)


def whole(quota: np.ndarray, loads: np.ndarray, held: np.ndarray, owners: Sequence[int]) -> np.ndarray:
    """[n, E, n]: `quota` [n, k, n] of the experts with copies, and all rows of the others at home."""
    ranks, experts = loads.shape
    found = np.zeros((ranks, experts, ranks), dtype=np.int64)
    found[:, np.arange(experts), owners] = loads
    found[:, copied(held)] = quota
    return found


def by_owner(totals: np.ndarray, owners: Sequence[int], ranks: int) -> np.ndarray:
    """[n] int64: the sum of totals [E] over the experts that live on each rank."""
    found = np.zeros(ranks, dtype=np.int64)
    np.add.at(found, np.asarray(owners), totals)
    return found


def level(totals: np.ndarray, held: np.ndarray, base: np.ndarray) -> np.ndarray:
    """[k, n] int64: rows of experts, spread over the ranks that have them so that the busiest has as few as possible.

    totals [k]: rows of every expert; held [k, n] bool; base [n]: rows that a rank has besides. Expert after expert is
    poured over its ranks as water is; this never makes the busiest busier, and ends where no expert could do better,
    which is the optimum of a flow (the sum of squares is convex).
    """
    rows = _parts(totals[None], held[None])[0]
    load = base + rows.sum(0)
    where = [np.flatnonzero(each) for each in held]
    order = np.argsort(-totals, kind="stable")
    least = -(-load.sum() // len(load))
    for _ in range(SWEEPS):
        if load.max() <= least:
            break
        changed = False
        for expert in order:
            at = where[expert]
            rest = load[at] - rows[expert, at]
            new = _pour(int(totals[expert]), rest)
            changed |= bool((new != rows[expert, at]).any())
            rows[expert, at], load[at] = new, rest + new
        if not changed:
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
    group = math.gcd(ranks, per_node)
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


def _pour(total: int, filled: np.ndarray) -> np.ndarray:
    """How much of `total` goes into each vessel, of which `filled` says how full it is, for equal levels."""
    order = np.argsort(filled, kind="stable")
    low = filled[order]
    volume = low.cumsum()
    count = int((np.arange(1, len(low) + 1) * low - volume < total).sum()) or 1
    height, more = divmod(total + int(volume[count - 1]), count)
    found = np.zeros_like(filled)
    found[order[:count]] = height - low[:count] + (np.arange(count) < more)
    return found


def _nearby(counts: np.ndarray, held: np.ndarray, base: np.ndarray, nodes: np.ndarray, cap: int) -> np.ndarray:
    """[k, n]: rows by expert and rank, where rows stay on their rank and node as long as no rank has more than `cap`;
    rows for which that leaves no room go where fewest are."""
    own = np.where(held, counts.T, 0)
    wanted, free = own.sum(0), np.maximum(cap - base, 0)
    rows = np.where(wanted > free, own * free // np.maximum(wanted, 1), own)
    load = base + rows.sum(0)
    left = counts.T - rows  # [k, n], by source
    for expert in np.argsort(-left.sum(1), kind="stable"):
        for node in range(int(nodes[-1]) + 1) if nodes[-1] else ():
            here = np.flatnonzero(held[expert] & (nodes == node))
            amount = min(int(left[expert, nodes == node].sum()), int(np.maximum(cap - load[here], 0).sum()))
            if amount:
                new = _pour(amount, load[here])
                rows[expert, here] += new
                load[here] += new
                ends = left[expert, nodes == node].cumsum()
                left[expert, nodes == node] = np.diff(np.maximum(ends - amount, 0), prepend=0)
    for expert in np.argsort(-left.sum(1), kind="stable"):
        if rest := int(left[expert].sum()):
            here = np.flatnonzero(held[expert])
            new = _pour(rest, load[here])
            rows[expert, here] += new
            load[here] += new
    return rows


def _at_home(loads: np.ndarray, owners: Sequence[int], chosen: np.ndarray) -> np.ndarray:
    """[n]: the rows of the experts without copies, by the rank where they live."""
    totals = loads.sum(0)
    totals[chosen] = 0
    return by_owner(totals, owners, len(loads))
