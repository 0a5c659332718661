"""Rules of memory: rings hold."""

from __future__ import annotations

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.rings import RING, done, maker, readers
from moefx.ir.rules import View, rule


@rule(Level.SCHEDULED)
def rings_hold(view: View) -> None:
    """No more members of a ring are alive at once than it has slots, and none outlives the graph."""
    place = {node: i for i, node in enumerate(view.nodes)}
    rings: dict[object, list[Node]] = {}
    for node in view.nodes:
        if RING in node.meta:
            rings.setdefault(node.meta[RING], []).append(node)
    for ring, members in rings.items():
        members.sort(key=lambda node: place[maker(node)])
        until: dict[Node, int] = {}
        for member in members:
            if any(reader.op == "output" for reader in readers(member)):
                view.fail(member, f"{member.name} is in a ring, and outlives the graph")
            born = place[maker(member)]
            alive = [*(other.name for other, end in until.items() if end > born), member.name]
            if len(alive) > ring.slots:
                names = f"{', '.join(alive[:-1])} and {alive[-1]}"
                view.fail(maker(member), f"{names} are alive at once, in a ring of {ring.slots}",
                          "a value of a ring is made when the readers of an earlier one are done")  # fmt: skip
            until[member] = max((place[done(reader)] for reader in readers(member)), default=born)
