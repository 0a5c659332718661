"""Placement tables for tests: homes of uneven number and random copies, or hand-made ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def random_table(experts: int, ranks: int, room: int, spare: int, seed: int) -> Tensor:
    """[E, n] global slots: at most `room` homes on each rank, in order, and copies in some of the `spare` slots."""
    draw, cap = np.random.default_rng(seed), room + spare
    while max(np.bincount(owners := np.sort(draw.integers(0, ranks, experts)), minlength=ranks)) > room:
        pass
    owners = draw.permutation(ranks)[owners]
    slots, seen = np.full((experts, ranks), -1), [0] * ranks
    for expert, rank in enumerate(owners):
        slots[expert, 0] = rank * cap + seen[rank]
        seen[rank] += 1
    filled = [1] * experts
    for rank in range(ranks):
        others = [e for e in draw.permutation(experts) if owners[e] != rank][: draw.integers(0, spare + 1)]
        for place, expert in zip(draw.permutation(spare), others):
            slots[expert, filled[expert]] = rank * cap + room + place
            filled[expert] += 1
    return torch.from_numpy(slots)
