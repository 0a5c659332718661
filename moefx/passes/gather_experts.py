"""Fetch the parameters of experts that a rank has copies of. A part of the step place-experts.

Contract
    takes  MOE   regions with marked parameters; `Decisions.slots` says which of them have room for copies
    gives  the same with one gather_experts per region for all its parameters (one of each kind, if some are frozen or
           cast), which its chunks share; until `place_parameters` and `place_regions` have run, neither parameters nor
           rows fit it
    never  touches a region without room for copies

Pseudo-code
    the region's table in the host's memory says who gets what; weights that every rank has whole need nobody
    where all readers cast a parameter to the same dtype, as under autocast, it travels in that
    the gradients come home by its transpose, before they are reduced over the ranks that hold the same experts

    w_e = expert_parameter(w, 0); b_e = expert_parameter(b, 0)
        ->  w_s, b_s = gather_experts([expert_parameter(w, 0), expert_parameter(b, 0)], r0_moves, 2, 3, 4, 'ep', ..)
"""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.recognition.kept_whole import why_whole
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit, regions
from moefx.ir.expert_weights import read_as
from moefx.ir.ops.regions import expert_parameter
from moefx.ir.regions import table_of

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    marked: dict[int, list[Node]] = {}
    for marker in gm.graph.find_nodes(op="call_function", target=expert_parameter):
        slots = ctx.slots(marker.args[1])
        if slots is not None and slots.spare and marker.users and why_whole(marker.args[0], ctx.whole_before) is None:
            marked.setdefault(ctx.uncut(marker.args[1]), []).append(marker)
    for number, markers in sorted(marked.items()):
        alike: dict[Hashable, list[Node]] = {}
        for marker in markers:
            alike.setdefault((edit.tensor_value(marker).requires_grad, read_as(marker)), []).append(marker)
        for (_, dtype), mine in alike.items():
            _gather(gm, number, mine, dtype, ctx)
        result.changed(f"region {number} fetches {len(markers)} parameters for {ctx.slots(number).spare} spare slots")
    if marked:
        edit.move_in_order(gm)
    return result


def _gather(gm: GraphModule, number: int, markers: list[Node], dtype: torch.dtype | None, ctx: PassContext) -> None:
    slots, axis, (n, m) = ctx.slots(number), ctx.mesh.axis("ep"), ctx.mesh.nodes_of("ep")
    users = {marker: list(marker.users) for marker in markers}
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    first = min((user for each in users.values() for user in each), key=order.__getitem__)
    with edit.at(first) as graph:
        found = edit.call(graph, _ops.gather_experts.default, markers, table_of(gm, number, "moves"), slots.room,
                          slots.cap, n, axis, None if m == n else m, dtype, name=f"r{number}_gather")  # fmt: skip
        for place, marker in enumerate(markers):
            mine = edit.call(graph, operator.getitem, found, place, name=f"{marker.name}_slots")
            mine.meta["val"] = edit.tensor_value(marker)  # until all has its size
            for user in users[marker]:
                if dtype is None:
                    user.replace_input_with(marker, mine)
                else:
                    user.replace_all_uses_with(mine)
    found.meta["val"] = [edit.tensor_value(marker) for marker in markers]
    found.meta.pop("recompute", None)  # whether it runs again is not for who reads it to say
    regions.tag([found], number)
    for cast in [user for each in users.values() for user in each] if dtype is not None else ():
        gm.graph.erase_node(cast)
