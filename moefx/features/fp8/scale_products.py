"""Let products per expert multiply numbers in fp8.

Contract
    takes  PLACED   a forward or backward graph at ATen level
    gives  PLACED   products of rows with experts' weights are scaled ones; what the backward computes again, too
    never  does anything unless asked to; touches gradients of weights, routers, or experts on static blocks; takes
           what torch's product on CUDA would not: widths that are no multiples of 16, 1024 slots or more, and on CUDA
           other dtypes than bfloat16

Pseudo-code
    for every product of rows with the matrix of their slot: the op becomes the scaled one, with the same arguments

    y = grouped_linear(rows, w, counts, False)   ->   y = scaled_linear(rows, w, counts, False)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir.op import argument, expr, value
from moefx.ir.regions import region_of

_ops = torch.ops.moefx
_UNIT = 16  # entries that widths are multiples of, and
_MOST_SLOTS = 1023  # so many groups: both of torch's product on CUDA (ATen/native/cuda/GroupedBlas.cpp)


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if not ctx.options.fp8.wanted:
        return result
    found = gm.graph.find_nodes(op="call_function", target=_ops.grouped_linear.default)
    for node in found:
        why = _why_not(node)
        if why is not None:
            result.skip(node, f"this product is not in fp8: {why}")
            continue
        node.target = _ops.scaled_linear.default
        result.changed(f"{node.name} is a product in fp8")
    expert = next((node for node in gm.graph.nodes if region_of(node) is not None), None)
    if expert is not None and not found:
        result.skip(expert, "nothing is in fp8: no rows are multiplied by the matrix of their expert")
    return result


def _why_not(node: Node) -> str | None:
    rows, weight = value(argument(node, "rows")), value(argument(node, "weight"))
    for width in weight.shape[1:]:
        if not expr(width).is_Integer or width % _UNIT:
            return f"its weight has a side of {width}, which is no multiple of {_UNIT}"
    if weight.shape[0] > _MOST_SLOTS:
        return f"a rank has {weight.shape[0]} experts, more than {_MOST_SLOTS}"
    if rows.device.type == "cuda" and rows.dtype != torch.bfloat16:
        return f"rows are {rows.dtype}; on CUDA they must be bfloat16"
    return None
