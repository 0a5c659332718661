"""Plain sums of weight gradients of grouped matmuls that nobody else reads: they can be added up in place.

While a graph is put in order nothing stands for the additions: whoever reads the sum needs all of its addends.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moefx.ir.op import argument, lookup

_ADD = torch.ops.aten.add.Tensor


def sums_of_wgrads(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """{addition: the weight gradients that it adds up}, of sums and of the sums within them."""
    found = {node: _addends(node) for node in nodes if node.target is _ADD}
    return {node: addends for node, addends in found.items() if addends}


def base_of(node: Node) -> Node | None:
    """The weight gradient that this one is added to."""
    return argument(node, lookup(node).overwrites) if _is_wgrad(node) else None


def add_to(node: Node, base: Node) -> None:
    """Let a weight gradient be added to `base`, in its memory."""
    names = [declared.name for declared in node.target._schema.arguments]
    node.args = (*node.args[: names.index(lookup(node).overwrites)], base)


def _is_wgrad(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.gemm is not None and op.overwrites != ""


def _addends(total: Node) -> list[Node]:
    if _is_wgrad(total):
        return [total] if len(total.users) == 1 and base_of(total) is None else []
    if total.target is not _ADD or total.kwargs or not all(isinstance(a, Node) for a in total.args):
        return []
    left, right = total.args
    if left is right or any(len(part.users) != 1 for part in (left, right)):
        return []
    found = _addends(left), _addends(right)
    return found[0] + found[1] if all(found) else []
