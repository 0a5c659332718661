"""Where the experts of a region are in one step, and how the rows of every rank are shared out among the copies.

n ranks along the axis of the experts, E experts, P places that one expert may have. A *slot* is a place for an expert
on a rank: global slot = rank * cap + place, with `cap` slots on every rank. The first `room` of them are for experts
that live there, in increasing order; the others are spare, for copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BITS = 20  # of a share: 1 << BITS is all of an expert's rows


@dataclass(frozen=True, eq=False)
class Plan:
    """slots [E, P] int64: the global slots of every expert, its home in column 0, then copies; -1 pads. ends [n, E, P]
    int64: of the c rows that rank r has for expert e, those from `ends[r, e, p - 1] * c >> BITS` up to
    `ends[r, e, p] * c >> BITS` go to slot p. Never decreasing along P; 1 << BITS from the last valid slot on."""

    slots: np.ndarray
    ends: np.ndarray

    @property
    def copies(self) -> int:
        """How many copies there are besides the homes."""
        return int((self.slots[:, 1:] >= 0).sum())


def contiguous(experts: int, ranks: int) -> tuple[int, ...]:
    """The rank where every expert lives if nobody says otherwise: in order, as many on each as on any other, or one
    more on the first ones."""
    each, more = divmod(experts, ranks)
    return tuple(rank for rank in range(ranks) for _ in range(each + (rank < more)))


def homes_only(owners: tuple[int, ...], ranks: int, cap: int, places: int = 1) -> Plan:
    """The plan without copies. owners [E]: the rank where each expert lives."""
    seen = [0] * ranks
    slots = np.full((len(owners), places), -1, dtype=np.int64)
    for expert, rank in enumerate(owners):
        slots[expert, 0] = rank * cap + seen[rank]
        seen[rank] += 1
    return Plan(slots, np.full((ranks, len(owners), places), 1 << BITS, dtype=np.int64))
