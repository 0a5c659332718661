"""To how many of the ranks that share an expert rows may go: what a room says of it; without one, to all."""

from __future__ import annotations

from moefx import rooms
from moefx.planning.pricing import More
from moefx.rooms import Degrees

_TO_ALL = Degrees(
    allowed=lambda region, schedule, ctx, has_limit: (ctx.mesh.size("esp"),),
    change=lambda r, numbers, way, ctx: (numbers, way, ""),
    more=lambda r, numbers, ctx: More(),
    arrived=lambda graphs, stages: lambda storage: None,
    closed=lambda rows, numbers, mesh, machine: None,
)  # fmt: skip


def degrees() -> Degrees:
    return rooms.degrees() or _TO_ALL
