"""Let kernels of attention read keys and values that several heads of queries share as they are.

Contract
    takes  PLACED   attention of the heads of one rank
    gives  PLACED   where keys and values are repeated for the heads that share them, and a kernel takes fewer of these
                    than of queries, it is asked to (enable_gqa); what repeated them is gone if nobody else reads it
    never  touches attention with a mask, or what the kernels of a device would do without fusing it

Pseudo-code
    for every scaled_dot_product_attention without a mask
        keys and values are x[:, :, None].expand(b, k, n, s, d).reshape(b, k * n, s, d), with the same k and n
        their dtype, under autocast too, and size of heads are those that a fused kernel takes in groups

    y = sdpa(q, repeated(k), repeated(v), is_causal=True)   ->   y = sdpa(q, k, v, is_causal=True, enable_gqa=True)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.dims import is_reshape
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value

_LARGEST = 256  # head of torch's flash attention on CUDA


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for node in [n for n in gm.graph.nodes if op_name(n) == "scaled_dot_product_attention"]:
        query, *given = node.args[:3]
        fewer = [_unrepeated(each) for each in given]
        if None in fewer or not _of_one_size(*fewer) or arg(node, 3, "attn_mask") is not None:
            continue
        why = _cannot(value(query), value(fewer[0]), ctx)
        if why:
            result.skip(node, why)
            continue
        node.args = (query, *fewer, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        edit.erase_unused(edit.ancestors(given, stop=lambda each: each in fewer) - set(fewer))  # noqa: B023
        result.changed(f"{node.name}: {fewer[0].name} and {fewer[1].name} are not repeated")
    return result


def _unrepeated(node: Node) -> Node | None:
    """[b, k, s, d], of which a node [b, k * n, s, d] has every head n times, one beside the other."""
    repeated = node.args[0] if is_reshape(node) else None
    if repeated is None or op_name(repeated) not in ("expand", "broadcast_to") or not is_reshape(repeated.args[0]):
        return None
    found = repeated.args[0].args[0]
    shape, single, wide, after = (_sizes(each) for each in (found, repeated.args[0], repeated, node))
    if len(shape) != 4 or len(wide) != 5 or type(value(node).shape[1]) is not int:
        return None
    heads, times = wide[1:3]
    is_repeated = (single == [*shape[:2], 1, *shape[2:]] and wide == [*shape[:2], times, *shape[2:]]
                   and after == [shape[0], heads * times, *shape[2:]])  # fmt: skip
    return found if is_repeated else None


def _sizes(node: Node) -> list:
    return [expr(size) for size in value(node).shape]


def _of_one_size(keys: Node, values: Node) -> bool:
    return _sizes(keys) == _sizes(values)


def _cannot(query: Tensor, keys: Tensor, ctx: PassContext) -> str:
    """Why no fused kernel would take keys of fewer heads."""
    device = query.device.type
    dtype = dict(ctx.autocast).get(device, query.dtype)
    if device == "cuda" and (dtype not in (torch.float16, torch.bfloat16) or keys.shape[-1] > _LARGEST):
        return f"keys are repeated: flash attention takes no heads of {keys.shape[-1]} {dtype}"
    if device == "cpu" and not compat.flash_groups_keys():
        return "keys are repeated: this torch's flash attention takes as many heads of keys as of queries"
    return ""
