"""Hecate's algorithm 2 (heterogeneous sharding): where experts live for many steps.

Source: Hecate, section 4.3. What the text leaves open is filled in: slots per rank are rounded up; hot experts go to
nodes in turn, so that no node sends all the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefx.placement import balance, quotas

GAIN = 32  # homes move if what the busiest ranks have falls by more than one part in so many


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
    return int(quotas.by_owner(np.where(hot, 0, totals), owners, ranks).max())


def _shard(loads: np.ndarray, ranks: int, per_node: int, rooms: Sequence[int],
           hot: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    layers, experts = loads.shape
    nodes = quotas.nodes_of(ranks, per_node)
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
