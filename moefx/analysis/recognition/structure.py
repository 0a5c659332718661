"""What nodes compute, whatever they are called."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node
from torch.fx.node import map_arg

from moefx.ir import edit
from moefx.ir.op import value
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts

_NUMBERED = (enter_experts, leave_experts, expert_parameter)  # their last argument is the region's number


def structure(nodes: Collection[Node]) -> tuple:
    """Ops and arguments in order, and the types of what is read from elsewhere. Equal for nodes that do the same."""
    number: dict[Node, str] = {}

    def name(node: Node) -> str:
        return number.setdefault(node, f"%{len(number)}: {_type(node)}")

    found = []
    for node in next(iter(nodes)).graph.nodes if nodes else ():
        if node in nodes:
            args = node.args[:-1] if node.target in _NUMBERED else node.args
            found.append((_target(node), str(map_arg((args, node.kwargs), name))))
            number[node] = f"%{len(number)}"
    return tuple(found)


def _target(node: Node) -> str | tuple:
    body = edit.body_of(node)
    if body is not None:
        return structure(body.graph.nodes)
    return node.op if node.op in ("placeholder", "output") else str(node.target)


def _type(node: Node) -> str:
    tensor = edit.tensor_value(node)
    body = edit.body_of(node)
    if body is not None:
        return str(structure(body.graph.nodes))
    return f"{getattr(value(node), 'dtype', None)} {None if tensor is None else tuple(tensor.shape)}"
