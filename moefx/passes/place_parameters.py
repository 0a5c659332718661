"""Give every rank the parameters of its own experts. The second part of the step place-experts.

Contract
    takes  MOE   regions between enter_experts and leave_experts, with marked parameters
    gives        of the same graph parameters of this rank's experts alone; until `place_regions` has run, the rows
                 do not fit them
    never  touches rows, or parameters of anything but experts

Pseudo-code
    parameters of stacked experts: [E, ..] -> [E/n, ..], and of a dim that is cut over `esp` a part; those of separate
    experts become one stacked input
    where fewer ranks get a token's rows, or none (`PassContext.weights_over`), ranks gather their parts before the
    first use
    what is also read outside of the experts, or is computed in a way that mixes them, stays whole; a rank takes its
    part

    w_e = expert_parameter(w, 0)                ->  w of [E/n, ..]
    w_e = expert_parameter(stack([w0, ..]), 0)  ->  a new input of [E/n, ..]
    w_e = expert_parameter(w.flip(0), 0)        ->  w_e = own_experts(w.flip(0), n, 'ep')
    w_e = expert_parameter(w, 0)                ->  w_e = gather_weights(w of [E/n, ..], 'dim 1 of 8 over esp', ..)
    where homes differ in number, or move, there is room for as many as may be, [room, ..], and a table says who is who
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.recognition.expert_buffers import buffers_of_experts
from moefx.analysis.recognition.kept_whole import Reason, why_whole
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, regions
from moefx.ir.expert_weights import read_as
from moefx.ir.names import common_name
from moefx.ir.ops.dense import vary
from moefx.ir.ops.regions import expert_parameter, stack_experts
from moefx.ir.regions import table_of
from moefx.layout import Cut, Layout

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if ctx.mesh.size("ep") > 1:
        ctx.decisions.expert_buffers = buffers_of_experts(gm)
    markers = gm.graph.find_nodes(op="call_function", target=expert_parameter)
    whole = {m.args[0]: why_whole(m.args[0], ctx.whole_before) for m in markers if _is_whole(m.args[0])}
    for marker in markers:
        _place_parameter(gm, marker, whole, ctx, result)
    for stack in gm.graph.find_nodes(op="call_function", target=stack_experts):
        stack.target = torch.stack  # of parameters of something else
    return result


def _is_whole(root: Node) -> bool:
    """Whether a root is that of all experts, not an input of this rank's own that was made of it before."""
    return root.op != "placeholder" or root.meta["moefx"].kind not in ("experts", "stack")


def _place_parameter(
    gm: GraphModule, marker: Node, whole: dict[Node, Reason | None], ctx: PassContext, result: PassResult
) -> None:
    root, cut = marker.args[0], marker.meta.get("moefx_cut")
    reason = whole.get(root)
    if reason is not None:
        if reason.name and ctx.mesh.size("ep") > 1:
            ctx.report.kept_whole[reason.name] = reason.why
            result.changed(f"{reason.name} is whole on every rank: {reason.why}")
        root = _own_part(gm, root, marker.args[1], ctx)
    elif _is_whole(root):
        place = _own_input if root.op == "placeholder" else _stack_input
        root = place(gm, root, marker.args[1], cut, ctx)
    if reason is None and root.meta["moefx"].kind == "stack":
        ctx.decisions.readers.setdefault(root.meta["moefx"].key, set()).add(ctx.uncut(marker.args[1]))
    if reason is None and marker.users:
        root = _gathered(gm, root, marker, ctx)
    marker.replace_all_uses_with(root)
    gm.graph.erase_node(marker)


def _own_input(gm: GraphModule, param: Node, region: int, cut: Cut | None, ctx: PassContext) -> Node:
    """The input [E, ..] becomes this rank's part."""
    param.meta["moefx"] = _of_rank("experts", param.meta["moefx"].key, param, region, ctx, cut)
    param.meta["val"] = _local_fake(param, param.meta["moefx"], ctx)
    param.meta.pop("example_value", None)
    return param


