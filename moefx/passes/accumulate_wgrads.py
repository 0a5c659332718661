"""Let the weight gradients of chunks add up in place.

Contract
    takes  PLACED   a forward or backward graph at ATen level
    gives  PLACED   no sum of two fresh weight gradients of grouped matmuls is left: the later is added to the earlier
    never  adds into a value that anybody else reads

Pseudo-code
    for every sum of results of grouped_wgrad (or of such sums) that nobody else reads: the first stays, each of the
    others takes the one before it as `base`

    a = wgrad(r0, g0); b = wgrad(r1, g1); w = a + b   ->   a = wgrad(r0, g0); w = wgrad(r1, g1, base=a)
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit

_ADD = torch.ops.aten.add.Tensor
_WGRAD = torch.ops.moefx.grouped_wgrad.default


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for total in [n for n in order if n.target is _ADD]:
        if any(u.target is _ADD and _addends(u) for u in total.users):
            continue  # part of a longer sum
        addends = _addends(total)
        if not addends:
            continue
        addends.sort(key=order.__getitem__)
        for earlier, later in itertools.pairwise(addends):
            later.args = (*later.args[:4], earlier)
        edit.rewrite_uses(total, addends[-1])
        _erase_sum(total)
        result.changed(f"{len(addends)} weight gradients in {addends[-1].name}")
    return result


def _addends(total: Node) -> list[Node]:
    """The weight gradients that `total` is the plain sum of, if it is one and nobody else reads them; else nothing."""
    if total.target is _WGRAD:
        return [total] if len(total.users) == 1 and len(total.args) == 4 else []
    if total.target is not _ADD or total.kwargs or not all(isinstance(a, Node) for a in total.args):
        return []
    left, right = total.args
    if left is right or any(len(part.users) != 1 for part in (left, right)):
        return []
    found = _addends(left), _addends(right)
    return found[0] + found[1] if all(found) else []


def _erase_sum(total: Node) -> None:
    if total.target is _ADD:
        parts = total.args
        total.graph.erase_node(total)
        for part in parts:
            _erase_sum(part)
