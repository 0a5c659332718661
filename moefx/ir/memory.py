"""In whose memory the results of a graph lie: which may take that of an operand, and which do.

What a pass decided stands in `meta["takes"]`: the place of the operand among the arguments. What an op always does
stands in its record (`OpDef.overwrites`, and the word `is_owned` of its runtime call).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import sympy
import torch
from torch.fx import Node

from moefx._torch_compat import OpOverload
from moefx.ir.op import argument, expr, lookup, value
from moefx.ir.ops.order import unsplit, wait

_aten = torch.ops.aten
IN_PLACE = {
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.div.Tensor: _aten.div_.Tensor,
}
"""Elementwise ops, and their forms that write to the first operand."""
COMMUTE = (_aten.mul.Tensor, _aten.add.Tensor)
INTO_GRADIENT = {
    getattr(_aten, name).default: getattr(_aten, name).grad_input
    for name in ("silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward")
}
"""Gradients of activations have no form in place, but one that takes the memory of the incoming gradient."""
_FRESH = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default}
_VIEWS = {"t", "transpose", "permute", "reshape", "view", "_unsafe_view", "squeeze", "unsqueeze", "slice", "select"}


def taken(node: Node) -> Node | None:
    """The operand whose memory the result of a node takes, if there is one."""
    if "takes" in node.meta:
        return node.args[node.meta["takes"]]
    op, _ = unsplit(node)
    if op is not None and op.overwrites:
        return argument(node, op.overwrites)
    if node.target is not wait:
        return None
    begun = node.args[0]
    op, call = unsplit(begun)
    if op is None or op.runtime is None or "is_owned" not in op.runtime.words or not is_owned(call.args[0], begun):
        return None
    # What travels is copied first if it does not lie row by row.
    return call.args[0] if _lies_row_by_row(value(call.args[0])) or not op.axes_of(call) else None


def places_to_take(node: Node) -> tuple[int, ...]:
    """The places of the arguments whose memory the result could take, the best first."""
    if node.target in INTO_GRADIENT:
        return (0,)
    if node.target not in IN_PLACE or node.kwargs:
        return ()
    return (0, 1) if node.target in COMMUTE else (0,)


def may_take(node: Node, position: int, order: Mapping[Node, int]) -> bool:
    """Whether an argument of `node` is fresh memory of the result's shape that nothing else sees from then on."""
    operand = node.args[position] if position < len(node.args) else None
    if not isinstance(operand, Node) or not _is_fresh(operand) or not _alike(operand, node):
        return False
    if list(node.args).count(operand) != 1:
        return False
    return all(user is node or (order[user] < order[node] and _only_reads(user, operand)) for user in operand.users)


def is_owned(operand: Node, user: Node) -> bool:
    """Whether nobody but `user` sees the memory of `operand`, so that it may be written to and handed out."""
    while True:
        if set(operand.users) != {user} or operand.op == "placeholder":
            return False
        if operand.meta.get("is_alone"):  # made by a function of several ops, which has let go of it
            return True
        op = lookup(operand)
        name = getattr(getattr(operand.target, "overloadpacket", None), "__name__", "")
        if name not in _VIEWS and (op is None or not op.is_view(operand)):
            return (name not in ("expand", "detach", "alias", "split", "unbind")
                    and operand.target is not operator.getitem)  # fmt: skip
        operand, user = operand.args[0], operand


def _is_fresh(node: Node) -> bool:
    if node.op != "call_function":
        return False
    op = lookup(node)
    if op is not None:
        return op.fresh
    tags = getattr(node.target, "tags", ())
    is_new = isinstance(node.target, OpOverload) and torch.Tag.pointwise in tags and not _writes(node.target)
    return is_new or node.target in _FRESH or "takes" in node.meta


def _only_reads(node: Node, operand: Node) -> bool:
    """Whether an op reads `operand`, hands out none of its memory, and is done with it when it returns."""
    op = lookup(node)
    if op is not None:
        return op.fresh and taken(node) is None
    if "takes" in node.meta:
        return taken(node) is not operand
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or _writes(node.target):
        return False
    schema = node.target._schema
    aliased = any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    return not aliased and node.target.overloadpacket not in (_aten.reshape, _aten.contiguous, _aten._to_copy)


def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable


def _lies_row_by_row(tensor: torch.Tensor) -> bool:
    wanted = sympy.S.One
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if expr(size) != 1 and sympy.expand(expr(stride) - wanted) != 0:
            return False
        wanted *= expr(size)
    return True


def _alike(operand: Node, node: Node) -> bool:
    a, b = value(operand), value(node)
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and tuple(map(expr, a.shape)) == tuple(map(expr, b.shape))
        and tuple(map(expr, a.stride())) == tuple(map(expr, b.stride()))
    )
