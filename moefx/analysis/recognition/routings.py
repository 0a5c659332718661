"""What is known of a routing [.., K] by how it was made."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr
from moefx.ir.ops.regions import leave_experts

CHOOSERS = ("topk", "argmax", "max", "sort", "argsort")  # ops by which routers choose experts
_SAME_CHOICES = ("to", "int", "long", "contiguous", "clone", "detach", "type_as", "reshape", "view", "flatten")


def has_single_choice(idx: Node) -> bool:
    """Whether a routing [T, 1] gives every token to one expert: [T] weights are then as good as [T, K]."""
    return _choices(idx) == 1


def is_distinct(idx: Node) -> bool:
    """Whether the choices of a token are known to differ, where they name somebody: there is one, or they come from
    top-k or an order, or each has an expert of its own."""
    node, choices = idx, _choices(idx)
    if has_single_choice(idx):
        return True
    same = (*_SAME_CHOICES, "expand", "expand_as")
    while may_name_nobody(node) or _is_part(node) or (op_name(node) in same and _choices(node.args[0]) == choices):
        choices = _choices(node.args[0]) if _is_part(node) else choices
        node = node.args[1 if may_name_nobody(node) else 0]
    order = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else node
    place = {"topk": 2, "sort": 1, "argsort": 1}.get(op_name(order))
    is_order = place is not None and arg(order, place, "dim", -1) in (-1, edit.tensor_value(node).dim() - 1)
    return is_order or op_name(node) == "arange" or _is_one_of_each_group(node)


def _is_one_of_each_group(idx: Node) -> bool:
    """scores.view(T, groups, n).max(-1).indices + torch.arange(0, groups * n, n)"""
    if op_name(idx) not in ("add", "iadd") or len(idx.args) != 2 or not all(isinstance(a, Node) for a in idx.args):
        return False
    for inside, first in (idx.args, idx.args[::-1]):
        step = first.args[2] if op_name(first) == "arange" and len(first.args) == 3 else None
        ids = number_of_ids(inside)
        one_each = edit.tensor_value(first).dim() == 1 and _choices(inside) == _choices(first) == _choices(idx)
        if type(step) is int and ids is not None and one_each:
            return ids <= step
    return False


def _is_part(idx: Node) -> bool:
    """Whether a routing is idx[.., a:b], some of the choices of another."""
    if idx.target is not operator.getitem or edit.tensor_value(idx.args[0]) is None:
        return False
    item, dims = idx.args[1], edit.tensor_value(idx.args[0]).dim()
    if not isinstance(item, tuple) or not isinstance(item[-1], slice) or item[-1] == slice(None):
        return False
    return all(i == slice(None) or i is Ellipsis for i in item[:-1]) and (Ellipsis in item or len(item) == dims)


def may_name_nobody(idx: Node) -> bool:
    """Whether a routing is where(chosen, ids, n) with an n that is none of the ids, and so stands for no expert."""
    if idx.target is not torch.where or len(idx.args) != 3 or type(idx.args[2]) is not int:
        return False
    ids = number_of_ids(idx.args[1])
    return ids is not None and not 0 <= idx.args[2] < ids


def number_of_ids(idx: Node) -> int | None:
    """How many experts a routing may name, if it comes from a top-k or a maximum of scores of all of them, or numbers
    them."""
    node = idx
    while isinstance(node, Node) and (
            op_name(node) in (*_SAME_CHOICES, "unsqueeze", "expand", "expand_as") or _is_part(node)):  # fmt: skip
        node = node.args[0]
    if op_name(node) == "arange" and len(node.args) == 1 and isinstance(node.args[0], int):
        return node.args[0]
    if may_name_nobody(node):
        return number_of_ids(node.args[1])
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    if op_name(node) not in CHOOSERS:
        return None
    size = expr(edit.tensor_value(node.args[0]).shape[-1])
    return int(size) if size.is_Integer else None


def choices_behind(mask: Node) -> tuple[Node, ...]:
    """Outputs of top-k and argmax that `mask` is made of, without passing through another region, in graph order."""
    found = edit.ancestors([mask], stop=lambda node: _is_choice(node) or op_name(node) == "topk"
                           or node.target is leave_experts)  # fmt: skip
    return tuple(sorted(filter(_is_choice, found)))


def _is_choice(node: Node) -> bool:
    is_item = node.target is operator.getitem and isinstance(node.args[0], Node)
    return op_name(node) == "argmax" or (is_item and op_name(node.args[0]) == "topk" and node.args[1] == 1)


def _choices(idx: Node) -> int:
    return edit.tensor_value(idx).shape[-1] if edit.tensor_value(idx).dim() else 0
