"""Let small gradients that go the same way share a collective: a bucket.

An all-reduce takes longer to begin than a norm's gradient takes to be sent. How many bytes it is worth beginning for
the machine says (`Machine.bucket_bytes`); gradients of as many go alone, as soon as they are there, and are not copied.

Contract
    takes  PLACED   forward or backward graph at ATen level, every gradient with a reduction of its own
    gives  PLACED   the same; no small gradient goes alone but what is left over of its way
    never  joins what differs in ranks, scale, dtype or device, or changes what is summed

Pseudo-code
    layers in the order of the backward: as many whole ones make a bucket as it takes until it is full. A layer that
    fills several is cut into them by itself: so equal layers have equal buckets, and stay equal.
    a bucket stands behind the last of its gradients; when it is started is for the order of tasks to say

    a = reduce_gradient(ga, "dp", 1/2, 0); b = reduce_gradient(gb, "dp", 1/2, 1)
        ->  both = reduce_gradients([ga, gb], "dp", 1/2, [0, 1]); a = both[0]; b = both[1]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import groupby

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.costmodel import machine
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import argument, value

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    limit = machine.BUCKET_BYTES if ctx.machine is None else ctx.machine.bucket_bytes
    reduced = [node for node in gm.graph.find_nodes(op="call_function", target=_ops.reduce_gradient.default)
               if ctx.mesh.size(argument(node, "axes")) > 1]  # fmt: skip
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    ways: dict[tuple, list[Node]] = {}
    for node in sorted(reduced, key=place.__getitem__):
        if _size([node]) < limit:
            way = argument(node, "axes"), argument(node, "scale"), value(node).dtype, value(node).device
            ways.setdefault(way, []).append(node)
    found = [members for small in ways.values() for members in _buckets(small, limit) if len(members) > 1]
    for members in found:
        result.changed(f"{len(members)} gradients, {_mega(_size(members))}, over {argument(members[0], 'axes')}")
        _join(members)
    if reduced:
        several = sum(map(len, found))
        ctx.report.reductions["buckets"] = (
            f"{len(reduced)} in {len(reduced) - several + len(found)} collectives"
            + (f", {several} of them in {len(found)} buckets, full at {_mega(limit)}" if found else ""))  # fmt: skip
    return result


def _mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def _size(nodes: list[Node]) -> int:
    return sum(value(node).numel() * value(node).element_size() for node in nodes)


def _buckets(small: list[Node], limit: float) -> Iterator[list[Node]]:
    filling: list[Node] = []
    for _, found in groupby(small, lambda node: layer_of(module_path(node))):
        layer = list(found)
        if _size(layer) >= limit:
            yield from _cut(layer, limit)
            continue
        filling += layer
        if _size(filling) >= limit:
            yield filling
            filling = []
    yield filling


def _cut(layer: list[Node], limit: float) -> list[list[Node]]:
    """What is too little for a bucket of its own is in the last one."""
    found: list[list[Node]] = [[]]
    for node in layer:
        if _size(found[-1]) >= limit:
            found.append([])
        found[-1].append(node)
    *rest, last = found
    return [*rest[:-1], rest[-1] + last] if rest and _size(last) < limit else found


def _join(members: list[Node]) -> None:
    grads, inputs = [node.args[0] for node in members], [argument(node, "param") for node in members]
    axes, scale = members[0].args[1:3]
    with edit.at(members[-1], after=True) as graph:
        bucket = edit.call(graph, _ops.reduce_gradients.default, grads, axes, scale, inputs, name="reduced_gradients")
    bucket.meta["val"] = [value(node) for node in members]
    for number, node in reversed([*enumerate(members)]):
        node.target, node.args = operator.getitem, (bucket, number)
        bucket.append(node)
