"""Placement tables for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.analysis.checking.random_homes import draw_plan
from moefx.context.region_facts import Slots


def random_table(experts: int, ranks: int, room: int, spare: int, seed: int) -> Tensor:
    """[E, n] global slots: at most `room` homes on each rank, and copies in some of the `spare` slots."""
    return torch.from_numpy(draw_plan(seed, experts, ranks, Slots(room, spare)).slots)
