"""Let the weight gradients of chunks add up in place, in the order in which they are computed.

Contract
    takes  SCHEDULED   a forward or backward graph in its order
    gives  SCHEDULED   no sum of two fresh weight gradients of grouped matmuls is left: the later is added to the first
    never  adds into a value that anybody else reads, or moves anything

Pseudo-code
    for every sum of results of grouped_wgrad (or of such sums) that nobody else reads: the first stays, each of the
    others takes the one before it as `base`

    a = wgrad(r0, g0); b = wgrad(r1, g1); w = a + b   ->   a = wgrad(r0, g0); w = wgrad(r1, g1, base=a)
"""

from __future__ import annotations

import itertools

from torch.fx import GraphModule

from moefx.analysis.wgrad_sums import add_to, sums_of_wgrads
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    sums = sums_of_wgrads(order)
    for total in [node for node in sums if not any(user in sums for user in node.users)]:
        addends = sorted(sums[total], key=order.__getitem__)
        for earlier, later in itertools.pairwise(addends):
            add_to(later, earlier)
        edit.rewrite_uses(total, addends[-1])
        result.changed(f"{len(addends)} weight gradients in {addends[-1].name}")
    for node in reversed(sums):
        gm.graph.erase_node(node)
    return result
