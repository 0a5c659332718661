"""From a policy and the rows that are expected: the plan of the next step.

    none      experts work where they live
    balanced  a transport, and shares that make the ranks as even as it allows, whatever that costs
    auto      the best by `score` of these, transports and greedy slots of several sizes, and the hottest experts once
              on every node, under every dispatch; refined by single copies. Never worse than "none" by this score
    others    what features propose (`PROPOSALS`), rows going to the nearest copy; "auto" tries it, too

Pure functions of integers and of the same figures on all ranks: they need not talk about what they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moefx.errors import MoefxError
from moefx.placement import balance, quotas, score, tables
from moefx.placement.score import ROWS_ALONE, Costs
from moefx.placement.tables import Plan

# (loads [n, E], owners [E], spare slots, costs, per_node) -> who has which expert, [E, n] bool.
Proposal = Callable[[np.ndarray, Sequence[int], int, Costs, int], np.ndarray]
PROPOSALS: dict[str, Proposal] = {}  # of features, by policy
WAYS = ("local", "capacity", "balanced")
SWAPS = 50
GAIN = 0.05  # that copies must bring over none: forecasts err


def policies() -> tuple[str, ...]:
    return "none", *PROPOSALS, "balanced", "auto"


def plan(policy: str, loads: np.ndarray, owners: Sequence[int], slots: tuple[int, int], costs: Costs | None = None,
         per_node: int = 1) -> Plan:
    """The plan of one step.

    loads [n, E] int64: the rows that each source rank is expected to have for each expert. owners [E]: where experts
    live. slots: how many may live on a rank, and how many copies it holds beside. costs: None weighs rows alone.
    per_node: consecutive ranks on one node. Raises MoefxError for a policy that does not exist.
    """
    if policy not in policies():
        raise MoefxError(f"there is no policy {policy!r} of placement", hint=f"one of {', '.join(policies())}")
    case = _Case(np.asarray(loads, dtype=np.int64), np.asarray(owners), *slots, costs or ROWS_ALONE, per_node)
    if policy == "balanced" and case.spare:
        return case.even()
    if policy == "none" or not case.spare or not case.loads.any():
        found = case.none
    else:
        found = case.best() if policy == "auto" else case.chosen(case.proposed(policy), "local")
    return case.plan(found.held, found.quota)


def weighed(expected: np.ndarray, real: np.ndarray, owners: Sequence[int], slots: tuple[int, int], costs: Costs,
            per_node: int = 1) -> dict[str, float]:
    """Seconds of a step with the loads `real` [n, E] under every policy that plans for `expected` [n, E], and under
    "exact", which plans for the real ones: then nothing hides the gather of the forward."""
    found = {policy: score.of(plan(policy, expected, owners, slots, costs, per_node), real, sum(slots), costs, per_node)
             for policy in policies()}  # fmt: skip
    late = replace(costs, hidden=(0.0, costs.hidden[1]))
    exact = plan("balanced", real, owners, slots, late, per_node)
    return {**found, "exact": score.of(exact, real, sum(slots), late, per_node)}


@dataclass(frozen=True, eq=False)
class _Choice:
    """held [E, n] bool, quota [n, k, n] of the experts with copies by one way, and the seconds that these take."""

    way: str
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
        return self.chosen(balance.homes(self.owners, self.ranks), "local")

    def proposed(self, policy: str) -> np.ndarray:
        return PROPOSALS[policy](self.loads, self.owners, self.spare, self.costs, self.per_node)

    def even(self) -> Plan:
        rows, held = self.transport(self.spare)
        chosen = quotas.copied(held)
        return self.plan(held, quotas.split(self.loads[:, chosen], rows[chosen], self.per_node))

    def transport(self, spare: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows [E, n], who has which expert [E, n])."""
        rows = balance.transport(self.loads, self.owners, spare)
        return rows, (rows > 0) | balance.homes(self.owners, self.ranks)

    def placements(self) -> Iterator[np.ndarray]:
        """Who may have which expert, candidates in the order of their simplicity."""
        yield from (self.transport(spare)[1] for spare in sorted({1, min(2, self.spare), self.spare}))
        yield from map(self.proposed, PROPOSALS)
        totals, top = self.loads.sum(0), 1
        case = totals, self.owners, self.ranks, self.spare, self.per_node
        while top <= min(len(totals), self.ranks * self.spare):
            yield balance.greedy(*case, top)
            yield balance.by_node(*case, top)
            top *= 2

    def best(self) -> _Choice:
        none = self.none
        found, seen = none, {none.held.tobytes()}
        for held in self.placements():
            if held.tobytes() not in seen:
                seen.add(held.tobytes())
                found = min(found, self.chosen(held, *WAYS), key=lambda each: each.seconds)
        if self.costs is not ROWS_ALONE:
            found = self.refined(found)
        return found if found.seconds < (1 - GAIN) * none.seconds else none

    def refined(self, found: _Choice) -> _Choice:
        """At most SWAPS trials of one copy more, less, or elsewhere; each that is faster is kept."""
        left = SWAPS
        while left:
            for held in self.neighbours(found):
                left -= 1
                tried = self.chosen(held, found.way)
                if tried.seconds < found.seconds:
                    found = tried
                    break
                if not left:
                    return found
            else:
                return found
        return found

    def neighbours(self, found: _Choice) -> Iterator[np.ndarray]:
        """Placements that differ by one copy: one more, in place of the least used one where slots are full, for what
        most rows leave a node for, then for what the busiest rank does; or a copy less."""
        chosen, home = quotas.copied(found.held), balance.homes(self.owners, self.ranks)
        rows = self.loads.sum(0)[:, None] * home  # [E, n]
        rows[chosen] = found.quota.sum(0)
        load, used = rows.sum(0), np.where(found.held & ~home, rows, np.inf)
        nodes = quotas.nodes_of(self.ranks, self.per_node)
        near = nodes[:, None] == nodes  # [n, n]
        leaving = np.where(near[:, self.owners], 0, self.loads)  # [n, E]
        leaving[:, chosen] = (found.quota * ~near[:, None, :]).sum(2)
        leaving = near[:: quotas.group_of(self.ranks, self.per_node)] @ leaving  # [nodes, E]

        def more(expert: int, here: np.ndarray, ranks: int) -> Iterator[np.ndarray]:
            for rank in here[np.argsort(load[here], kind="stable")][:ranks]:
                if not found.held[expert, rank]:
                    full = np.isfinite(used[:, rank]).sum() >= self.spare
                    less = [(used[:, rank].argmin(), rank, False)] if full else []
                    yield _with(found.held, *less, (expert, rank, True))

        for place in np.argsort(-leaving, axis=None, kind="stable")[:4]:
            node, expert = divmod(int(place), len(self.owners))
            if leaving[node, expert]:
                yield from more(expert, np.flatnonzero(nodes == node), 2)
        busy = rows[:, load.argmax()]
        for expert in np.argsort(-busy, kind="stable")[:2]:
            if busy[expert]:
                yield from more(expert, np.arange(self.ranks), 4)
        experts, ranks = np.nonzero(np.isfinite(used))
        for place in np.argsort(used[experts, ranks], kind="stable")[:8]:
            yield _with(found.held, (experts[place], ranks[place], False))

    def chosen(self, held: np.ndarray, *ways: str) -> _Choice:
        """The fastest of some ways to share out the rows among these ranks."""
        way, quota, seconds = dispatched(ways, self.loads, held, self.owners, self.costs, self.per_node)
        return _Choice(way, held, quota, self.costs.exposed(held, self.owners, self.per_node) + seconds)

    def plan(self, held: np.ndarray, quota: np.ndarray) -> Plan:
        found = tables.slots_of(held, self.owners, self.room, self.spare)
        return tables.of(quota, quotas.copied(held), found, self.room + self.spare)


def dispatched(ways: Sequence[str], loads: np.ndarray, held: np.ndarray, owners: Sequence[int], costs: Costs,
               per_node: int) -> tuple[str, np.ndarray, float]:  # fmt: skip
    """The fastest of some ways to share out loads [n, E] among the ranks that have the experts, held [E, n]; its quota
    [n, k, n] of the k experts with copies, as of `quotas.dispatch`; the seconds of experts and exchanges."""
    home = balance.homes(owners, len(loads)).astype(float)  # a product of integers takes 20 times as long
    alone = np.where(held.sum(1) > 1, 0.0, loads) @ home  # exact up to 2 ** 53
    found = [(way, quota, costs.working(alone + quota.sum(1), per_node))
             for way, quota in zip(ways, quotas.dispatch(ways, loads, held, owners, per_node))]  # fmt: skip
    return min(found, key=lambda each: each[-1])


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
