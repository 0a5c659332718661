"""Spread the experts of every region over the expert axis.

Contract
    takes  MOE      regions between enter_experts and leave_experts, with marked parameters
    gives  PLACED   one program for every rank: tokens travel to the slots of their experts and back; a parameter of
                    experts holds this rank's slots only; every parameter is used through materialize
    never  changes values: on one rank all of it is the identity

Pseudo-code
    1. parameters: [E, ...] -> [E/n, ...]; separate experts' parameters become one stacked input; what is also read
       outside of the experts, or is computed in a way that mixes them, stays whole, of which a rank takes its part
    2. dropless regions: route by the placement table; exchange counts; enter = all_to_all + regroup; leave = back
       capacity regions: enter and leave = one equal all_to_all
    3. materialize every parameter; counts become outputs (for moe_stats)

    y = leave(grouped_linear(enter(rows), w, counts))
        ->  y = all_to_all(regroup(grouped_linear(regroup(all_to_all(rows)), w_local, slot_counts)))
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.expert_buffers import buffers_of_experts
from moefx.analysis.kept_whole import Reason, why_whole
from moefx.analysis.routings import choices_behind
from moefx.capture.trace import Source
from moefx.errors import MeshError, RaiseError
from moefx.ir import edit, regions
from moefx.ir.describe import module_path
from moefx.ir.op import expr, value
from moefx.ir.ops.parameters import materialize
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts, stack_experts
from moefx.layout import Layout
from moefx.pass_types import PassContext, PassResult

_ops = torch.ops.moefx
_RESIZES = ("view", "reshape", "expand", "new_zeros", "new_ones", "new_empty")  # methods whose sizes follow x


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    for enter in enters:
        _check_divides(enter, ctx)
    if ctx.mesh.expert_ranks > 1:
        ctx.expert_buffers = buffers_of_experts(gm)
    markers = gm.graph.find_nodes(op="call_function", target=expert_parameter)
    whole = {m.args[0]: why_whole(m.args[0], ctx.whole_before) for m in markers if _is_whole(m.args[0])}
    for marker in markers:
        _place_parameter(gm, marker, whole, ctx, result)
    for stack in gm.graph.find_nodes(op="call_function", target=stack_experts):
        stack.target = torch.stack  # of parameters of something else
    for number in sorted({n.args[-1] for n in enters}):
        _place_region(gm, number, ctx)
        result.changed(f"region {number} over {ctx.mesh.expert_ranks} ranks")
    _materialise(gm, ctx, result)
    _add_outputs(gm, ctx)
    return result


def _check_divides(enter: Node, ctx: PassContext) -> None:
    experts, n = _experts_of(enter), ctx.mesh.expert_ranks
    if experts % n:
        divisors = [d for d in range(1, experts + 1) if experts % d == 0]
        raise MeshError(
            f"{experts} experts do not divide over the axis '{ctx.mesh.expert_axis}' of size {n}",
            where=edit.place(enter),
            hint=f"use an axis of size {', '.join(map(str, divisors))}",
        )


# ---- parameters


def _is_whole(root: Node) -> bool:
    """Whether a root is that of all experts, not an input of this rank's own that was made of it before."""
    return root.op != "placeholder" or root.meta["moefx"].kind not in ("experts", "stack")


def _place_parameter(
    gm: GraphModule, marker: Node, whole: dict[Node, Reason | None], ctx: PassContext, result: PassResult
) -> None:
    root = marker.args[0]
    reason = whole.get(root)
    if reason is not None:
        if reason.name and ctx.mesh.expert_ranks > 1:
            ctx.kept_whole[reason.name] = reason.why
            result.changed(f"{reason.name} is whole on every rank: {reason.why}")
        root = _own_part(gm, root, ctx)
    elif _is_whole(root):
        root = _stack_input(gm, root, ctx) if root.target is stack_experts else _own_input(root, ctx)
    marker.replace_all_uses_with(root)
    gm.graph.erase_node(marker)


def _own_input(param: Node, ctx: PassContext) -> Node:
    """The input [E, ..] becomes one of this rank's experts [E/n, ..]."""
    layout = _rows(param, ctx)
    param.meta["moefx"] = Source("experts", param.meta["moefx"].key, layout)
    param.meta["val"] = _local_fake(param, layout, ctx)
    param.meta.pop("example_value", None)
    return param


def _own_part(gm: GraphModule, whole: Node, ctx: PassContext) -> Node:
    """This rank's experts of what every rank has whole."""
    n = ctx.mesh.expert_ranks
    if whole.target is stack_experts:
        whole.target = torch.stack
    if n == 1:
        return whole
    with edit.at(whole, after=True):
        new = edit.call(gm.graph, _ops.own_experts.default, whole, n, ctx.mesh.expert_axis, name=f"{whole.name}_own")
    new.meta["val"] = _local_fake(whole, _rows(whole, ctx), ctx, requires_grad=False)
    return new


