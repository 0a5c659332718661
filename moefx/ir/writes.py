"""Ops that write to their first argument, what reads a tensor or views of it, and what memory tensors share."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.ir.names import arg, op_name
from moefx.ir.op import value

_aten = torch.ops.aten


def writes(node: Node) -> bool:
    """Whether an op writes to its first argument."""
    if not node.op.startswith("call") or not node.args:
        return False
    if node.target is operator.setitem or node.target in INPLACE_OPERATORS or place_of_inplace(node) is not None:
        return True
    name = op_name(node)
    is_word = getattr(node.target, "__module__", None) == operator.and_.__module__  # and_, or_: Python has these words
    return name[-1:] == "_" != name[-2:-1] and not is_word


def place_of_inplace(node: Node) -> int | None:
    """Which argument of an op says that it works in place, as that of `relu(x, inplace=True)` does."""
    place = _place_of_inplace(node.target) if isinstance(node.target, types.FunctionType) else None
    return place if place is not None and arg(node, place, "inplace") is True else None


@functools.cache
def _place_of_inplace(function: types.FunctionType) -> int | None:
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def written_after_reads(gm: GraphModule) -> set[int]:
    """The memory that ops write to after others have read it: what it holds depends on the place in the graph."""
    read: set[int] = set()
    found: set[int] = set()
    for node in gm.graph.nodes:
        target = storage(node.args[0]) if writes(node) and isinstance(node.args[0], Node) else None
        if target in read:
            found.add(target)
        views = storage(node) if target is None else target  # to take a view reads nothing
        read |= {storage(n) for n in node.all_input_nodes} - {views}
    return found - {None}


def storage(node: Node) -> int | None:
    """What tensors over one memory have in common; None: the node is no tensor."""
    found = value(node)
    try:
        return None if not isinstance(found, torch.Tensor) else found.untyped_storage()._cdata
    except NotImplementedError:  # inside of vmap
        return id(found)


INPLACE_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}


_MAY_BE_VIEWS = {
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute",
    "t", "swapaxes", "movedim", "mT", "T", "getattr", "getitem", "select", "narrow", "diagonal", "chunk", "split",
    "unbind", "expand", "expand_as", "detach", "to", "type_as", "float", "contiguous",
}  # fmt: skip


def may_be_view(node: Node) -> bool:
    """Whether an op may give a view of its first argument."""
    return op_name(node) in _MAY_BE_VIEWS


def is_view(target: Any) -> bool:
    """Whether an ATen op gives another look at its first argument (or writes into it) instead of new memory."""
    if not isinstance(target, OpOverload):
        return False
    renames = target.overloadpacket in (_aten._unsafe_view, _aten.alias)
    return renames or any(r.alias_info is not None for r in target._schema.returns)


def root(node: Node) -> Node:
    """The tensor of which it may be a view, or a view of a view."""
    while may_be_view(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def users_of_memory(node: Node) -> dict[Node, bool]:
    """What reads a tensor, by itself or by what may be a view of it, and whether it writes to it. Fake values do not
    tell: where they were computed anew, views have memory of their own."""
    found: dict[Node, bool] = {}
    stack = [node]
    while stack:
        top = stack.pop()
        for user in top.users:
            if found.get(user) or user.op == "output":
                continue
            is_new, is_first = user not in found, bool(user.args) and user.args[0] is top
            found[user] = is_first and writes(user)
            if found[user] or (is_new and is_first and may_be_view(user)):
                stack.append(user)
    return found


def is_written(node: Node) -> bool:
    """Whether an op writes to the memory of a tensor, or of what it may be a view of: what is read of it depends on the
    place in the graph."""
    while node.op.startswith("call") and may_be_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return any(users_of_memory(node).values())


def writes_to_input(node: Node) -> bool:
    """Whether an op writes to the memory of an argument of the graph, which outlives it."""
    if not writes(node):
        return False
    while node.op.startswith("call") and (writes(node) or may_be_view(node)):
        if not node.args or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return node.op == "placeholder"