def _gathered(gm: GraphModule, part: Node, marker: Node, ctx: PassContext) -> Node:
    """What the readers of a marker get of this rank's part: all that ranks have whose rows do not come here. Where all
    of them cast it to the same dtype, it travels in that."""
    over, home = ctx.mesh.dims(ctx.weights_over(marker.args[1])), part.meta["moefx"].layout
    layout = home.among(over, ctx.mesh.root)
    if not layout.cuts:
        return part
    axis, dtype = ctx.mesh.axis("+".join(dim for cut in layout.cuts for dim in cut.axis)), read_as(marker)
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    with edit.at(min(marker.users, key=order.__getitem__)):
        whole = edit.call(gm.graph, _ops.gather_weights.default, part, str(layout), ctx.mesh.size(axis), axis, dtype,
                          name=f"{marker.name}_gathered")  # fmt: skip
    regions.tag([whole], marker.args[1])
    whole.meta.pop("recompute", None)  # whether it runs again is not for who reads it to say
    shape = list(edit.tensor_value(part).shape)
    for cut in layout.cuts:
        shape[cut.dim] = sum(cut.pieces)
    whole.meta["val"] = compat.fake_like(ctx.fake_mode, edit.tensor_value(part), tuple(shape))
    for cast in list(marker.users) if dtype is not None else ():
        whole.meta["val"] = edit.tensor_value(cast)
        cast.replace_all_uses_with(whole)
        gm.graph.erase_node(cast)
    return whole


def _own_part(gm: GraphModule, whole: Node, region: int, ctx: PassContext) -> Node:
    """This rank's experts of what every rank has whole. Over ranks that read the same data its gradient is summed at
    once if their experts get other rows: others may read the whole, too."""
    axis, ways = ctx.places_over(region), (ctx.tokens_over(region), ctx.weights_over(region))
    n = ctx.mesh.size(axis)
    apart = ctx.mesh.axis("mp") if ctx.is_split(region) else ctx.copies(region, "+".join([axis, *ways]))
    full = edit.tensor_value(whole)
    if whole.target is stack_experts:
        whole.target = torch.stack
    if apart:
        with edit.at(whole, after=True):
            whole = edit.call(gm.graph, vary, whole, apart, name=f"{whole.name}_varied")
        whole.meta["val"] = full
    if n == 1:
        return whole
    slots, source = ctx.slots(region), _of_rank("", "", whole, region, ctx)
    by_table = () if slots is None else (table_of(gm, ctx.uncut(region)), slots.cap)
    source = source if slots is None else replace(source, room=source.room + source.spare)
    with edit.at(whole, after=True):
        new = edit.call(gm.graph, _ops.own_experts.default, whole, n, axis, *by_table,
                        name=f"{whole.name}_own")  # fmt: skip
    new.meta["val"] = _local_fake(whole, source, ctx, requires_grad=False)
    return new


def _stack_input(gm: GraphModule, stack: Node, region: int, cut: Cut | None, ctx: PassContext) -> Node:
    """The parameters of separate experts become one input, this rank's part of [E, ...]."""
    params = stack.args[0]
    for param in params:
        if param.meta["moefx"].kind != "param":
            raise RaiseError(f"experts differ in {param.name}, which is not a parameter", where=edit.place(stack))
    keys = [param.meta["moefx"].key for param in params]
    taken, name = {n.target for n in gm.graph.find_nodes(op="placeholder")}, "_".join(common_name(keys))
    if not name.isidentifier() or name in taken:  # a module that is called twice has one of each call
        name = f"{stack.name}_input"
    with gm.graph.inserting_before(params[0]):
        new = gm.graph.placeholder(name)
    new.meta["moefx"] = _of_rank("stack", tuple(keys), stack, region, ctx, cut)
    has_gradient = edit.tensor_value(params[0]).requires_grad
    new.meta["val"] = _local_fake(stack, new.meta["moefx"], ctx, requires_grad=has_gradient)
    stack.replace_all_uses_with(new)
    gm.graph.erase_node(stack)
    for param in params:
        if not param.users:
            gm.graph.erase_node(param)
    return new


def _of_rank(kind: str, key: Any, root: Node, region: int, ctx: PassContext, cut: Cut | None = None) -> Source:
    """What a rank has of a root of all experts."""
    rows, slots, axis = edit.tensor_value(root).shape[0], ctx.slots(region), ctx.mesh.axis("ep")
    if slots is None:
        layout, more = Layout.rows(rows, axis), ()
    else:
        each = rows // len(slots.owners)
        owners = [owner for owner in slots.owners for _ in range(each)]
        layout, more = Layout.spread(owners, axis, ctx.mesh.size("ep")), (each * slots.room, each * slots.spare)
    return Source(kind, key, layout if cut is None else Layout((*layout.cuts, cut)), *more)


def _local_fake(node: Node, source: Source, ctx: PassContext, requires_grad: bool | None = None) -> torch.Tensor:
    full = edit.tensor_value(node)
    shape = source.layout.shape(full.shape, ctx.mesh.root)
    shape = shape if source.room is None else (source.room, *shape[1:])
    fake = compat.fake_like(ctx.fake_mode, full, shape)
    grad = full.requires_grad if requires_grad is None else requires_grad
    return nn.Parameter(fake, requires_grad=grad)
