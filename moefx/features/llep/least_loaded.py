"""LLEP's least-loaded assignment: which rows of which experts leave an overloaded rank, and where they go.

Source: Nguyen et al., "Least-Loaded Expert Parallelism" (arXiv 2601.17111, 2026), and the planner that its authors
published. Experts in the order of their rows, the most first:

    a rank's load     what it was given so far, and what experts that live there and come later have
    capacity          alpha times the mean of all ranks
    at home           as many rows as the capacity leaves there
    elsewhere         the rest, to the least loaded rank below its capacity, again and again; fewer than m rows go
                      nowhere unless they are the last ones; where no rank has room left, all to the least loaded one

Where the busiest rank has at most lambda times the mean, nothing moves. All ranks do this after every gate, with the
rows that there are, and need no message for it.

As published a rank takes any number of experts: here it has so many slots for copies, and what finds none stays at
home.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moefx.placement import after_gate, balance, exact
from moefx.placement.score import Costs

ROWS = 1024  # m, as published


@dataclass(frozen=True)
class LeastLoaded:
    """A `placement.after_gate.InCall`. capacity, rows, threshold: alpha, m, lambda."""

    capacity: float = 1.1
    rows: int | None = None
    threshold: float = 1.3

    def __call__(self, counts: np.ndarray, homes: np.ndarray, slots: tuple[int, int], per_node: int,
                 costs: Costs | None = None) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        owners = after_gate.owners_of(homes, slots)
        rows = self.assigned(counts.sum(0), owners, len(counts), slots[1], self.least(costs))
        planned = exact.as_tables(counts, rows, owners, slots, per_node)
        return after_gate.if_it_pays(planned, counts, owners, slots, per_node, costs)

    def least(self, costs: Costs | None) -> int:
        """m: as many rows as are computed while an expert's weights, and later their gradients, are on their way."""
        if self.rows is not None:
            return self.rows
        if costs is None or not costs.row:
            return ROWS
        return math.ceil((costs.expert_bytes + costs.gradient_bytes) * max(costs.byte) / costs.row)

    def assigned(self, totals: np.ndarray, owners: Sequence[int], ranks: int, spare: int, least: int) -> np.ndarray:
        """[E, ranks] int64: who computes how many rows of which expert. totals [E]: their rows; owners [E]: where they
        live; spare: slots for copies of each rank."""
        rows = balance.homes(owners, ranks) * totals[:, None]
        load, free = rows.sum(0), np.full(ranks, spare)
        if load.max() <= self.threshold * load.mean():
            return rows
        most = max(1, int(self.capacity * (load.sum() // ranks)))
        for expert in balance.hottest(totals, len(totals)):
            home, left = owners[expert], int(totals[expert])
            load[home] -= left
            rows[expert] = 0
            while left:
                rank, taken = self._next(load, free, rows[expert], home, left, most, least)
                free[rank] -= rank != home and not rows[expert, rank]
                rows[expert, rank] += taken
                load[rank] += taken
                left -= taken
        return rows

    def _next(self, load: np.ndarray, free: np.ndarray, mine: np.ndarray, home: int, left: int, most: int,
              least: int) -> tuple[int, int]:  # fmt: skip
        """Who takes how many of the rows that are left of an expert, of which ranks have `mine`."""
        if not mine.any() and load[home] < most:
            return home, min(left, most - int(load[home]))
        helpers = [rank for rank in np.argsort(load, kind="stable") if rank != home and (free[rank] or mine[rank])]
        for rank in helpers:
            taken = min(left, most - int(load[rank]))
            if taken > 0 and (taken >= least or taken == left):
                return rank, taken
        return helpers[0] if helpers else home, left
