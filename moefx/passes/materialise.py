"""Read every parameter through `materialize`, which reduces its gradient. The third part of the step place-experts.

Contract
    takes  the graph of one rank, behind `place_regions`: its inputs say which are parameters, and of experts
    gives  the same with one materialize per parameter that wants a gradient and is not gathered, before its first use
    never  changes a value: forward it is the identity

Pseudo-code
    a gradient is summed over the axes along which the parameter is R (see `ir.types`): its ranks hold the same part of
    it, and read different data or work on parts; times one over the number of ranks that read different data

    y = F.linear(x, w)  ->  use_w = materialize(w, 'identity', 'dp+ep', 1/8, 1); y = F.linear(x, use_w)
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.names import common_name
from moefx.ir.op import Stage, lookup
from moefx.ir.ops.parameters import materialize
from moefx.ir.rules import Facts, View
from moefx.ir.types import PARAMETERS, Types


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, mesh, made = PassResult(), ctx.mesh, 0
    types = Types(View(gm, Level.PLACED, Facts(mesh)))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        kind = node.meta["moefx"].kind
        if kind not in PARAMETERS or not edit.tensor_value(node).requires_grad or not node.users:
            continue
        if all(_reduces(user) for user in node.users):
            continue  # the gather does it
        axes = types.summed(node, node.meta["moefx"].layout, types.gradients.get(node, {}))
        first = min(node.users, key=order.__getitem__)
        with gm.graph.inserting_before(first):
            new = edit.call(gm.graph, materialize, node, "identity", axes, 1.0 / mesh.size("data"), index,
                            name=f"use_{_leaf_name(node)}")  # fmt: skip
        edit.inherit(new, first)
        new.meta.pop("recompute", None)
        new.meta["val"] = edit.tensor_value(node)
        edit.rewrite_uses(node, new)
        made += 1
    if made:
        result.changed(f"{made} parameters are materialised")
    return result


def _reduces(user: Node) -> bool:
    """Whether it gathers what ranks have parts of for readers of other data, and its transpose sums over all of them.
    """
    op = lookup(user)
    is_sum = op is not None and op.stage is Stage.WEIGHTS and op.along.gives == "R"
    return is_sum and any(argument.name == "scale" for argument in user.target._schema.arguments)


def _leaf_name(node: Node) -> str:
    key = node.meta["moefx"].key
    parts = key.split(".") if isinstance(key, str) else common_name(key) or key[0].split(".")
    return "_".join(parts[-2:])
