"""What was planned for the regions of a program, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from moefx.context.decisions import Choice, Decisions
from moefx.costmodel.granularity import GranularityCache
from moefx.costmodel.machine import Machine
from moefx.planning.folding import Fold
from moefx.planning.pricing import Candidate
from moefx.planning.restoring import Restoring
from moefx.planning.schedules import Capacity, Closed

Caches = Mapping[tuple[str, ...], GranularityCache]


@dataclass(frozen=True)
class RegionPlan:
    """What was chosen for a region and why. candidates: fastest first. stages: seconds of each stage of the whole
    region, by graph. formulas: the same as formulas of the sizes and the machine's figures. sizes: of the symbols in
    these, named as in the emitted code of whole regions. notes: what the prediction leaves out. schedule: of the
    program that was priced. closed: schedules in closed form, where there are several; capacity: what says which one of
    Parm's is faster. parts: in how many a whole region comes back by what was chosen; it was priced at once. adaptive:
    what a step sends, by r, where ranks have parts of experts, in closed form (`rooms.Degrees.closed`)."""

    region: int
    module: str
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reason: str
    stages: Mapping[str, Mapping[str, float]]
    formulas: Mapping[str, Mapping[str, sympy.Expr]]
    sizes: Mapping[str, float]
    notes: tuple[str, ...] = ()
    schedule: str = "s1"
    closed: tuple[Closed, ...] = ()
    capacity: Capacity | None = None
    parts: int = 1
    adaptive: Any = None

    def r_of(self, candidate: Candidate) -> int | None:
        """The r of a candidate; None: there is but one."""
        if candidate.choice.r is not None or all(each.choice.r is None for each in self.candidates):
            return candidate.choice.r
        return None if self.adaptive is None else max(self.adaptive.seconds)

    @property
    def words_of_r(self) -> list[str]:
        """What is said of r, where there is a closed form of it."""
        return [] if self.adaptive is None else self.adaptive.lines(self)

    @property
    def is_whole(self) -> bool:
        """Whether the region runs as in the program that was priced, in whatever order."""
        choice = self.chosen.choice
        return choice.whole and choice.split in (None, self.schedule) and self.parts == 1


@dataclass(frozen=True)
class Decision:
    """The plan of a program: the machine that it was made for, the sizes, and each region's plan.

    forced: the choices of the options for regions in which nothing is exchanged, so nothing is planned. caches: what
    was learned of the number of chunks, for the next program of the same model. folds: by region, where the mesh
    spreads no experts, how it could, the fastest first. notes: what was chosen for all regions together, and why.
    restoring: what is kept for the backward; None without a limit.
    """

    machine: Machine
    sizes: Mapping[str, float]
    regions: tuple[RegionPlan, ...] = ()
    forced: Mapping[int, Choice] = field(default_factory=dict)
    caches: Caches = field(default_factory=dict)
    folds: Mapping[int, tuple[Fold, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    restoring: Restoring | None = None

    @property
    def is_whole(self) -> bool:
        """Nothing but whole regions and direct exchanges was chosen, in an order that needs no scheduler; and all that
        is kept, as it was in the program that was priced."""
        return (all(plan.is_whole for plan in self.regions) and all(choice.whole for choice in self.forced.values())
                and (self.restoring is None or not self.restoring.ways))  # fmt: skip

    @property
    def choices(self) -> dict[int, Choice]:
        return {**self.forced, **{plan.region: plan.chosen.choice for plan in self.regions}}

    def asks_for(self, decisions: Decisions) -> Decisions:
        """What a program is made by that does what was chosen."""
        kept = self.restoring
        if kept is not None:
            decisions = replace(decisions, restoring=kept.ways, rings=kept.rings)
        return replace(decisions, choices=self.choices)

    def changed(self, choices: Mapping[int, Choice], reason: str) -> Decision:
        """With other choices for some regions, taken for that reason."""
        plans = []
        for plan in self.regions:
            choice = choices.get(plan.region, plan.chosen.choice)
            near = next((each for each in plan.candidates if each.choice == choice), None)
            near = near or replace(plan.chosen, choice=choice)
            plans.append(plan if choice == plan.chosen.choice else replace(plan, chosen=near, reason=reason))
        return replace(self, regions=tuple(plans), forced={number: choices.get(number, choice)
                                                           for number, choice in self.forced.items()})  # fmt: skip

    @property
    def memory(self) -> float:
        """The estimated peak in bytes."""
        if self.restoring is not None:
            return self.restoring.bytes
        return max((plan.chosen.memory for plan in self.regions), default=0.0)
