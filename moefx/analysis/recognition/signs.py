"""What is above zero by the way it is computed, unless it underflows: scores that are zero only where none was put."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefx.ir.names import arg, op_name

_SAME = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "view",
         "reshape", "flatten", "squeeze", "unsqueeze", "expand", "gather", "index_select", "sum", "mean", "clamp_min",
         "amax", "getitem", "topk", "sort", "max")  # fmt: skip
_ALWAYS = ("softmax", "sigmoid", "exp", "softplus")


def is_positive(node: Any) -> bool:
    """Whether every number is positive: a softmax or a sigmoid, values picked of one, quotients and sums of such."""
    if isinstance(node, (int, float)):
        return node > 0
    if not isinstance(node, Node):
        return False
    name = op_name(node)
    if name in _ALWAYS:
        return True
    if name == "getitem" and op_name(node.args[0]) in ("topk", "sort", "max") and node.args[1] != 0:
        return False  # places, not values
    if name in _SAME:
        return is_positive(node.args[0])
    if name in ("mul", "div", "truediv", "add", "maximum"):
        return is_positive(node.args[0]) and is_positive(arg(node, 1, "other"))
    return False
