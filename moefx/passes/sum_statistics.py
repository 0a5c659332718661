"""Add up what the ranks did to the routing statistics of the model.

Contract
    takes  PLACED   a graph in which the model writes to buffers
    gives  PLACED   a buffer to which something made of chosen expert ids is added (tokens per expert, corrections)
                    ends a step as its old value plus the changes of all ranks; other buffers, averages that fade
                    and what a step overwrites among them, stay each rank's own; those that decide choices are noted
    never  changes anything else

Pseudo-code
    for every buffer with a write that comes from a top-k without passing through the experts:
        old = buffer.clone() at the start; buffer.copy_(sum_statistic(old, buffer)) behind the last use: until
        then it is this rank's own

    count.add_(bincount(idx))   ->   count.add_(bincount(idx)); count.copy_(sum_statistic(old, count))
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from moefx.analysis.statistics.summed_buffers import drifting_buffers, summed_buffers
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.writes import users_of_memory

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    axes = ctx.mesh.axis("data")
    if not axes:
        return result
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for buffer in drifting_buffers(gm):
        name = buffer.meta["moefx"].key
        ctx.report.drifting[name] = "what the forward writes to it is made from choices, not just added"
    for buffer in summed_buffers(gm):
        last = max(users_of_memory(buffer), key=order.__getitem__)
        first_node = next(n for n in gm.graph.nodes if n.op != "placeholder")
        with gm.graph.inserting_before(first_node):
            old = gm.graph.call_method("clone", (buffer,))
        with edit.at(last, after=True):
            new = edit.call(gm.graph, _ops.sum_statistic.default, old, buffer, axes)
            gm.graph.call_method("copy_", (buffer, new))
        old.meta["val"] = new.meta["val"] = edit.tensor_value(buffer)
        result.changed(f"{buffer.meta['moefx'].key} is summed over {axes}")
    return result
