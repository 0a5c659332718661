"""One choice for each of several things, so that all stay within a budget and cost least: a multiple-choice knapsack.

The best multiplier of the budget (of Lagrange) chooses on the lower hull of every thing's choices and bounds what any
solution costs from below. Rounding down and filling what is left of the budget, choice by choice, gives a solution.
Whatever costs more than the difference between the two by itself is left out, and a dynamic program over the rest, cut
by the same bound, finds the optimum (Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 20_000  # partial solutions that are followed at once
Choices = tuple[NDArray[np.float64], NDArray[np.float64]]
"""What each choice takes of the budget, rising, and what it costs, falling."""


class Solution(NamedTuple):
    """picks: which choice of each thing. is_exact: no solution costs less, nor less than was asked to be beaten."""

    seconds: float
    picks: tuple[int, ...]
    is_exact: bool


def front(sizes: NDArray, costs: NDArray) -> NDArray:
    """The indices of choices of which none is as small as another one that costs no more; sizes rise, costs fall."""
    order = np.lexsort((costs, sizes))
    cheapest = np.minimum.accumulate(costs[order])
    return order[np.append(True, cheapest[1:] < cheapest[:-1])[: len(order)]]


class Problem:
    """choices: of every thing; equal things may share one object. least: what all things take together, at least."""

    def __init__(self, choices: Sequence[Choices]) -> None:
        self.choices = choices
        hulls = {id(each): _hull(*each) for each in {id(each): each for each in choices}.values()}
        self.hulls = [hulls[id(each)] for each in choices]
        self.least = float(sum(sizes[0] for sizes, _ in choices))
        self.lines: dict[int, tuple[NDArray, NDArray]] = {}

    def bound(self, budget: float) -> float:
        """What no solution costs less than; inf if there is none."""
        return float(self._relaxed(0, np.array([budget]))[0])

    def solve(self, budget: float, beaten: float = np.inf) -> Solution:
        """The least costs within a budget of at least `least`. A solution that costs no less than `beaten` may be any.
        """
        multiplier, picks = self._rounded(budget)
        self._fill(picks, budget)
        best = min(self._costs(picks), beaten)
        found, is_exact = self._search(multiplier, budget, best)
        picks = found or picks
        return Solution(self._costs(picks), tuple(picks), is_exact)

    def _costs(self, picks: Sequence[int]) -> float:
        return float(sum(costs[pick] for (_, costs), pick in zip(self.choices, picks)))

    def _steps(self, first: int) -> tuple[NDArray, NDArray, list[tuple[int, int]]]:
        """Along the hulls of the things from `first` on, steeper ones before others: what each step takes, what it
        saves, and (thing, choice) that it leads to."""
        takes, saves, leads = [np.zeros(0)], [np.zeros(0)], []
        for thing in range(first, len(self.choices)):
            (sizes, costs), hull = self.choices[thing], self.hulls[thing]
            takes.append(np.diff(sizes[hull]))
            saves.append(-np.diff(costs[hull]))
            leads += [(thing, int(choice)) for choice in hull[1:]]
        taken, saved = np.concatenate(takes), np.concatenate(saves)
        order = np.argsort(-saved / taken, kind="stable")
        return taken[order], saved[order], [leads[i] for i in order]

    def _relaxed(self, first: int, budgets: NDArray) -> NDArray:
        """The least costs of the things from `first` on where a thing may be between two choices; inf for too little
        budget."""
        if first not in self.lines:
            rest = self.choices[first:]
            takes, saves, _ = self._steps(first)
            self.lines[first] = (sum(sizes[0] for sizes, _ in rest) + np.append(0.0, np.cumsum(takes)),
                                 sum(costs[0] for _, costs in rest) - np.append(0.0, np.cumsum(saves)))  # fmt: skip
        return np.interp(budgets, *self.lines[first], left=np.inf)

    def _rounded(self, budget: float) -> tuple[float, list[int]]:
        """The multiplier, in costs per size, and the choices on the hulls that it makes, rounded down."""
        picks, left = [0] * len(self.choices), budget - self.least
        for take, save, (thing, choice) in zip(*self._steps(0)):
            if take > left:
                return save / take, picks
            picks[thing], left = choice, left - take
        return 0.0, picks

    def _fill(self, picks: list[int], budget: float) -> None:
        """Use what is left of the budget: every time the change of one thing that saves most."""
        left = budget - float(sum(sizes[pick] for (sizes, _), pick in zip(self.choices, picks)))
        while True:
            gains = []
            for thing, (sizes, costs) in enumerate(self.choices):
                reach = int(np.searchsorted(sizes, sizes[picks[thing]] + left, side="right")) - 1
                gains.append((costs[picks[thing]] - costs[reach], -thing, reach))
            gain, thing, reach = max(gains, default=(0.0, 0, 0))
            if gain <= 0:
                return
            sizes = self.choices[-thing][0]
            left -= sizes[reach] - sizes[picks[-thing]]
            picks[-thing] = reach

    def _search(self, multiplier: float, budget: float, best: float) -> tuple[list[int] | None, bool]:
        """The choices of a solution that costs less than `best`, the least; None: there is none."""
        gap, reduced = best - self.bound(budget), []
        for sizes, costs in self.choices:
            price = costs + multiplier * sizes
            reduced.append(np.flatnonzero(price - price.min() <= gap))
        held, took, trail, is_exact = np.zeros(1), np.zeros(1), [], True
        for thing, which in enumerate(reduced):
            sizes, costs = (each[which] for each in self.choices[thing])
            new_held = (held[:, None] + sizes).ravel()
            new_took = (took[:, None] + costs).ravel()
            bounds = new_took + self._relaxed(thing + 1, budget - new_held)
            alive = np.flatnonzero((new_held <= budget) & (bounds < best))
            alive = alive[front(new_held[alive], new_took[alive])]
            if len(alive) > MOST:
                alive, is_exact = np.sort(alive[np.argsort(bounds[alive], kind="stable")[:MOST]]), False
            if not len(alive):
                return None, is_exact
            trail.append((alive // len(which), which[alive % len(which)]))
            held, took = new_held[alive], new_took[alive]
        at, picks = int(np.argmin(took)), []
        for before, choice in reversed(trail):
            picks.append(int(choice[at]))
            at = int(before[at])
        return picks[::-1], is_exact


def _hull(sizes: NDArray, costs: NDArray) -> NDArray:
    """The indices of the lower convex hull of a front."""
    hull: list[int] = []
    for point in range(len(sizes)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (costs[b] - costs[a]) * (sizes[point] - sizes[b]) < (costs[point] - costs[b]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(point)
    return np.array(hull)
