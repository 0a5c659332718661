"""Leave out of a backward what multiplies a gradient that never comes.

A model that returns loss and logits is mostly differentiated through the loss alone. The gradient of the logits is
then zero, and as large as the logits.

Contract
    takes  SCHEDULED   a backward graph, and the names of the tangents that are zero
    gives  SCHEDULED   the same gradients; those inputs are not read any more where that can be had
    never  drops a collective: which gradients are absent is a rank's own affair

Pseudo-code
    zero = the tangent and all views, casts and products of it; where it meets a sum, the other summand stays; if it
    meets anything else, this tangent is left as it is

    g = add(tangent_logits, grad_of_loss)   ->   g = grad_of_loss
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.ir.names import op_name
from moefx.ir.op import expr, value
from moefx.ir.sums import LINEAR

_aten = torch.ops.aten


def run(gm: GraphModule, absent: list[str]) -> list[str]:
    """Edit the backward graph `gm` in place; returns the names among `absent` that it reads no more."""
    gone = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in absent:
            sums = _sums_of(node)
            if sums is not None:
                _replace(sums)
                gone.append(node.name)
    return gone


def _sums_of(tangent: Node) -> dict[Node, Node] | None:
    """{sum that a zero enters: its other summand}; None if a zero goes anywhere else."""
    zeros, stack = {tangent}, [tangent]
    sums: dict[Node, Node] = {}
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.args[:1] == (node,) and _is_pure(user) and op_name(user) in (*LINEAR, "mul", "div"):
                if user not in zeros:
                    zeros.add(user)
                    stack.append(user)
            elif user.target is _aten.add.Tensor and not user.kwargs:
                other = user.args[1] if user.args[0] is node else user.args[0]
                if not isinstance(other, Node) or other in zeros or not _same(other, user):
                    return None
                sums[user] = other
            else:
                return None
    return sums


def _same(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    return x.dtype == y.dtype and [expr(s) for s in x.shape] == [expr(s) for s in y.shape]


def _replace(sums: dict[Node, Node]) -> None:
    for node in sorted(sums, reverse=True):  # last first: the other summand may be a sum of zero, too
        node.replace_all_uses_with(sums[node])
        dead = [node]
        while dead:  # the sum, and the zeros that only it read; what else becomes unused here is a view or a product
            gone = dead.pop()
            inputs = [a for a in gone.all_input_nodes if a.op != "placeholder"]
            gone.graph.erase_node(gone)
            dead.extend(a for a in inputs if not (a.users or a in dead or a in sums) and _is_pure(a))


def _is_pure(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"