def _stack_input(gm: GraphModule, stack: Node, ctx: PassContext) -> Node:
    """The parameters of separate experts become one input [E/n, ...]."""
    params = stack.args[0]
    for param in params:
        if param.meta["moefx"].kind != "param":
            raise RaiseError(f"experts differ in {param.name}, which is not a parameter", where=edit.place(stack))
    with gm.graph.inserting_before(params[0]):
        new = gm.graph.placeholder(f"{stack.name}_input")
    layout = _rows(stack, ctx)
    new.meta["moefx"] = Source("stack", tuple(p.meta["moefx"].key for p in params), layout)
    new.meta["val"] = _local_fake(stack, layout, ctx, requires_grad=edit.tensor_value(params[0]).requires_grad)
    stack.replace_all_uses_with(new)
    gm.graph.erase_node(stack)
    for param in params:
        if not param.users:
            gm.graph.erase_node(param)
    return new


def _rows(node: Node, ctx: PassContext) -> Layout:
    """Experts spread over the ranks that have other ones."""
    return Layout.rows(edit.tensor_value(node).shape[0], ctx.mesh.expert_axis if ctx.mesh.expert_ranks > 1 else None)


def _local_fake(node: Node, layout: Layout, ctx: PassContext, requires_grad: bool | None = None) -> torch.Tensor:
    full = edit.tensor_value(node)
    fake = compat.fake_like(ctx.fake_mode, full, layout.shape(full.shape, ctx.mesh.axes))
    grad = full.requires_grad if requires_grad is None else requires_grad
    return nn.Parameter(fake, requires_grad=grad)


