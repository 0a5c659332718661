"""A rule of phases: what they bring is gathered and joined as the one exchange would have brought it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefx.features.saa.transport import phase_axis
from moefx.ir.regions import region_of
from moefx.ir.rules import Call, View
from moefx.ir.ways import COMBINE, Way


def joined(view: View, call: Call) -> None:
    """What phases brought is joined where each of them is gathered over `mp`, once, in the order of distances."""
    slabs, mesh = call.args["slabs"], view.facts.mesh
    kept: set[tuple[Any, ...]] = set()
    for number, slab in enumerate(slabs):
        gather = _made_by(view, call, slab, "all_gather")
        phase = view.call_of.get(gather.args["part"])
        has_sum = phase is not None and phase.op.tokens is not None and phase.op.tokens.rule == "dumped"
        phase = _made_by(view, call, phase.args["rows"] if has_sum else gather.args["part"], "all_to_all")
        found, count = phase.args["phase"], phase.args["phases"]
        if (found, count) != (number, len(slabs)):
            view.fail(call.node, f"{call.name}: phase {found} of {count} stands in place {number} of {len(slabs)}")
        way = view.facts.ways.get(region_of(phase.node), Way())
        if has_sum is not any(hop.kind == COMBINE for hop in way.back):
            said = "summed" if has_sum else "not summed"
            view.fail(gather.node, f"phase {number} is {said} before it is gathered")
        if gather.args["axis"] != mesh.axis("mp") or gather.args["dim"] != phase.args["row_dim"]:
            view.fail(gather.node, f"phase {number} is gathered over '{gather.args['axis']}', in dim "
                                   f"{gather.args['dim']}")  # fmt: skip
        kept.add(tuple(found for name, found in phase.args.items() if name != "phase"))
    if len(kept) > 1:
        view.fail(call.node, f"{call.name} joins phases of several exchanges")
    wanted = phase_axis(mesh, phase.args["axis"])
    for axis, n in ((call.args["axis"], call.args["n"]), (wanted, phase.args["places"])):
        if (axis, n) != (wanted, mesh.size(wanted)):
            view.fail(call.node, f"{call.name} joins {n} places along '{axis}'",
                      f"there are {mesh.size(wanted)} along '{wanted}'")  # fmt: skip


def _made_by(view: View, call: Call, node: Node, collective: str) -> Call:
    found = view.call_of.get(node)
    if found is None or found.op.collective != collective or found.result is not node:
        view.fail(call.node, f"{call.name}: {node.name} comes from no {collective} of a phase")
    return found
