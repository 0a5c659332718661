"""Placement tables for tests: homes of uneven number, and random copies of experts, other ones in every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from moefx.analysis.checking.random_homes import draw_plan
from moefx.context.region_facts import RegionFacts, Slots
from moefx.link.program import Home
from moefx.placement.tables import BITS, Plan, homes_only
from moefx.runtime.placement import Tables


def random_table(experts: int, ranks: int, room: int, spare: int, seed: int) -> Tensor:
    """[E, n] global slots: at most `room` homes on each rank, and copies in some of the `spare` slots."""
    return torch.from_numpy(draw_plan(seed, experts, ranks, Slots(room, spare)).slots)


def random_copies(owners: tuple[int, ...], ranks: int, room: int, spare: int, seed: int) -> Plan:
    """Experts at home where they live, random copies in some of the `spare` slots of other ranks, random shares."""
    draw, cap = np.random.default_rng(seed), room + spare
    plan = homes_only(owners, ranks, cap, ranks)
    for rank in range(ranks):
        others = [expert for expert in draw.permutation(len(owners)) if owners[expert] != rank]
        for place, expert in zip(draw.permutation(spare), others[: draw.integers(0, spare + 1)]):
            plan.slots[expert, np.argmin(plan.slots[expert])] = rank * cap + room + place
    for expert, copies in enumerate((plan.slots >= 0).sum(1)):
        cuts = draw.integers(1 << BITS, size=(ranks, copies - 1), endpoint=True)
        plan.ends[:, expert, : copies - 1] = np.sort(cuts, axis=1)
    return plan


@contextlib.contextmanager
def changing_tables(owners: tuple[int, ...]) -> Iterator[None]:
    """Every call of a program takes random copies of its own, the same on all ranks."""
    calls: dict[tuple[Home, int], int] = {}
    planned = Home.tables

    def tables(home: Home, facts: RegionFacts) -> Tables:
        slots, ranks, key = facts.slots, home.spec.size("ep"), (home, facts.number)
        calls[key] = calls.get(key, 0) + 1
        planned(home, facts)  # which learns the region
        plan = random_copies(owners, ranks, slots.room, slots.spare, 100 * calls[key] + facts.number)
        return Tables.of(plan, home.session.index(home.spec.axis("ep")), home.session.device)

    with mock.patch.object(Home, "tables", tables):
        yield
