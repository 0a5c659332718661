"""Buffers, and tensors kept as plain attributes, that experts' weights are computed of.

An expert runs on one rank for the tokens of all ranks, so what its weights are computed of has to be the same
everywhere, unlike buffers of the rest of a model, which may be each rank's own.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from moefx.ir import edit
from moefx.ir.expert_weights import is_weight
from moefx.ir.ops.regions import enter_experts, leave_experts


def buffers_of_experts(gm: GraphModule) -> dict[str, Any]:
    """The Source of each, by the name of its placeholder."""
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    leaves = gm.graph.find_nodes(op="call_function", target=leave_experts)
    inside = edit.descendants(enters) & edit.ancestors(leaves)
    weights = {a for node in inside for a in node.all_input_nodes if a not in inside and is_weight(a)}
    behind = weights | edit.ancestors(weights)
    inputs = {node.name: node.meta["moefx"] for node in gm.graph.find_nodes(op="placeholder") if node in behind}
    return {name: source for name, source in inputs.items() if source.kind in ("buffer", "constant")}