def _materialise(gm: GraphModule, ctx: PassContext, result: PassResult) -> None:
    """One materialize per parameter that wants a gradient, before its first use."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    mesh = ctx.mesh
    for index, node in enumerate(placeholders):
        kind = node.meta["moefx"].kind
        if kind not in ("param", "experts", "stack") or not edit.tensor_value(node).requires_grad or not node.users:
            continue
        own = {mesh.expert_axis} if kind != "param" else set()
        axes = "+".join(a for a in mesh.data_axes if a not in own and mesh.axes[a] > 1)
        first = min(node.users, key=_order(gm).__getitem__)
        with gm.graph.inserting_before(first):
            new = edit.call(gm.graph, materialize, node, "identity", axes, 1.0 / mesh.data_ranks, index,
                            name=f"use_{_leaf_name(node)}")  # fmt: skip
        edit.inherit(new, first)
        new.meta.pop("recompute", None)
        new.meta["val"] = edit.tensor_value(node)
        edit.rewrite_uses(node, new)
    result.changed("parameters materialised")


def _order(gm: GraphModule) -> dict[Node, int]:
    cached = gm.meta.get("_order")
    if cached is None or len(cached) < len(gm.graph.nodes):
        cached = {n: i for i, n in enumerate(gm.graph.nodes)}
        gm.meta["_order"] = cached
    return cached


def _leaf_name(node: Node) -> str:
    key = node.meta["moefx"].key
    name = key if isinstance(key, str) else key[0]
    return "_".join(name.split(".")[-2:])


# ---- regions


def _place_region(gm: GraphModule, number: int, ctx: PassContext) -> None:
    enters = [n for n in gm.graph.find_nodes(op="call_function", target=enter_experts) if n.args[-1] == number]
    leaves = [n for n in gm.graph.find_nodes(op="call_function", target=leave_experts) if n.args[-1] == number]
    counts = enters[0].args[1]
    path = module_path(enters[0])
    if counts is None:
        regions.tag(edit.descendants(enters) & edit.ancestors(leaves), number)
        load, choices = _count_blocks(gm, enters[0]) if _is_first(number, ctx) else (None, ())
        ctx.add_region(number, path, _experts_of(enters[0]), load, choices, ctx.mesh.expert_axis)
        _place_blocks(gm, enters, leaves, ctx)
        return
    route = counts.args[0]
    inside = edit.descendants([route], until=_ops.combine.default)
    regions.tag((n for n in inside if n.op != "output"), number)
    if ctx.mesh.expert_ranks == 1:
        for marker in enters + leaves:
            marker.replace_all_uses_with(marker.args[0])
            gm.graph.erase_node(marker)
        ctx.add_region(number, path, route.args[1], counts, (route.args[0],), None)
        return
    _place_rows(gm, number, route, counts, enters, leaves, ctx)


def _is_first(number: int, ctx: PassContext) -> bool:
    return number not in ctx.chunks or ctx.chunks[number].index == 0


def _experts_of(enter: Node) -> int:
    counts = enter.args[1]
    return int(edit.tensor_value(enter).shape[enter.args[2]]) if counts is None else counts.args[0].args[1]


def _count_blocks(gm: GraphModule, enter: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """Filled places per expert [E], and the router's choices, if the user's code shows them: the one-hot operand of the
    einsum that fills the blocks, and the top-k or argmax behind it."""
    source, expert_dim, row_dim = enter.args[0], enter.args[2], enter.args[3]
    if source.target is operator.getitem and source.args[0].target == "split":  # the first chunk speaks for all
        source = source.args[0].args[0]
    while source.target in ("unsqueeze", "flatten", "movedim"):  # groups of rows that were merged into one
        source = source.args[0]
    if getattr(source.target, "__name__", "") != "einsum" or not isinstance(source.args[0], str):
        return None, ()
    subs, out = source.args[0].replace(" ", "").split("->")
    letters = out[expert_dim], out[row_dim]
    masks = [(s, n) for s, n in zip(subs.split(","), source.args[1:]) if all(c in s for c in letters)]
    if len(masks) != 1:
        return None, ()
    sub, mask = masks[0]
    dims = [i for i, c in enumerate(sub) if c != letters[0]]
    with edit.at(enter):
        filled = gm.graph.call_method("ne", (mask, 0))
        load = gm.graph.call_method("sum", (filled, dims))
    value_of = edit.tensor_value(mask)
    filled.meta["val"] = value_of.ne(0)
    load.meta["val"] = filled.meta["val"].sum(dims)
    return load, choices_behind(mask)


def _place_blocks(gm: GraphModule, enters: list[Node], leaves: list[Node], ctx: PassContext) -> None:
    n, axis = ctx.mesh.expert_ranks, ctx.mesh.expert_axis
    for marker in enters + leaves:
        x, _, expert_dim, row_dim, number = marker.args
        reverse = marker.target is leave_experts
        if n > 1:
            if not reverse:
                size, sizes, total = _exchanged_size(gm, enters[0], row_dim, ctx)
            with edit.at(marker):
                new = edit.call(gm.graph, _ops.all_to_all_capacity.default, x, sizes, size if reverse else total,
                                expert_dim, row_dim, n, axis, reverse,
                                name=f"r{number}_{'leave' if reverse else 'enter'}_a2a")  # fmt: skip
            x = new
        marker.replace_all_uses_with(x)
        gm.graph.erase_node(marker)
    edit.move_in_order(gm)


def _exchanged_size(gm: GraphModule, enter: Node, row_dim: int, ctx: PassContext) -> tuple[object, Node, Node]:
    """(this rank's capacity, all ranks' capacities, their sum); exchanged once per capacity and program."""
    n, axis = ctx.mesh.expert_ranks, ctx.mesh.expert_axis
    wanted = expr(edit.tensor_value(enter).shape[row_dim])
    for known in gm.graph.find_nodes(op="call_function", target=_ops.exchange_sizes.default):
        size = known.args[0]
        if expr(value(size) if isinstance(size, Node) else size) == wanted:
            return size, known, next(u for u in known.users if u.target is _ops.total_size.default)
    with edit.at(enter):
        if wanted.is_Integer:
            size: object = int(wanted)
        else:
            size = gm.graph.create_node("call_method", "size", (enter.args[0], row_dim), name="capacity")
            size.meta["val"] = edit.tensor_value(enter).shape[row_dim]
        sizes = edit.call(gm.graph, _ops.exchange_sizes.default, size, n, axis, name="capacities")
        total = edit.call(gm.graph, _ops.total_size.default, sizes, name="capacity_sum")
    return size, sizes, total


def _place_rows(
    gm, number: int, route: Node, counts: Node, enters: list[Node], leaves: list[Node], ctx: PassContext
) -> None:
    path = module_path(enters[0])
    n, axis, graph = ctx.mesh.expert_ranks, ctx.mesh.expert_axis, gm.graph
    table = _table_input(gm, number, route, ctx)
    route.args = (route.args[0], route.args[1], table)
    with edit.at(counts, after=True):
        traffic = edit.call(graph, _ops.exchange_counts.default, counts, n, axis, name=f"r{number}_traffic")
        host = edit.call(graph, _ops.counts_to_host.default, traffic, axis, name=f"r{number}_host")
        rows = edit.call(graph, _ops.received_rows.default, host, n, axis, name=f"r{number}_rows")
        local = edit.call(graph, _ops.slot_counts.default, traffic, n, axis, name=f"r{number}_slots")
        perm = next(u for u in route.users if u.target is operator.getitem and u.args[1] == 0)
        pairs = graph.create_node("call_method", "size", (perm, 0), name=f"r{number}_sent")
    if list(graph.nodes).index(perm) > list(graph.nodes).index(pairs):
        counts.append(perm)  # the size is read from perm, which may stand behind the counts
    inside = edit.descendants(enters) & edit.ancestors(leaves)
    total = expr(value(perm).shape[0])
    for node in inside | set(counts.users):
        if node in (traffic,) or node.target in (enter_experts, leave_experts):
            continue
        _use_local_sizes(node, counts, local, rows, total)
    for marker in enters + leaves:
        x, reverse = marker.args[0], marker.target is leave_experts
        way = "leave" if reverse else "enter"
        with edit.at(marker):
            if reverse:
                x = edit.call(graph, _ops.regroup.default, x, host, n, axis, True, name=f"r{number}_{way}_regroup")
            x = edit.call(graph, _ops.all_to_all.default, x, host, pairs if reverse else rows, n, axis, reverse,
                          name=f"r{number}_{way}_a2a")  # fmt: skip
            if not reverse:
                x = edit.call(graph, _ops.regroup.default, x, host, n, axis, False, name=f"r{number}_{way}_regroup")
        marker.replace_all_uses_with(x)
        graph.erase_node(marker)
    edit.move_in_order(gm)
    ctx.add_region(number, path, route.args[1], traffic, (route.args[0],), axis)


def _use_local_sizes(node: Node, counts: Node, local: Node, rows: Node, total) -> None:
    """Inside the experts counts are those of the local slots, and there are `rows` rows."""
    node.replace_input_with(counts, local)
    if total.is_Integer:
        _use_local_rows(node, rows, int(total))
    for argument in list(node.all_input_nodes):
        found = value(argument)
        if isinstance(found, torch.SymInt) and argument is not rows:
            if found.node.expr == total:
                node.replace_input_with(argument, rows)
            elif total.free_symbols and found.node.expr.has(*total.free_symbols):
                raise RaiseError(
                    f"{node.name} uses the size {found.node.expr} of the tokens inside the experts",
                    where=edit.place(node),
                    hint="use -1 in views of experts' rows",
                )


def _use_local_rows(node: Node, rows: Node, total: int) -> None:
    """The same in a program of one size, which has no symbol for its rows: where the op says that its number is one."""
    x, *sizes = node.args or (None,)
    if node.target is _ops.expert_rows.default:
        node.args = (x, sizes[0], rows)
    elif node.target in _RESIZES and int(edit.tensor_value(node).shape[0]) == total:
        nested = len(sizes) == 1 and isinstance(sizes[0], (list, tuple))
        first, *others = sizes[0] if nested else sizes
        if first == total:
            node.args = (x, (rows, *others)) if nested else (x, rows, *others)


def _table_input(gm: GraphModule, number: int, route: Node, ctx: PassContext) -> Node:
    """The placement table of a region [E, 1]: a runtime tensor, so that experts may move without a new program."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if not _is_first(number, ctx):  # the chunks of a region go by one table
        source = Source("table", ctx.chunks[number].of)
        return next(node for node in inputs if node.meta["moefx"] == source)
    with gm.graph.inserting_after(inputs[-1]):
        table = gm.graph.placeholder(f"r{number}_table")
    idx = edit.tensor_value(route.args[0])
    table.meta["moefx"] = Source("table", number)
    with ctx.fake_mode:
        table.meta["val"] = torch.empty(route.args[1], 1, dtype=torch.int64, device=idx.device)
    return table


# ---- outputs


def _add_outputs(gm: GraphModule, ctx: PassContext) -> None:
    """Counts leave the program as outputs behind the user's; an output that aliases something is copied, since the
    program hands out its own memory."""
    output = gm.graph.output_node()
    user = list(output.args[0])
    inputs = {edit.tensor_value(p).untyped_storage()._cdata for p in gm.graph.find_nodes(op="placeholder")}
    for i, node in enumerate(user):
        found = edit.tensor_value(node)
        if found is None:
            continue
        if found.untyped_storage()._cdata in inputs:
            with gm.graph.inserting_before(output):
                user[i] = gm.graph.call_method("clone", (node,))
                user[i].meta["val"] = found
        else:
            inputs.add(found.untyped_storage()._cdata)
    known = [facts for _, facts in sorted(ctx.regions.items()) if facts.load is not None]
    stats = [node for facts in known for node in (facts.load, *facts.choices)]
    ctx.num_user_outputs = len(user)
    output.args = ((*user, *stats),)
