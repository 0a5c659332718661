"""From a policy and the rows that are expected: the plan of the next step.

    none      experts work where they live
    hecate    algorithm 1 with Hecate's dispatch
    balanced  a transport, and shares that make the ranks as even as it allows, whatever that costs
    auto      the best by `score` of these, greedy slots and transports of several sizes, under every dispatch, refined
              by a few single copies more, less or elsewhere; never worse than "none"

Pure functions of integers and of the same figures on all ranks: they need not talk about what they decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moefx.errors import MoefxError
from moefx.placement import balance, hecate, shares, tables
from moefx.placement.score import Costs
from moefx.placement.tables import Plan

POLICIES = ("none", "hecate", "balanced", "auto")
WAYS = ("local", "capacity", "balanced")
SWAPS = 50
GAIN = 0.02  # that copies must bring over none: forecasts err
ROWS_ALONE = Costs(1.0, 0, 0, 0, (0.0, 0.0))  # without a machine only the busiest rank's rows count


def plan(policy: str, loads: np.ndarray, owners: Sequence[int], slots: tuple[int, int], costs: Costs | None = None,
         per_node: int = 1) -> Plan:
    """The plan of one step.

    loads [n, E] int64: the rows that each source rank is expected to have for each expert. owners [E]: where experts
    live. slots: how many may live on a rank, and how many copies it holds beside. costs: None weighs rows alone.
    per_node: consecutive ranks on one node. Raises MoefxError for a policy that does not exist.
    """
    if policy not in POLICIES:
        raise MoefxError(f"there is no policy {policy!r} of placement", hint=f"one of {', '.join(POLICIES)}")
    case = _Case(np.asarray(loads, dtype=np.int64), np.asarray(owners), *slots, costs or ROWS_ALONE, per_node)
    if policy == "none" or not case.spare or not case.loads.any():
        return case.plan(case.none)
    if policy == "hecate":
        return case.plan(case.chosen("local", case.algorithm_1()))
    if policy == "balanced":
        return case.plan(case.chosen("balanced", case.transport(case.spare)))
    return case.plan(case.best())


@dataclass(frozen=True, eq=False)
class _Choice:
    """held [E, n] bool, quota [n, k, n] of the experts with copies, and the seconds that these take."""

    held: np.ndarray
    quota: np.ndarray
    seconds: float


@dataclass(frozen=True, eq=False)
class _Case:
    """What a plan is made for."""

    loads: np.ndarray
    owners: np.ndarray
    room: int
    spare: int
    costs: Costs
    per_node: int

    @property
    def ranks(self) -> int:
        return len(self.loads)

    @property
    def none(self) -> _Choice:
        return self.chosen("local", balance.homes(self.owners, self.ranks))

    def algorithm_1(self) -> np.ndarray:
        totals, nodes = self.loads.sum(0), shares.nodes_of(self.ranks, self.per_node)
        overlap = self.costs.overlap(balance.hottest(totals, len(totals)), self.owners, nodes)
        return hecate.materialise(totals, self.owners, self.ranks, overlap, self.spare, self.per_node)

    def transport(self, spare: int) -> np.ndarray:
        found = balance.transport(self.loads, self.owners, spare)
        return (found > 0) | balance.homes(self.owners, self.ranks)

    def placements(self) -> Iterator[np.ndarray]:
        """Who may have which expert, candidates in the order of their simplicity."""
        yield from (self.transport(spare) for spare in sorted({1, min(2, self.spare), self.spare}))
        yield self.algorithm_1()
        totals, top = self.loads.sum(0), 1
        while top <= min(len(totals), self.ranks * self.spare):
            yield balance.greedy(totals, self.owners, self.ranks, self.spare, self.per_node, top)
            top *= 2

    def best(self) -> _Choice:
        none = self.none
        found, seen = none, {none.held.tobytes()}
        for held in self.placements():
            if held.tobytes() not in seen:
                seen.add(held.tobytes())
                found = min([found, *(self.chosen(way, held) for way in WAYS)], key=lambda each: each.seconds)
        if self.costs is not ROWS_ALONE:
            found = self.refined(found)
        return found if found.seconds < (1 - GAIN) * none.seconds else none

    def refined(self, found: _Choice) -> _Choice:
        """At most SWAPS trials of one copy more, less, or elsewhere; each that is faster is kept."""
        left = SWAPS
        while left:
            for held in self.neighbours(found):
                left -= 1
                tried = min((self.chosen(way, held) for way in WAYS[1:]), key=lambda each: each.seconds)
                if tried.seconds < found.seconds:
                    found = tried
                    break
                if not left:
                    return found
            else:
                return found
        return found

    def neighbours(self, found: _Choice) -> Iterator[np.ndarray]:
        """Placements that differ by one copy. What the busiest rank does goes elsewhere; copies with few rows go."""
        quota = shares.whole(found.quota, self.loads, found.held, self.owners).sum(0)  # [E, n]
        load = quota.sum(0)
        copies = found.held & ~balance.homes(self.owners, self.ranks)
        free = self.spare - copies.sum(0)
        busy, idle = int(load.argmax()), np.argsort(load, kind="stable")
        for expert in np.argsort(-quota[:, busy], kind="stable")[:2]:
            for rank in idle[:4]:
                if free[rank] > 0 and not found.held[expert, rank] and quota[expert, busy]:
                    yield _with(found.held, (expert, rank, True))
        used = [(int(quota[expert, rank]), int(expert), int(rank)) for expert, rank in np.argwhere(copies)]
        for _, expert, rank in sorted(used)[:8]:
            yield _with(found.held, (expert, rank, False))
            for other in idle[:2]:
                if free[other] > 0 and not found.held[expert, other]:
                    yield _with(found.held, (expert, rank, False), (expert, other, True))

    def chosen(self, way: str, held: np.ndarray) -> _Choice:
        quota = shares.dispatch(way, self.loads, held, self.owners, self.per_node)
        rows = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        alone = self.loads.copy()
        alone[:, shares.copied(held)] = 0
        np.add.at(rows.T, self.owners, alone.T)
        rows += quota.sum(1)
        seconds = self.costs.seconds(rows, held, self.owners, shares.nodes_of(self.ranks, self.per_node))
        return _Choice(held, quota, seconds)

    def plan(self, choice: _Choice) -> Plan:
        found = tables.slots_of(choice.held, self.owners, self.room, self.spare)
        quota = shares.whole(choice.quota, self.loads, choice.held, self.owners)
        return tables.of(quota, found, self.room + self.spare)


def _with(held: np.ndarray, *changes: tuple[int, int, bool]) -> np.ndarray:
    found = held.copy()
    for expert, rank, has in changes:
        found[expert, rank] = has
    return found


def reasons(plan: Plan, loads: np.ndarray, cap: int) -> list[str]:
    """Why experts were copied, a line for each, the busiest first; one line where none was. loads [n, E]: the rows that
    the plan was made for."""
    ranks, totals = len(loads), loads.sum(0)
    mean = max(1.0, float(totals.sum()) / ranks)
    homes = tables.Plan(plan.slots[:, :1], plan.ends[:, :, -1:]).traffic(loads, cap).sum(0) / mean
    after = plan.traffic(loads, cap).sum(0) / mean
    found = []
    for expert in np.argsort(-totals, kind="stable"):
        to = np.flatnonzero(plan.held(ranks, cap)[expert])
        home = plan.slots[expert, 0] // cap
        if len(to) > 1:
            others = ", ".join(str(rank) for rank in to if rank != home)
            found.append(f"expert {expert} has {totals[expert] / max(1, totals.sum()):.0%} of all rows: copied from "
                         f"rank {home} (at home {homes[home]:.2f} of the mean, now {after[home]:.2f}) to {others}")
    return found or [f"no copies: the busiest rank has {homes.max():.2f} of the mean"]
