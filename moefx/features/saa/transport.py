"""An exchange in phases, by the distance between places: in phase d every rank sends to the ranks of the place d
further on, and receives from those of the place d before.

n ranks on the axis, in `places` places of n / places neighbours each. Where there are many places, a phase has several
distances. Known to compiler and runtime alike.
Source: Parm, section III-D and Fig. 5, where every place is one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.axes import MeshSpec, split_axes
from moefx.transport import shares

MOST = 8  # what is gathered behind the last phase is an eighth of all, and every phase has messages of its own


def phase_axis(mesh: MeshSpec, axis: str) -> str:
    """The axis of the places whose distance tells in which phase static blocks come back over `axis`, if what a phase
    brings is gathered over `mp` while the next one is on its way (Parm's SAA). Empty: there are no phases. Ranks of a
    place are those along `mp`, who gather among one another, and along `esp`, whose parts are one sum."""
    places = mesh.axis("ep", but="mp")
    leads = split_axes(axis)[: len(split_axes(places))] == split_axes(places)
    return places if leads else ""


def count(places: int) -> int:
    """How many phases there are."""
    return min(places, MOST)


def distances(places: int, phases: int, phase: int) -> range:
    """The distances of a phase; the first phase of all has those of 0: what stays at home."""
    return range(shares.start(places, phases, phase), shares.start(places, phases, phase + 1))


def peers(n: int, places: int, phases: int, phase: int, rank: int, *, sends: bool) -> list[int]:
    """The ranks that `rank` sends to in a phase, or receives from: by distance, neighbours in their order."""
    each = n // places
    here, sign = rank // each, 1 if sends else -1
    return [(here + sign * distance) % places * each + i
            for distance in distances(places, phases, phase) for i in range(each)]  # fmt: skip


def joined(slabs: Sequence[Tensor], dim: int, places: int, here: int) -> Tensor:
    """What the phases brought to a rank of the place `here`, in the order of places: [.., d/places * E, ..] of d
    distances each -> [.., E, ..]."""
    pieces: list[Tensor] = []
    for phase, slab in enumerate(slabs):
        pieces += slab.chunk(len(distances(places, len(slabs), phase)), dim)
    return torch.cat([pieces[(here - place) % places] for place in range(places)], dim)
