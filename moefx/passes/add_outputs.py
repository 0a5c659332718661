"""Let a program return its statistics, and memory of its own. The last part of the step place-experts.

Contract
    takes  the graph of one rank, behind `place_regions`, which noted the regions' counts
    gives  PLACED   counts and choices of every region (for moe_stats) are outputs behind the user's
    never  changes what the user gets, but the memory in which it lies

Pseudo-code
    an output that shares memory with an input, or with an output before it, is copied: a program hands out its own

    return (x, y)  ->  return (x.clone(), y, r0_traffic, idx)
"""

from __future__ import annotations

from torch.fx import GraphModule

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    output = gm.graph.output_node()
    user = list(output.args[0])
    inputs = {edit.tensor_value(p).untyped_storage()._cdata for p in gm.graph.find_nodes(op="placeholder")}
    for i, node in enumerate(user):
        found = edit.tensor_value(node)
        if found is None:
            continue
        if found.untyped_storage()._cdata in inputs:
            with gm.graph.inserting_before(output):
                user[i] = gm.graph.call_method("clone", (node,))
                user[i].meta["val"] = found
            result.changed(f"output {i} is copied")
        else:
            inputs.add(found.untyped_storage()._cdata)
    known = [facts for _, facts in sorted(ctx.decisions.regions.items()) if facts.load is not None]
    stats = [node for facts in known for node in (facts.load, *facts.choices)]
    ctx.decisions.num_user_outputs = len(user)
    output.args = ((*user, *stats),)
    if stats:
        result.changed(f"{len(stats)} statistics are returned")
    return result
