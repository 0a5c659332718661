"""`with torch.no_grad():` inside of a model, written as detached tensors.

Passes move ops, and a mode holds for a place in the graph: an op that is moved out of it would be differentiated, and
one that is moved in would not.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.ir import edit
from moefx.ir.writes import writes


def detach_instead(gm: GraphModule) -> int:
    """y = f(x, w) where gradients are off becomes y = f(x.detach(), w.detach()), also where f writes to x: they share
    memory. Returns how many tensors are detached. The graph was captured with gradients on."""
    enabled, detached, found = True, {}, 0
    made_off: set[Node] = set()
    for node in list(gm.graph.nodes):
        if node.target is compat.grad_mode_setter:
            enabled = node.args[0]
            gm.graph.erase_node(node)
            continue
        if not enabled and node.op.startswith("call"):
            made_off.add(node)
            for tensor in filter(_wants_gradient, node.all_input_nodes):
                if tensor not in detached and tensor not in made_off:
                    detached[tensor] = _detached(gm, tensor, node)
                    found += 1
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: detached.get(n, n))  # noqa: B023
        if writes(node):  # what is taken of it from now on is another tensor
            detached = {before: new for before, new in detached.items() if node.args[0] not in (before, new)}
    return found


def _wants_gradient(node: Node) -> bool:
    found = edit.tensor_value(node)
    return found is not None and found.requires_grad


def _detached(gm: GraphModule, tensor: Node, before: Node) -> Node:
    with edit.at(before):
        return edit.valued(gm.graph.call_method("detach", (tensor,)))
