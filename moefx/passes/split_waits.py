"""Make of every collective a start and a wait.

Contract
    takes  PLACED      forward or backward graph at ATen level
    gives  SCHEDULED   every collective and host read is `start`, then `wait` right before its first use
    never  changes the order of starts, or anything else

Pseudo-code
    for every op that is a collective or read by the host: h = start(op, args) in its place; y = wait(h) before the
    first user of y

    y = all_to_all(x, ...); z = f(a); use(y)   ->   h = start(all_to_all, x, ...); z = f(a); y = wait(h); use(y)
"""

from __future__ import annotations

from torch.fx import GraphModule

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import lookup
from moefx.ir.ops.order import start, wait


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        op = lookup(node)
        if op is None or not op.is_started:
            continue
        with edit.at(node):
            handle = edit.call(gm.graph, start, node.target, *node.args, name=f"{node.name}_started")
        users = [u for u in node.users if u in order]
        first = min(users, key=order.__getitem__) if users else gm.graph.output_node()
        with gm.graph.inserting_before(first):
            waited = edit.call(gm.graph, wait, handle, name=f"{node.name}_done")
        edit.inherit(waited, node)
        waited.meta.setdefault("val", node.meta.get("val"))
        node.replace_all_uses_with(waited)
        gm.graph.erase_node(node)
        result.changed(f"{node.name} split")
    return result
