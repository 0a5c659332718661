"""A whole layer of gated experts as one op each way, where no row goes to another rank and a kernel does it.

Shapes: T tokens, K choices, D width, H inner width, S experts, R = T*K rows.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir.meaning import meaning
from moefx.ir.op import Gemm, Tokens, Volume, argument, define, expr, nbytes, numel, value
from moefx.ir.ops.activations import gated, gated_backward
from moefx.ir.ops.experts import grouped_linear, grouped_wgrad
from moefx.ir.ops.routing import combine, combine_backward, dispatch


def _given(kind, x, weights, gate_up, down, perm, *_):
    dtype = torch.promote_types(x.dtype, weights.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(perm.shape[0], gate_up.shape[1])


@meaning(_given, dims="x [T~ ..~], weights [T~ ..~], gate_up [..~], down [..~], perm [..~], counts [..~] -> [T ..]")
def expert_layer(
    kind: str, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
    interleaved: bool, limit: float | None, alpha: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dispatch, a product with `gate_up` [S, 2H, D], a gated activation (see `gated`), a product with `down` [S, D, H],
    and combine with `weights` [T, K]: x [T, D] -> [T, D], and what the first product gave [R, 2H], for the backward.

    Constraints: x, gate_up and down have one dtype.
    """
    k = weights.shape[1]
    gates = grouped_linear(dispatch(x, perm, k), gate_up, counts, False)
    hidden = gated(kind, [gates], interleaved, limit, alpha)
    return combine(grouped_linear(hidden, down, counts, False), perm, k, weights), gates


@meaning(
    lambda grad, kind, *given: tuple(each.new_empty(each.shape) for each in given[:4]),
    dims="x [T~ ..~], weights [T~ ..~], grad [..~], gate_up [..~], down [..~], perm [..~], counts [..~], gates [..~] "
         "-> [T ..]",
)
def expert_layer_backward(
    grad: Tensor, kind: str, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
    gates: Tensor, interleaved: bool, limit: float | None, alpha: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weights, gate_up and down of `expert_layer`, of the rows [R, 2H] that it gave."""
    k = weights.shape[1]
    hidden = gated(kind, [gates], interleaved, limit, alpha)
    rows = grouped_linear(hidden, down, counts, False)
    grad_rows, grad_weights = combine_backward(grad, rows, weights, perm, k)
    grad_hidden = grouped_linear(grad_rows, down, counts, True)
    (grad_gates,) = gated_backward(grad_hidden, kind, [gates], interleaved, limit, alpha)
    grad_gate_up = grouped_wgrad(dispatch(x, perm, k), grad_gates, counts, False)
    grad_x = combine(grouped_linear(grad_gates, gate_up, counts, True), perm, k)
    return grad_x, grad_weights, grad_gate_up, grouped_wgrad(hidden, grad_rows, counts, False)


def _keep(ctx, inputs, output):
    ctx.kind, *tensors, ctx.interleaved, ctx.limit, ctx.alpha = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradient(ctx, grad, _):
    how = ctx.interleaved, ctx.limit, ctx.alpha
    return None, *expert_layer_backward(grad, ctx.kind, *ctx.saved_tensors, *how), *[None] * 5


expert_layer.register_autograd(_gradient, setup_context=_keep)


def _check(node: Node) -> str | None:
    x, gate_up, down = (value(argument(node, name)) for name in ("x", "gate_up", "down"))
    shapes = [x.shape[1], gate_up.shape[2], down.shape[1], gate_up.shape[1]]
    if shapes[:1] * 2 != shapes[1:3] or shapes[3] != 2 * down.shape[2]:
        return f"tokens are {shapes[0]} wide, gate_up is {list(gate_up.shape)} and down {list(down.shape)}"
    dtypes = {each.dtype for each in (x, gate_up, down)}
    return None if len(dtypes) == 1 else f"x, gate_up and down are {', '.join(sorted(map(str, dtypes)))}"


def _moves(node: Node) -> Volume:
    """Every product's operands and results once; the backward has four products, and activates again."""
    down, perm = argument(node, "down"), argument(node, "perm")
    size, inner = value(down).element_size(), expr(value(down).shape[2])
    rows, times = numel(perm) * expr(value(down).shape[1]) * size, 2 if "backward" in node.target.name() else 1
    moved = 2 * times * rows + 2 * times * numel(perm) * inner * size
    given = sum(map(nbytes, node.all_input_nodes))
    return Volume(flops=6 * times * numel(perm) * inner * expr(value(down).shape[1]),
                  hbm_bytes=given + moved + nbytes(node))  # fmt: skip


def _product(node: Node) -> Gemm:
    """Both products of all rows as one that computes as much, per expert. Beside them: the sum over choices, and of the
    backward the activation, its gradients and the weighed result (`benchmarks/results/compiled_kernels.md`)."""
    down, rows = value(argument(node, "down")), numel(argument(node, "perm"))
    slots, width, inner = map(expr, down.shape)
    times = 2 if "backward" in node.target.name() else 1
    beside = down.element_size() * (rows * width + numel(argument(node, "x")) + (times - 1) * 6 * rows * inner)
    return Gemm(rows / slots, 3 * times * inner, width, slots, str(down.dtype)[6:], beside)


def _space(node: Node) -> sympy.Expr:
    """Hidden rows and results of the second product; the backward has gradients of gates, and of hidden rows."""
    down, rows = value(argument(node, "down")), numel(argument(node, "perm"))
    width, inner = map(expr, down.shape[1:])
    wide = 3 * inner + sympy.Max(inner, width) if "backward" in node.target.name() else inner + width
    return rows * wide * down.element_size() + 12 * rows


_ops = torch.ops.moefx
_HOW = "interleaved=interleaved, limit=limit, alpha=alpha)"
_OF_LAYER = {"volume": _moves, "check": _check, "gemm": _product, "workspace": _space, "fresh": True,
             "tokens": Tokens({"perm": "perm", "counts": "slots"})}  # fmt: skip
define(
    _ops.expert_layer.default, **_OF_LAYER,
    runtime=f"moefx.runtime.expert_layer.expert_layer(x, weights, gate_up, down, perm, counts, kind, {_HOW}",
)  # fmt: skip
define(
    _ops.expert_layer_backward.default, **_OF_LAYER,
    runtime="moefx.runtime.expert_layer.expert_layer_backward("
            f"grad, x, weights, gate_up, down, perm, counts, gates, kind, {_HOW}",
)  # fmt: skip
