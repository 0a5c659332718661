"""Let elementwise results take the memory of an operand that nobody reads any more.

Contract
    takes  SCHEDULED   in its final order
    gives  SCHEDULED   the same nodes; `meta["takes"]` of a result says which argument's memory it takes
    never  changes a number, or takes memory that anything else can see: the operand is the fresh result of an op, no
           view and never viewed, no input or output, and read by synchronous ops alone (what an exchange sends must
           stay as it is until the wait)

Pseudo-code
    for every elementwise op, and every gradient of an activation, in order:
        takes = the first argument that dies here and looks like the result (either one where they commute)

    hidden = mul(silu, up)   # the last reader of silu   ->   the linker writes hidden = mul_(silu, up)
"""

from __future__ import annotations

from torch.fx import GraphModule

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir.memory import may_take, places_to_take


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in order:
        node.meta.pop("takes", None)  # decided for what the graph was before
    for node in order:
        place = next((place for place in places_to_take(node) if may_take(node, place, order)), None)
        if place is not None:
            node.meta["takes"] = place
            result.changed(f"{node.name} takes the memory of {node.args[place].name}")
    return result
