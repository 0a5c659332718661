"""Ops that compute with per-expert parameters on rows sorted by slot.

Shapes: R rows, which may be matrices [.., D] in themselves, S slots of this rank, I and O the widths, counts [S] rows
per slot. sum(counts) may be less than R: the tail rows belong to nobody and come out as zeros.
"""

from __future__ import annotations

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from moefx.ir.fates import CONTRACTED, MIXED, ORDERED, TAKEN, Operand, kept, shape_of, stay
from moefx.ir.level import Level
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import Gemm, Tokens, Volume, argument, define, expr, nbytes, numel, value


@meaning(lambda rows, weight, counts, transposed, *_: sized(rows, -1, weight.shape[2 if transposed else 1]))
def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, bias: Tensor | None = None
) -> Tensor:
    """Every slot's own linear on its rows: [R, .., I] -> [R, .., O].

    Constraints: weight is [S, O, I], or [S, I, O] if transposed; bias [S, O]; all share one dtype.
    """
    matrices = weight.transpose(1, 2) if transposed else weight
    out = rows.new_zeros(*rows.shape[:-1], matrices.shape[1])
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            mine = rows[start : start + count]
            out[start : start + count] = F.linear(mine, matrices[slot], None if bias is None else bias[slot])
        start += count
    return out


def _of_weights(rows, grad, counts, transposed, base=None):
    left, right = (rows, grad) if transposed else (grad, rows)
    return rows.new_empty(counts.shape[0], left.shape[-1], right.shape[-1])


@meaning(_of_weights)
def grouped_wgrad(rows: Tensor, grad: Tensor, counts: Tensor, transposed: bool, base: Tensor | None = None) -> Tensor:
    """Weight gradient of `grouped_linear`: [S, O, I] (or [S, I, O]); zeros for idle slots. Plus `base`, if given, whose
    memory the result may take.

    Constraints: nobody else reads `base`, and it is itself the result of a grouped_wgrad.
    """
    left, right = (rows, grad) if transposed else (grad, rows)
    out = rows.new_zeros(counts.shape[0], left.shape[-1], right.shape[-1])
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            a, b = (side[start : start + count].flatten(0, -2) for side in (left, right))
            out[slot] = a.T @ b
        start += count
    return out if base is None else out + base


