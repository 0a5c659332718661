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

    def complaint(self, owners: tuple[int, ...], slots: tuple[int, int]) -> str | None:
        """What is wrong with it where expert e lives on rank `owners[e]`, and every rank has `slots`, (room, spare);
        None: nothing."""
        (room, spare), ranks = slots, self.ends.shape[0]
        cap, there = room + spare, self.slots >= 0
        rank, place = np.where(there, self.slots // cap, -1), self.slots % cap
        taken, times = np.unique(self.slots[there], return_counts=True)
        last = self.ends[:, np.arange(len(owners)), there.sum(1) - 1]
        for wrong, what in (
            (self.slots[:, 0] != homes_only(owners, ranks, cap).slots[:, 0], "is not in the slot of its home"),
            (place[:, 0] >= room, f"has its home in none of the {room} slots for homes"),
            (rank.max(1) >= ranks, f"has a slot on none of {ranks} ranks"),
            ((there[:, 1:] & ~there[:, :-1]).any(1), "has a copy behind a pad"),
            ((there & (place < room))[:, 1:].any(1), "has a copy among the homes"),
            (np.isin(self.slots, taken[times > 1]).any(1), "shares a slot with another"),
            ([len({*row[row >= 0]}) < (row >= 0).sum() for row in rank], "is on a rank twice"),
            ((np.diff(self.ends, axis=2, prepend=0) < 0).any((0, 2)), "has shares that decrease"),
            ((last != 1 << BITS).any(0), f"has shares that end before {1 << BITS}"),
        ):
            if np.any(wrong):
                return f"expert {int(np.argmax(wrong))} {what}"
        return None


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
