"""What is above zero by the way it is computed, unless it underflows: scores that are zero only where none was put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from moefx.ir.names import arg, op_name

_SAME = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "view",
         "reshape", "flatten", "squeeze", "unsqueeze", "expand", "gather", "index_select", "sum", "mean", "clamp_min",
         "amax", "getitem", "topk", "sort", "max", "sqrt", "reciprocal")  # fmt: skip
_ALWAYS = ("softmax", "sigmoid", "exp", "softplus", "ones", "ones_like", "new_ones")
_FILLED = ("full", "full_like", "new_full")


def is_positive(node: Any, args_of: Callable[[Node], tuple] = lambda node: node.args) -> bool:
    """Whether every number is positive: a softmax or a sigmoid, values picked of one, quotients and sums of such.
    args_of: what the arguments of a node are taken to be."""
    if isinstance(node, (int, float)):
        return node > 0
    if not isinstance(node, Node):
        return False
    name, args = op_name(node), args_of(node)
    if name in _ALWAYS:
        return True
    if name in _FILLED:
        return is_positive(arg(node, 1, "fill_value"), args_of)
    if name == "getitem" and op_name(args[0]) in ("topk", "sort", "max") and args[1] != 0:
        return False  # places, not values
    if name in _SAME:
        return is_positive(args[0], args_of)
    if name in ("mul", "div", "truediv", "add", "maximum"):
        return all(is_positive(each, args_of) for each in (args if len(args) > 1 else (args[0], arg(node, 1, "other"))))
    return False
