"""What is known of a routing [.., K] by how it was made."""

from __future__ import annotations

import operator

from torch.fx import Node

from moefx.analysis.names import op_name
from moefx.ir import edit

_SAME_CHOICES = ("to", "int", "long", "contiguous", "clone", "detach", "type_as", "reshape", "view", "flatten")


def has_single_choice(idx: Node) -> bool:
    """Whether a routing [T, 1] gives every token to one expert: [T] weights are then as good as [T, K]."""
    return _choices(idx) == 1


def is_distinct(idx: Node) -> bool:
    """Whether the choices of a token are known to differ: there is one, or they come from top-k."""
    node, choices = idx, _choices(idx)
    if has_single_choice(idx):
        return True
    while isinstance(node, Node) and op_name(node) in _SAME_CHOICES and _choices(node) == choices:
        node = node.args[0]
    return node.target is operator.getitem and node.args[1] == 1 and op_name(node.args[0]) == "topk"


def _choices(idx: Node) -> int:
    return edit.tensor_value(idx).shape[-1]
