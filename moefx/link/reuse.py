"""Let elementwise results take the memory of an operand that nobody reads any more.

    hidden = mul(silu, up)   # the last reader of silu   ->   hidden = mul_(silu, up)

Only where nothing else can see the operand's memory: it is the fresh result of an op, never a view and never viewed,
not an input or an output, and read by synchronous ops alone (what an exchange sends must stay as it is until the wait).
The numbers are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.ir.op import expr, value

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.div.Tensor: _aten.div_.Tensor,
}
# Gradients of activations have no form in place, but one that takes the memory of the incoming gradient.
_INTO_GRADIENT = {
    getattr(_aten, name).default: getattr(_aten, name).grad_input
    for name in ("silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward")
}
_TAKES_MEMORY = {*_IN_PLACE.values(), *_INTO_GRADIENT.values()}  # of their first argument
_FRESH = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default}
FRESH = "fresh"
"""In the meta of what became of an op whose record says so: whether it also writes to an argument."""


def run(gm: GraphModule) -> int:
    """Rewrite the linked graph; returns how many results found memory."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    found = 0
    for node in order:
        if node.target in _INTO_GRADIENT and _dies_at(node.args[0], node, order):
            node.target = _INTO_GRADIENT[node.target]
            node.kwargs = {**node.kwargs, "grad_input": node.args[0]}
            found += 1
        if node.target not in _IN_PLACE or node.kwargs:
            continue
        operand = node.args[0]
        if node.target in (_aten.mul.Tensor, _aten.add.Tensor) and not _dies_at(operand, node, order):
            node.args = (node.args[1], node.args[0]) if _dies_at(node.args[1], node, order) else node.args
            operand = node.args[0]
        if _dies_at(operand, node, order):
            node.target = _IN_PLACE[node.target]
            found += 1
    return found


def _dies_at(operand: Any, node: Node, order: dict[Node, int]) -> bool:
    """Whether `operand` is fresh memory of the result's shape that `node` is the last to read."""
    if not isinstance(operand, Node) or not _is_fresh(operand) or not _alike(operand, node):
        return False
    if list(node.args).count(operand) != 1:
        return False
    return all(user is node or (order[user] < order[node] and _only_reads(user, operand)) for user in operand.users)


def _is_fresh(node: Node) -> bool:
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    is_new = isinstance(node.target, OpOverload) and torch.Tag.pointwise in tags and not _writes(node.target)
    # What was computed in place is as fresh as what it was computed in.
    return is_new or FRESH in node.meta or node.target in _FRESH or node.target in _TAKES_MEMORY


def _only_reads(node: Node, operand: Node) -> bool:
    """Whether an op reads `operand`, hands out none of its memory, and is done with it when it returns."""
    if node.target in _TAKES_MEMORY:
        return node.args[0] is not operand
    if FRESH in node.meta:
        return not node.meta[FRESH]
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or _writes(node.target):
        return False
    schema = node.target._schema
    aliased = any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    return not aliased and node.target.overloadpacket not in (_aten.reshape, _aten.contiguous, _aten._to_copy)


def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable


def _alike(operand: Node, node: Node) -> bool:
    a, b = value(operand), value(node)
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and tuple(map(expr, a.shape)) == tuple(map(expr, b.shape))
        and tuple(map(expr, a.stride())) == tuple(map(expr, b.stride()))
    )
