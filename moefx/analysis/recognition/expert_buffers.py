"""Buffers, and tensors kept as plain attributes, that experts' weights are computed of.

An expert runs on one rank for the tokens of all ranks, so what its weights are computed of has to be the same
everywhere, unlike buffers of the rest of a model, which may be each rank's own.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.expert_weights import is_weight
from moefx.ir.ops.regions import enter_experts, leave_experts


def buffers_of_experts(gm: GraphModule) -> dict[str, Any]:
    """The Source of each, by the name of its placeholder."""
    inside = _inside(gm)
    weights = {a for node in inside for a in node.all_input_nodes if a not in inside and is_weight(a)}
    behind = weights | edit.ancestors(weights)
    inputs = {node.name: node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder") if node in behind}
    return {name: source for name, source in inputs.items() if source.kind in ("buffer", "constant")}


def _inside(gm: GraphModule) -> set[Node]:
    """What is computed of rows that went to their experts, until they leave. What lies between two regions, say a norm
    with averages of its own, is each rank's."""
    pending = list(gm.graph.find_nodes(op="call_function", target=enter_experts))
    inside: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in inside:
            inside.add(node)
            pending += [] if node.target is leave_experts else node.users
    return inside
