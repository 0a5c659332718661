"""Hecate's two algorithms: which experts are copied in a step, and where they live for many steps.

Source: Hecate, algorithms 1 (sparse materialisation) and 2 (heterogeneous sharding), sections 4.2 and 4.3. What the
text leaves open is filled in: the hottest experts are defined before the branch; parts of slots are in proportion to
the loads, with the largest remainders; ranks without free slots take no part; slots per rank are rounded up; hot
experts go to nodes in turn, so that no node sends all the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance, shares

GAIN = 32  # homes move if what the busiest ranks have falls by more than one part in so many


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


def reshard(loads: np.ndarray, owners: Sequence[tuple[int, ...]], ranks: int, per_node: int, rooms: Sequence[int],
            overlap: int | None = None) -> list[tuple[int, ...]]:
    """Algorithm 2: where the experts of all layers live from now on.

    loads [L, E]: rows of every expert by layer. owners: where they live now. rooms: how many experts of a layer may
    live on one rank. overlap: how many of a layer's experts copies take care of (t); None: those that are more than a
    rank's even part. Gives `owners` back if the busiest ranks would gain little.
    """
    found = _shard(loads, ranks, per_node, rooms, hot := [_hot(each, ranks, overlap) for each in loads])
    before, after = (sum(_busiest(each, homes, cold, ranks) for each, homes, cold in zip(loads, at, hot))
                     for at in (owners, found))  # fmt: skip
    return found if (before - after) * GAIN > before else [tuple(each) for each in owners]


def _hot(totals: np.ndarray, ranks: int, overlap: int | None) -> np.ndarray:
    """[E] bool: the experts that copies take care of."""
    if overlap is None:
        return totals * ranks > totals.sum()
    hot = np.zeros(len(totals), dtype=bool)
    hot[balance.hottest(totals, overlap)] = True
    return hot


def _busiest(totals: np.ndarray, owners: Sequence[int], hot: np.ndarray, ranks: int) -> int:
    """The rows of the cold experts on the rank that has the most of them."""
    return int(shares.by_owner(np.where(hot, 0, totals), owners, ranks).max())


def _shard(loads: np.ndarray, ranks: int, per_node: int, rooms: Sequence[int],
           hot: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    layers, experts = loads.shape
    nodes = shares.nodes_of(ranks, per_node)
    free = np.full(ranks, -(-layers * experts // ranks))  # over all layers
    room = np.repeat(np.asarray(rooms)[:, None], ranks, axis=1)
    found = np.full((layers, experts), -1)

    def put(layer: int, expert: int, weights: np.ndarray) -> int:
        """On the node with the least weight, there on the rank with the least; of equal ones on those with the fewest
        slots. Where only ranks are left whose share of all layers is full, on one of them."""
        can = np.flatnonzero(room[layer] > 0)
        can = can[free[can] > 0] if (free[can] > 0).any() else can
        by_node, slots = (np.bincount(nodes, weights=each, minlength=ranks)[nodes] for each in (weights, free))
        rank = can[np.lexsort((free[can], weights[can], nodes[can], slots[can], by_node[can]))[0]]
        found[layer, expert] = rank
        free[rank] -= 1
        room[layer, rank] -= 1
        return rank

    cold = [np.where(each, 0, totals) for each, totals in zip(hot, loads)]
    for layer in sorted(range(layers), key=lambda layer: -int(cold[layer].max())):
        load = np.zeros(ranks, dtype=np.int64)
        for expert in np.argsort(-loads[layer], kind="stable"):
            if not hot[layer][expert]:
                load[put(layer, expert, load)] += loads[layer, expert]
    for layer in range(layers):
        number = np.zeros(ranks, dtype=np.int64)
        for expert in np.argsort(-loads[layer], kind="stable"):
            if hot[layer][expert]:
                number[put(layer, expert, number)] += 1
    return [tuple(map(int, each)) for each in found]
