"""Routings that are skewed in many ways, and what the best placement of them is: oracles of tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from moefx.placement.tables import contiguous


@dataclass(frozen=True)
class Skew:
    """loads [n, E]: rows by source rank and expert; owners [E]; slots: room and spare."""

    name: str
    loads: NDArray
    owners: tuple[int, ...]
    slots: tuple[int, int]

    @property
    def homes(self) -> NDArray:
        """[n]: the rows of the experts that live on each rank."""
        return np.bincount(self.owners, weights=self.loads.sum(0), minlength=len(self.loads)).astype(np.int64)


def zipf(rng: np.random.Generator, ranks: int, experts: int, rows: int, s: float) -> NDArray:
    """[n, E]: `rows` of every rank over experts whose popularity falls as rank ** -s, in an order that is drawn."""
    popular = rng.permutation(np.arange(1, experts + 1) ** -float(s))
    return rng.multinomial(rows, popular / popular.sum(), size=ranks)


def skews(seed: int, number: int, ranks: tuple[int, ...] = (2, 3, 4, 6, 8)) -> Iterator[Skew]:
    """Random cases: zipf 0 to 2.5, all to one expert or rank, none at all, fewer experts than ranks, uneven homes,
    ranks without homes, unequal numbers of rows."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        n = int(rng.choice(ranks))
        experts = int(rng.choice([max(1, n - 1), n, 2 * n, 4 * n, 8 * n]))
        kind = str(rng.choice(["zipf"] * 5 + ["one expert", "one rank", "none", "unequal"]))
        loads = zipf(rng, n, experts, int(rng.integers(1, 4000)), float(rng.uniform(0, 2.5)))
        owners = contiguous(experts, n)
        if rng.random() < 0.3:
            owners = tuple(int(rank) for rank in rng.integers(0, n, experts))
        if kind == "one expert":
            loads = np.where(np.arange(experts) == rng.integers(experts), loads.sum(1, keepdims=True), 0)
        elif kind == "one rank":
            loads = loads * (np.array(owners) == owners[0])
        elif kind == "none":
            loads = loads * 0
        elif kind == "unequal":
            loads = loads * rng.integers(0, 3, (n, 1))
        room = int(np.bincount(owners, minlength=n).max())
        yield Skew(kind, loads.astype(np.int64), owners, (room, int(rng.integers(1, 4))))


def traces(rng: np.random.Generator, steps: int, drift: float, jump: int = 0) -> Iterator[NDArray]:
    """Loads [8, 16] of one step after the other: experts' popularity walks, and every `jump` steps it is dealt out
    again."""
    popular = rng.standard_normal(16)
    for step in range(steps):
        popular = popular + drift * rng.standard_normal(16)
        if step and jump and not step % jump:
            popular = rng.permutation(popular)
        yield rng.multinomial(4096, np.exp(popular) / np.exp(popular).sum(), size=8)


def fits(totals: NDArray, held: NDArray, cap: float) -> bool:
    """Whether ranks that have these experts (held [E, n]) can share out rows (totals [E]) with at most `cap` each: by
    the maximum flow."""
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for expert, rank in np.argwhere(held):
        graph.add_edge("source", ("expert", expert), capacity=int(totals[expert]))
        graph.add_edge(("expert", expert), ("rank", rank))
        graph.add_edge(("rank", rank), "sink", capacity=int(cap))
    return nx.maximum_flow_value(graph, "source", "sink") >= totals.sum()


def least_cap(totals: NDArray, held: NDArray, known: int) -> int:
    """The least cap that `fits`, to 0.2 %, if `known` does."""
    low, high = -(-int(totals.sum()) // held.shape[1]) - 1, known
    while high - low > max(1, high // 500):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(totals, held, middle) else (middle, high)
    return high


def least_caps(totals: NDArray, held: NDArray) -> NDArray:
    """[S]: the least cap for each of totals [S, E], rows that can be divided: by the theorem of Hall, the largest mean
    of experts that only some ranks have, over all sets of ranks."""
    ranks = held.shape[1]
    bits = 1 << np.arange(ranks)
    sets = np.arange(1, 1 << ranks)
    inside = ~sets[:, None] & held @ bits == 0  # [sets, E]
    return (totals @ inside.T / (sets[:, None] & bits > 0).sum(1)).max(1)


def least_mean(totals: NDArray, held: NDArray, rounds: int = 600) -> float:
    """A bound: whatever fixed shares of its rows the ranks that have an expert get, the busiest rank over the least cap
    is as much in the mean of totals [S, E].

    Any weights [S, n] of the ranks, of sum 1 in each case, give such a bound: the mean load by weight, every expert
    wholly on the rank where it weighs least. The game of weights against shares (exponentiated gradients that expect
    the last one again) finds good ones: 0.002 below what a linear program finds, in the mean.
    """
    cases = len(totals)
    rows = totals / np.maximum(least_caps(totals, held), 1e-9)[:, None]
    copied = held.sum(1) > 1
    base, rows, held = rows[:, ~copied] @ held[~copied], rows[:, copied], held[copied]
    size = rows.mean(0)[:, None] + 1e-9
    weights, shares = np.zeros_like(base, dtype=float), np.where(held, 0.0, -np.inf)  # their logarithms
    load, cost, mean = np.zeros_like(weights), np.zeros(held.shape), np.zeros_like(weights)
    for number in range(rounds):
        weight, share = _normal(weights + load), _normal(shares - cost)
        load, cost = base + rows @ share, rows.T @ weight / cases / size
        weights, shares = weights + load, shares - cost
        mean += number * weight
    mean /= mean.sum(1, keepdims=True)
    return max(1.0, float((base * mean).sum() / cases + np.where(held, rows.T @ mean / cases, np.inf).min(1).sum()))


def _normal(logarithms: NDArray) -> NDArray:
    """Numbers with these logarithms, scaled so that every row sums to 1."""
    found = np.exp(logarithms - logarithms.max(1, keepdims=True))
    return found / found.sum(1, keepdims=True)


def fewest_copies(homes: NDArray) -> int:
    """No placement can make ranks with these rows at home even to within one with fewer copies than this.

    Ranks that copies tie together must be even among themselves, and tying k ranks together takes k - 1 copies: so at
    least n less the most groups that are even, found over all partitions. Ranks without rows to move are groups alone.
    """
    ranks, (low, more) = len(homes), divmod(int(homes.sum()), len(homes))
    bits = np.arange(1 << ranks)[:, None] >> np.arange(ranks) & 1
    size, rows = bits.sum(1), bits @ homes
    even = (rows >= size * low) & (rows <= size * (low + bool(more)))
    most = [0] * (1 << ranks)
    for mask in range(1, 1 << ranks):
        part, first = mask, mask & -mask
        most[mask] = -ranks
        while part:
            if part & first and even[part]:
                most[mask] = max(most[mask], most[mask ^ part] + 1)
            part = (part - 1) & mask
    return ranks - most[-1]