@meaning(
    "param [s? ..], counts [s~] -> [num_rows ..]",
    gradient=lambda grad, param, counts, _: expert_rows_backward(grad, counts),
)
def expert_rows(param: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """The slot's entry of `param` [S, ...] for every row: [R, ...] (biases and other per-expert values)."""
    out = param.new_zeros((num_rows, *param.shape[1:]))
    repeated = param.repeat_interleave(counts, dim=0)
    out[: repeated.shape[0]] = repeated
    return out


@meaning("grad [r~ ..], counts [s~] -> [s ..]")
def expert_rows_backward(grad: Tensor, counts: Tensor) -> Tensor:
    """Sum of the rows of every slot: [R, ...] -> [S, ...]."""
    chunks = grad[: int(counts.sum())].split(counts.tolist())
    return torch.stack([chunk.sum(0) for chunk in chunks])


def _setup_linear(ctx, inputs, output):
    rows, weight, counts, ctx.transposed, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(rows, weight, counts)


def _linear_backward(ctx, grad):
    rows, weight, counts = ctx.saved_tensors
    grad_rows = grad_weight = grad_bias = None
    if ctx.needs_input_grad[1]:  # first: it is the last reader of the saved rows
        grad_weight = torch.ops.moefx.grouped_wgrad(rows, grad, counts, ctx.transposed)
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.moefx.grouped_linear(grad, weight, counts, not ctx.transposed)
    if ctx.has_bias and ctx.needs_input_grad[4]:
        per_row = grad.flatten(1, -2).sum(1) if grad.dim() > 2 else grad
        grad_bias = torch.ops.moefx.expert_rows_backward(per_row, counts)
    return grad_rows, grad_weight, None, None, grad_bias


grouped_linear.register_autograd(_linear_backward, setup_context=_setup_linear)


def _check_linear(node):
    rows, weight = value(argument(node, "rows")), value(argument(node, "weight"))
    if rows.dim() < 2 or weight.dim() != 3:
        return f"rows has {rows.dim()} dims and weight {weight.dim()}, not 2 or more and 3"
    inner = weight.shape[1 if argument(node, "transposed") else 2]
    if rows.shape[-1] != inner:
        return f"rows are {rows.shape[-1]} wide but the weight takes {inner}"
    if rows.dtype != weight.dtype:
        return f"rows are {rows.dtype} but the weight is {weight.dtype}"
    bias = value(argument(node, "bias"))
    wanted = [weight.shape[0], weight.shape[2 if argument(node, "transposed") else 1]]
    if bias is not None and (bias.dtype != rows.dtype or list(bias.shape) != wanted):
        return f"the bias is {bias.dtype} {list(bias.shape)}, not {rows.dtype} {wanted}"
    slots = value(argument(node, "counts")).shape[0]
    return None if slots == weight.shape[0] else f"{slots} counts for {weight.shape[0]} slots"


def _check_wgrad(node):
    base = argument(node, "base")
    if base is None:
        return None
    if base.target is not node.target:
        return f"the base {base.name} is not a weight gradient: its memory may not be written to"
    return None if len(base.users) == 1 else f"the base {base.name} is also read by others"


def _gemm(node) -> Volume:
    rows, out = value(argument(node, "rows")), value(node)
    other = argument(node, "grad" if "wgrad" in node.target.name() else "weight")
    width = value(other if "wgrad" in node.target.name() else node).shape[-1]
    more = argument(node, "base" if "wgrad" in node.target.name() else "bias")
    read = nbytes(argument(node, "rows")) + nbytes(other) + (nbytes(more) if more is not None else 0)
    return (
        Volume(flops=2 * numel(argument(node, "rows")) * int(width), hbm_bytes=read + numel(node) * rows.element_size())
        if out is not None
        else Volume()
    )


def _product(node) -> Gemm:
    """Per slot: [rows, I] by [I, O]."""
    out = value(node)
    return Gemm(_rows_per_slot(node), expr(out.shape[-1]), expr(value(argument(node, "rows")).shape[-1]),
                expr(value(argument(node, "counts")).shape[0]), _dtype(node))  # fmt: skip


def _wgrad_product(node) -> Gemm:
    """Per slot: [O, rows] by [rows, I]."""
    slots, left, right = map(expr, value(node).shape)
    return Gemm(left, right, _rows_per_slot(node), slots, _dtype(node))


def _rows_per_slot(node) -> sympy.Expr:
    lead = value(argument(node, "rows")).shape[:-1]
    return sympy.prod(map(expr, lead)) / expr(value(argument(node, "counts")).shape[0])


def _dtype(node) -> str:
    return str(value(argument(node, "rows")).dtype).removeprefix("torch.")


def _dims_of_linear(node: Node) -> list[Operand]:
    """Which slot a row is of depends on its place."""
    rows, weight, counts, transposed, bias = (
        argument(node, name) for name in ("rows", "weight", "counts", "transposed", "bias"))  # fmt: skip
    last = value(rows).dim() - 1
    size = shape_of(value(weight))
    matrix = (CONTRACTED, kept(last, size[2])) if transposed else (kept(last, size[1]), CONTRACTED)
    found = [Operand(rows, stay(shape_of(value(rows)), {0: ORDERED, last: CONTRACTED})),
             Operand(weight, (TAKEN, *matrix)), Operand(counts, (MIXED,))]  # fmt: skip
    return found if bias is None else [*found, Operand(bias, (TAKEN, kept(last, shape_of(value(bias))[1])))]


def _adds_apart(node: Node) -> bool:
    """Whether results of products are added to what was there, or biases to them, by an op of their own: those of
    torch's grouped product (`runtime.grouped.PROVIDERS`) are."""
    return (value(node).device.type, value(node).dtype) == ("cuda", torch.bfloat16)


_ops = torch.ops.moefx
_JOINED = frozenset(Level) - {Level.LINKED}  # slices of sorted rows are joined before they are raised
define(
    _ops.grouped_linear.default, volume=_gemm, check=_check_linear, gemm=_product, dims=_dims_of_linear, levels=_JOINED,
    fresh=True, workspace=lambda node: nbytes(node) if argument(node, "bias") and _adds_apart(node) else sympy.S.Zero,
    tokens=Tokens({"counts": "slots", "rows": "slot"}, "slot"),
    runtime="moefx.runtime.grouped.grouped_linear(rows, weight, counts, transposed=transposed, bias=bias)",
)  # fmt: skip
define(
    _ops.grouped_wgrad.default, volume=_gemm, check=_check_wgrad, gemm=_wgrad_product, fresh=True, overwrites="base",
    workspace=lambda node: nbytes(node) if argument(node, "base") is not None and _adds_apart(node) else sympy.S.Zero,
    tokens=Tokens({"counts": "slots", "rows": "slot", "grad": "slot"}),
    runtime="moefx.runtime.grouped.grouped_wgrad(rows, grad, counts, transposed=transposed, out=base)",
)  # fmt: skip
define(
    _ops.expert_rows.default, levels=_JOINED, tokens=Tokens({"counts": "slots"}, "slot"),
    runtime="moefx.runtime.kernels.expert_rows(param, counts, num_rows)",
)  # fmt: skip
define(
    _ops.expert_rows_backward.default, tokens=Tokens({"counts": "slots", "grad": "slot"}),
    runtime="moefx.runtime.kernels.expert_rows_backward(grad, counts)",
)  # fmt: skip
