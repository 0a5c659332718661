"""Placements of experts that nobody would choose, on which graphs are run before and after a pass.

The same on all ranks, and wherever they are asked for: homes depend on sizes alone, so regions that share a parameter
agree on them.
"""

from __future__ import annotations

import zlib

import numpy as np

from moefx.context.region_facts import Slots
from moefx.placement.tables import BITS, Plan, homes_only


def draw_homes(experts: int, ranks: int, room: int) -> tuple[int, ...]:
    """Where every expert lives, [E]: at most `room` on a rank, and on some rank none if the others have the room."""
    rng = _rng(experts, ranks, room)
    idle = rng.integers(ranks) if (ranks - 1) * room >= experts and ranks > 1 else -1
    places = np.repeat([rank for rank in range(ranks) if rank != idle], room)
    return tuple(rng.permutation(places)[:experts].tolist())


def draw_plan(region: int, experts: int, ranks: int, slots: Slots) -> Plan:
    """The same with copies in some of the spare slots, and any shares, also none of the rows."""
    owners, rng = draw_homes(experts, ranks, slots.room), _rng(region, experts, ranks, *slots[:2])
    plan = homes_only(owners, ranks, slots.cap, ranks if slots.spare else 1)
    used = np.ones(experts, dtype=np.int64)
    for rank in range(ranks):
        others = [expert for expert in range(experts) if owners[expert] != rank]
        chosen = rng.permutation(others)[: rng.integers(slots.spare + 1)]
        for place, expert in enumerate(chosen, rank * slots.cap + slots.room):
            plan.slots[expert, used[expert]] = place
            used[expert] += 1
    for expert, places in enumerate(used):
        cuts = rng.integers(1 << BITS, size=(ranks, places - 1), endpoint=True)
        plan.ends[:, expert, : places - 1] = np.sort(cuts, axis=1)
    return plan


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))
