"""Which arms are near: choices for all regions of a model together, the one first that is predicted to be fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moefx.options import ARMS, Arm, Options
from moefx.planning.folding import SIMPLER
from moefx.planning.plans import Decision, RegionPlan
from moefx.planning.pricing import Candidate

MOST = 3  # arms that are near
NEAR, NEXT = 0.2, 0.5  # how much slower than the fastest they, and the next one, may be predicted to be
DEGREES = (1, 2, 4)  # chunks that are tried where nothing predicts


def near(decisions: Sequence[Decision], options: Options) -> list[tuple[Arm, float]]:
    """(arm, predicted seconds of all regions), the fastest first, or a simpler one that is about as fast; at most
    `MOST`, of which no two differ in the order of tasks alone.

    decisions: of the parts of one model, for batches of one size. An arm has what the options leave open. Regions that
    were left one choice have it in every arm. Empty, where regions have no arm in common.
    """
    plans = [(plan, _by_arm(plan, options)) for decision in decisions for plan in decision.regions]
    free = [(plan, arms) for plan, arms in plans if len(arms) > 1] or plans
    if not free:
        return []
    rest = sum(plan.chosen.seconds for plan, arms in plans if (plan, arms) not in free)
    totals = {arm: rest + sum(arms[arm] for _, arms in free) for arm in free[0][1]
              if all(arm in arms for _, arms in free)}  # fmt: skip
    fastest = min(totals.values(), default=0.0)
    chosen = {arm_of(plan.chosen, plan, options) for plan, _ in free}
    simple = {arm for arm in chosen if len(chosen) == 1 and totals.get(arm, float("inf")) <= fastest * (1 + SIMPLER)}
    found: dict[Arm, tuple[Arm, float]] = {}
    for arm, seconds in sorted(totals.items(), key=lambda item: (item[0] not in simple, item[1])):
        if seconds <= fastest * (1 + (NEAR if len(found) > 1 else NEXT)):
            found.setdefault(tuple(item for item in arm if item[0] != "scheduler"), (arm, seconds))
    return list(found.values())[:MOST]


def _by_arm(plan: RegionPlan, options: Options) -> dict[Arm, float]:
    """Seconds of a region by every arm that it has candidates for, within the limit of memory."""
    limit, found = options.memory_limit, {}
    for candidate in plan.candidates:
        if limit is None or candidate.memory <= limit or candidate == plan.chosen:
            arm = arm_of(candidate, plan, options)
            found[arm] = min(candidate.seconds, found.get(arm, candidate.seconds))
    return found


def arm_of(candidate: Candidate, plan: RegionPlan, options: Options) -> Arm:
    """The arm by which a region runs as a candidate of its plan says: what the options leave open."""
    choice = {**candidate.choice.to_dict(), "scheduler": candidate.scheduler, "r": plan.r_of(candidate)}
    return tuple(sorted((name, choice[name]) for name in ARMS
                        if choice.get(name) is not None and options.is_open(name)))  # fmt: skip


def without_machine(options: Options) -> list[Arm]:
    """What may be tried where nothing predicts: a few numbers of chunks, with each of several all-to-alls."""
    several = {"alltoall": options.alltoall.algorithm if isinstance(options.alltoall.algorithm, tuple) else (),
               "chunks": DEGREES if options.is_open("chunks") else ()}
    return list(itertools.product(*([(name, each) for each in some] for name, some in several.items() if some)))
