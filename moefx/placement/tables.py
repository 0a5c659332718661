"""Where the experts of a region are in one step, and how the rows of every rank are shared out among the copies.

n ranks along the axis of the experts, E experts, P places that one expert may have. A *slot* is a place for an expert
on a rank: global slot = rank * cap + place, with `cap` slots on every rank. The first `room` of them are for experts
that live there, in increasing order; the others are spare, for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moefx.errors import MoefxError

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

    def held(self, ranks: int, cap: int) -> np.ndarray:
        """[E, n] bool: which ranks have an expert, at home or as a copy."""
        return held(self.slots, ranks, cap)

    def traffic(self, loads: np.ndarray, cap: int) -> np.ndarray:
        """[n, n] int64: the rows that each source sends to each rank, if it has loads [n, E]."""
        parts = np.diff(self.ends * loads[:, :, None] >> BITS, axis=2, prepend=0)
        valid = self.slots >= 0
        found = np.zeros((len(loads), len(loads)), dtype=np.int64)
        np.add.at(found.T, self.slots[valid] // cap, parts[:, valid].T)
        return found

    def check(self, owners: Sequence[int], room: int, spare: int) -> None:
        """Raises MoefxError, which says what is wrong with the tables for experts that live at `owners` [E]."""
        ranks, cap = len(self.ends), room + spare
        if wrong := _wrong_slots(self.slots, owners, ranks, room, cap) or _wrong_ends(self.ends, self.slots):
            raise MoefxError(f"a plan of placement is wrong: {wrong}",
                             hint="plans of moefx.placement.decide and tables.of are right")  # fmt: skip


def held(slots: np.ndarray, ranks: int, cap: int) -> np.ndarray:
    """[E, n] bool: which ranks have an expert, by the global slots [E, P]."""
    found = np.zeros((len(slots), ranks), dtype=bool)
    experts, places = np.nonzero(slots >= 0)
    found[experts, slots[experts, places] // cap] = True
    return found


def traffic(slots: np.ndarray, quota: np.ndarray, num_slots: int) -> np.ndarray:
    """slots [E, P], quota [n, E, P] -> [n, num_slots]: rows that every rank sends to every slot."""
    rows = np.zeros((quota.shape[0], num_slots), dtype=np.int64)
    there = slots >= 0
    rows[:, slots[there]] = quota[:, there]
    return rows


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


def slots_of(held: np.ndarray, owners: Sequence[int], room: int, spare: int) -> np.ndarray:
    """[E, P] int64: the slots of experts that these ranks have. held [E, n] bool, homes included; P = n, or 1 without
    spare slots. A rank's copies stand in increasing order of expert."""
    experts, ranks = held.shape
    cap, places = room + spare, ranks if spare else 1
    slots = homes_only(tuple(owners), ranks, cap, places).slots
    if spare:
        copies = held.copy()
        copies[np.arange(experts), owners] = False
        where = np.arange(ranks) * cap + room - 1 + copies.cumsum(0)
        none = ranks * cap
        found = np.sort(np.where(copies, where, none), axis=1)[:, : places - 1]
        slots[:, 1:] = np.where(found < none, found, -1)
    return slots


def by_place(rows: np.ndarray, slots: np.ndarray, cap: int) -> np.ndarray:
    """[.., E, P]: what is given by rank ([.., E, n]), by place of every expert; 0 where it has no slot."""
    ranks = np.maximum(slots, 0) // cap
    found = np.take_along_axis(rows, np.broadcast_to(ranks, (*rows.shape[:-1], slots.shape[1])), axis=-1)
    return np.where(slots >= 0, found, 0)


def of(quota: np.ndarray, experts: np.ndarray, slots: np.ndarray, cap: int) -> Plan:
    """The plan that shares out rows like this. quota [n, k, n] int64: by source, one of the `experts` [k] with copies,
    and the rank that works on them. Of exactly these rows, every rank gets exactly its part. Where a source has no
    rows, all sources' parts count."""
    return of_places(by_place(quota, slots[experts], cap), experts, slots)


def of_places(parts: np.ndarray, experts: np.ndarray, slots: np.ndarray) -> Plan:
    """The same of rows by source, expert and place, [n, k, P]."""
    parts = np.where(parts.any(axis=2, keepdims=True), parts, parts.sum(0))
    ends = parts.cumsum(2)
    totals = ends[:, :, -1:]
    shares = -((-ends << BITS) // np.maximum(totals, 1))  # rounded up: `ends * c >> BITS` gives whole rows back
    found = np.full((len(parts), *slots.shape), 1 << BITS, dtype=np.int64)
    found[:, experts] = np.where(totals == 0, 1 << BITS, shares)  # nobody has rows: all of them go home
    return Plan(slots, found)


def _wrong_slots(slots: np.ndarray, owners: Sequence[int], ranks: int, room: int, cap: int) -> str:
    """What is wrong with where the experts are; empty if nothing is."""
    if slots.shape[0] != len(owners):
        return f"{slots.shape[0]} experts have slots, {len(owners)} have homes"
    if (most := int(np.bincount(owners, minlength=ranks).max())) > room:
        return f"{most} experts live on one rank, which has room for {room}"
    homes = homes_only(tuple(owners), ranks, cap).slots[:, 0]
    for expert in np.flatnonzero(slots[:, 0] != homes):
        return f"the home of expert {expert} is slot {homes[expert]} (rank {owners[expert]}), not {slots[expert, 0]}"
    valid = slots >= 0
    for expert in np.flatnonzero((valid[:, 1:] & ~valid[:, :-1]).any(1) | (slots < -1).any(1)):
        return f"expert {expert} has slots {slots[expert].tolist()}: -1 stands behind the last one alone"
    for expert, place in np.argwhere(slots >= ranks * cap):
        return f"expert {expert} has slot {slots[expert, place]} of {ranks * cap}"
    copies = [(expert, slots[expert, place]) for expert, place in np.argwhere(valid) if place]
    for expert, slot in copies:
        if slot % cap < room:
            return f"the copy of expert {expert} has slot {slot}, for experts that live on rank {slot // cap}"
    seen: dict[int, int] = {}
    for expert, slot in copies:
        if slot in seen:
            return f"slot {slot} has experts {seen[slot]} and {expert}"
        seen[int(slot)] = int(expert)
    for expert in range(len(slots)):
        on = (slots[expert][valid[expert]] // cap).tolist()
        if len(set(on)) < len(on):
            return f"expert {expert} is twice on a rank: its slots are on ranks {on}"
    return ""


def _wrong_ends(ends: np.ndarray, slots: np.ndarray) -> str:
    """What is wrong with the shares; empty if nothing is."""
    if ends.shape[1:] != slots.shape:
        return f"shares of shape {list(ends.shape)} for slots of shape {list(slots.shape)}"
    for rank, expert in np.argwhere((np.diff(ends, axis=2, prepend=0) < 0).any(2)):
        return f"the shares of rank {rank} for expert {expert} decrease: {ends[rank, expert].tolist()}"
    last = np.maximum((slots >= 0).sum(1) - 1, 0)
    final = np.take_along_axis(ends, last[None, :, None], axis=2)[:, :, 0]
    for rank, expert in np.argwhere((final != 1 << BITS) | (ends[:, :, -1] != 1 << BITS)):
        return f"the shares of rank {rank} for expert {expert} end at {ends[rank, expert, -1]}, not at {1 << BITS}"
    return ""
