"""Nodes of a captured graph by the name of their op, and their arguments by position or name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from moefx._torch_compat import OpOverload


def common_name(keys: Sequence[str]) -> tuple[str, ...]:
    """What the names of parameters of separate experts have in common, part by part: layers.0.experts.3.up.weight of
    each expert is (layers, 0, experts, up, weight)."""
    parts = [key.split(".") for key in keys]
    if len({len(each) for each in parts}) > 1:
        return ()
    return tuple(same[0] for same in zip(*parts) if len(set(same)) == 1)


def op_name(node: Node) -> str:
    """One name for a function, its method form and its in-place operator form."""
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return node.op
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if isinstance(node.target, OpOverload) else name


def called(node: Node) -> str:
    """What messages call an op."""
    name = op_name(node)
    return "a custom autograd function" if name == "autograd_function_apply" else name


def arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)
