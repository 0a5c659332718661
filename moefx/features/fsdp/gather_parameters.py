"""Let every rank have some rows of the parameters outside of the experts, and gather them before they are used. A part
of the step place-experts.

Contract
    takes  the graph of one rank, behind `place_regions`: its inputs say which are parameters that it has whole
    gives  the same with a rank's own rows as inputs, and one gather for each bucket of them, before its first use
    never  changes what experts have, or what is too small: parameters of one dim, and of fewer rows than ranks

Pseudo-code
    a bucket: what is first used in one layer (up to the first number of a module's path) before the next one begins,
    of one dtype, with gradients or without
    ranks are those that read different data; rows are cut as DTensor's `Shard(0)` cuts them

    y = F.linear(x, w)  ->  gathered = gather_shards([w], [rows], [1], 1/4, 4, 'dp+ep', None); w_whole = gathered[0]
                            y = F.linear(x, w_whole)
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.layout import Layout

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, ranks = PassResult(), ctx.mesh.size("data")
    if not ctx.options.parallel.shard_dense or ranks == 1:
        return result
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    inputs = gm.graph.find_nodes(op="placeholder")
    first = {node: min(node.users, key=order.__getitem__) for node in inputs if _is_cut(node, ranks)}
    buckets: dict[tuple, list[Node]] = {}
    layer, run_of = None, 0
    for node in sorted(first, key=lambda node: order[first[node]]):
        found, tensor = layer_of(module_path(first[node])), edit.tensor_value(node)
        run_of += found != layer
        layer = found
        buckets.setdefault((run_of, tensor.dtype, tensor.requires_grad), []).append(node)
    for members in buckets.values():
        _gather(gm, members, [inputs.index(node) for node in members], first[members[0]], ctx)
    if buckets:
        result.changed(f"{len(first)} parameters are gathered from {ranks} ranks, in {len(buckets)} buckets")
    return result


def _is_cut(node: Node, ranks: int) -> bool:
    source, tensor = node.meta["moefx"], edit.tensor_value(node)
    is_whole = source.kind == "param" and not source.layout.cuts and bool(node.users)
    return is_whole and tensor.dim() > 1 and tensor.shape[0] >= ranks


def _gather(gm: GraphModule, members: list[Node], inputs: list[int], first: Node, ctx: PassContext) -> None:
    axis, ranks = ctx.mesh.axis("data"), ctx.mesh.size("data")
    whole = [edit.tensor_value(node) for node in members]
    rows = [tensor.shape[0] for tensor in whole]
    with gm.graph.inserting_before(first):
        gathered = edit.call(gm.graph, _ops.gather_shards.default, members, rows, inputs, 1.0 / ranks, ranks, axis,
                             None, name="gathered")  # fmt: skip
        parts = [edit.call(gm.graph, operator.getitem, gathered, i, name=f"{node.name}_whole")
                 for i, node in enumerate(members)]  # fmt: skip
    for new in (gathered, *parts):
        edit.inherit(new, first)
        new.meta.pop("recompute", None)
    gathered.meta["val"] = whole
    for node, part, tensor in zip(members, parts, whole):
        part.meta["val"] = tensor
        node.replace_all_uses_with(part, delete_user_cb=lambda user: user is not gathered)
        layout = Layout.rows(tensor.shape[0], axis)
        node.meta["moefx"] = Source("param", node.meta["moefx"].key, layout)
        fake = compat.fake_like(ctx.fake_mode, tensor, layout.shape(tensor.shape, ctx.mesh.root))
        node.meta["val"] = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        node.meta.pop("example_value", None)
