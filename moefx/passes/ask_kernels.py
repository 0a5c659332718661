"""Ask kernels of attention for what their masks say.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   attention whose mask depends on sizes alone, and says that every query sees the keys up to its own
                      place, or all keys, has no mask; what computed it is gone if nobody else reads it
    never  touches a mask that depends on an input, a parameter or a buffer, or that says anything else (a window, a
           bias), or attention that is spelled out as products and a softmax

Pseudo-code
    for every scaled_dot_product_attention with a mask
        compute the mask at several sizes, also behind every constant in it; a mask is looked at once
        causal at all of them: is_causal=True and no mask; true everywhere: no mask

    m = arange(s) <= arange(s)[:, None]; y = sdpa(q, k, v, attn_mask=m)   ->   y = sdpa(q, k, v, is_causal=True)
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moefx.analysis.attention_masks import CAUSAL, Unclear, meaning
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    found: dict[tuple, str | None] = {}
    dropped = []
    for node in [n for n in gm.graph.nodes if op_name(n) == "scaled_dot_product_attention"]:
        mask = arg(node, 3, "attn_mask")
        if mask is None:
            continue
        key = mask, *(expr(value(each).shape[-2]) for each in node.args[:2])
        if key not in found:
            found[key] = _meaning(node, ctx, result)
        if found[key] is not None and not _is_broadcast(node, result):
            node.kwargs = {**node.kwargs, **dict(zip(_NAMES, node.args[3:])), "attn_mask": None,
                           "is_causal": found[key] == CAUSAL}  # fmt: skip
            node.args = node.args[:3]
            dropped.append(mask)
            result.changed(f"{node.name}: its mask says {found[key]}")
    edit.erase_unused(edit.ancestors(dropped) - set(gm.graph.find_nodes(op="placeholder")))
    return result


_NAMES = ("attn_mask", "dropout_p", "is_causal")  # that may stand by position, behind queries, keys and values


def _meaning(node: Node, ctx: PassContext, result: PassResult) -> str | None:
    """Of its mask; why there is none is told of the first that reads it."""
    queries, keys = (value(each).shape[-2] for each in node.args[:2])
    try:
        return meaning(arg(node, 3, "attn_mask"), queries, keys, [g.expr for g in ctx.fake_mode.shape_env.guards])
    except Unclear as error:
        result.skip(node, str(error))
        return None


def _is_broadcast(node: Node, result: PassResult) -> bool:
    """Whether queries are repeated for the dims of the mask."""
    query, v = (value(node.args[i]) for i in (0, 2))
    found = [expr(size) for size in value(node).shape] != [expr(size) for size in (*query.shape[:-1], v.shape[-1])]
    if found:
        result.skip(node, "its mask has dims that queries lack")
    return found
