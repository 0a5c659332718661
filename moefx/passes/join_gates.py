"""Make one op of every gated activation for which there is a kernel.

Contract
    takes  PLACED   before differentiation
    gives  PLACED   the same numbers, up to rounding where a product is taken in another order; the gradient is one op,
                    too
    never  does anything where PyTorch's form would run (`PassContext.has_kernel`), so that without kernels programs
           keep the ops that the user wrote; leaves an activation of which something else reads a part

Pseudo-code
    for every product of two tensors: silu(gate) * up, gelu(gate) * up, or the clamped one of GPT-OSS
        gates and ups in one tensor, as halves or one beside the other: the op takes that
        else it takes both
        if a kernel runs it: it takes the product's place

    c = rows.chunk(2, -1); h = silu(c[0]) * c[1]   ->   h = gated('swiglu', [rows], False, None, None)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx.analysis import gated_activations
from moefx.analysis.gated_activations import Gated
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if ctx.has_kernel is None:
        return result
    spent: set[Node] = set()
    for product in gm.graph.nodes:
        found = gated_activations.find(product)
        if isinstance(found, str):
            result.skip(product, f"its activation stays as it is: {found}")
        elif found is not None:
            spent |= _replace(product, found, ctx, result)
    edit.erase_unused(spent)
    return result


def _replace(product: Node, found: Gated, ctx: PassContext, result: PassResult) -> set[Node]:
    """What may be of no use any more."""
    with edit.at(product) as graph:
        new = edit.call(graph, torch.ops.moefx.gated.default, found.kind, [*found.halves], found.interleaved,
                        found.limit, found.alpha, name=product.name)  # fmt: skip
    if not ctx.has_kernel(edit.valued(new)):
        graph.erase_node(new)
        result.skip(product, "its activation stays as it is: no kernel takes it")
        return set()
    product.replace_all_uses_with(new)
    result.changed(f"{product.name} is one op, {found.kind}")
    return {*found.spent}
