"""Gated activations and their gradients on rows of which the last may be nobody's; those give zeros and are not read.

The forward reads 2*H and writes H elements per row; the gradient reads 3*H and writes 2*H. `scale` [R] multiplies the
result of every row; its gradient, and the scaled result, come out of the same pass of `glu_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.runtime import glu as meaning
from moefx.runtime.glu import Glu, number_of
from moefx.runtime.triton_kernels.launch import as_rows, or_else, tile_of, warps_of


@or_else(meaning.glu)
def glu(rows: Tensor, kind: Glu, counts: Tensor | None = None, *, up: Tensor | None = None) -> Tensor:
    """What `runtime.glu.glu` gives: rows [R, 2H], or gates [R, H] where there is an up [R, H] -> [R, H]; with counts
    [S] int64, zeros past their sum."""
    width = rows.shape[1] // (2 if up is None else 1)
    rows = as_rows(rows)
    ups = rows[:, width:] if up is None else as_rows(up)
    out = rows.new_empty(rows.shape[0], width)
    if out.numel():
        height, columns = tile_of(width)
        slots = 0 if counts is None else counts.numel()
        activate[(triton.cdiv(rows.shape[0], height), triton.cdiv(width, columns))](
            rows, ups, rows if counts is None else counts.contiguous(), out, rows.shape[0], slots, rows.stride(0),
            ups.stride(0), kind.limit, kind.alpha, width, height, columns, triton.next_power_of_2(max(slots, 2)),
            counts is not None, number_of(kind), kind.interleaved, num_warps=warps_of(columns))  # fmt: skip
    return out


@or_else(meaning.glu_backward)
def glu_backward(
    grad: Tensor, rows: Tensor, kind: Glu, counts: Tensor | None = None, scale: Tensor | None = None, *,
    up: Tensor | None = None,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None]:  # fmt: skip
    """What `runtime.glu.glu_backward` gives: grad [R, H], rows [R, 2H] -> grad_rows [R, 2H], or those of
    gates and ups; and of scale [R] the scaled result [R, H] and the gradient [R] float32, or None."""
    width = grad.shape[1]
    rows, grad = as_rows(rows), as_rows(grad)
    ups = rows[:, width:] if up is None else as_rows(up)
    out = rows.new_empty(rows.shape)
    of_ups = out[:, width:] if up is None else rows.new_empty(rows.shape)
    scaled, parts = None, None
    height, columns = tile_of(width)
    across = triton.cdiv(width, columns)
    if scale is not None:
        scaled = rows.new_empty(rows.shape[0], width)
        parts = rows.new_empty(rows.shape[0], across, dtype=torch.float32)
    if out.numel():
        slots = 0 if counts is None else counts.numel()
        activate_backward[(triton.cdiv(rows.shape[0], height), across)](
            grad, rows, ups, rows if counts is None else counts.contiguous(),
            rows if scale is None else scale.contiguous(), out, of_ups, out if scaled is None else scaled,
            out if parts is None else parts, rows.shape[0], slots, grad.stride(0), rows.stride(0), ups.stride(0),
            out.stride(0), kind.limit, kind.alpha, width, height, columns, triton.next_power_of_2(max(slots, 2)),
            counts is not None, scale is not None, number_of(kind), kind.interleaved,
            num_warps=warps_of(columns))  # fmt: skip
    found = out if up is None else (out, of_ups)
    return found, scaled, None if parts is None else parts.sum(1) if across > 1 else parts.view(-1)


def gated(
    halves: Sequence[Tensor], name: str, *, interleaved: bool = False, limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    """What `runtime.glu.gated` gives: [.., 2H], or gates and ups [.., H] -> [.., H]."""
    return meaning.gated_by(glu, halves, meaning.kind_of(name, interleaved, limit, alpha))


def gated_backward(
    grad: Tensor, halves: Sequence[Tensor], name: str, *, interleaved: bool = False, limit: float | None = None,
    alpha: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """What `runtime.glu.gated_backward` gives: grad [.., H] -> gradients of the halves."""
    return meaning.gated_backward_by(glu_backward, grad, halves, meaning.kind_of(name, interleaved, limit, alpha))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gated_tile(gate, up, limit, alpha, KIND: tl.constexpr):
    """The activation of float32 tiles. KIND is the place of its name in `runtime.glu.NAMES`."""
    if KIND == 0:  # swiglu
        result = gate * _sigmoid(gate) * up
    elif KIND == 1:  # geglu
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 2:  # geglu by tanh: tanh(x) = 2 sigmoid(2 x) - 1
        result = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:  # clamped
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1.0) * gate * _sigmoid(alpha * gate)
    return result


@triton.jit
def gated_tile_backward(grad, gate, up, limit, alpha, KIND: tl.constexpr):
    """(gradient of gate, of up, the activation) of float32 tiles."""
    if KIND == 0:
        sigmoid = _sigmoid(gate)
        act, slope, other, passes = gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid)), up, 1.0
    elif KIND == 1:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        act, other, passes = gate * share, up, 1.0
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif KIND == 2:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        sigmoid = _sigmoid(inner)
        act, other, passes = gate * sigmoid, up, 1.0
        slope = sigmoid + act * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        inside = (up >= -limit) & (up <= limit)
        below = gate <= limit
        gate = tl.minimum(gate, limit)
        sigmoid = _sigmoid(alpha * gate)
        act, slope = gate * sigmoid, tl.where(below, sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid)), 0.0)
        other, passes = tl.minimum(tl.maximum(up, -limit), limit) + 1.0, tl.where(inside, 1.0, 0.0)
    return grad * other * slope, grad * act * passes, act * other


@triton.jit
def _rows_in_use(counts, num_rows, num_slots, S: tl.constexpr, RAGGED: tl.constexpr):
    used = num_rows
    if RAGGED:
        slots = tl.arange(0, S)
        used = tl.minimum(tl.sum(tl.load(counts + slots, mask=slots < num_slots, other=0), 0).to(tl.int32), num_rows)
    return used


@triton.jit
def _halves(rows, ups, at, columns, here, row_stride, up_stride, H: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Gate and up of a tile, as float32."""
    begin = rows + at.to(tl.int64)[:, None] * row_stride
    if INTERLEAVED:
        both = 2 * tl.program_id(1) * COLUMNS + tl.arange(0, 2 * COLUMNS)
        used = tl.max(here.to(tl.int32), 1) > 0
        value = tl.load(begin + both[None, :], mask=used[:, None] & (both < 2 * H)[None, :], other=0)
        gate, up = tl.split(tl.reshape(value, [ROWS, COLUMNS, 2]))
    else:
        gate = tl.load(begin + columns[None, :], mask=here, other=0)
        up = tl.load(ups + at.to(tl.int64)[:, None] * up_stride + columns[None, :], mask=here, other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def activate(rows, ups, counts, out, num_rows, num_slots, row_stride, up_stride, limit, alpha, H: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, S: tl.constexpr, RAGGED: tl.constexpr, KIND: tl.constexpr,
             INTERLEAVED: tl.constexpr):  # fmt: skip
    used = _rows_in_use(counts, num_rows, num_slots, S, RAGGED)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate, up = _halves(rows, ups, at, columns, (at < used)[:, None] & (columns < H)[None, :], row_stride, up_stride, H,
                       ROWS, COLUMNS, INTERLEAVED)  # fmt: skip
    result = gated_tile(gate, up, limit, alpha, KIND)
    target = out + at.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(at < num_rows)[:, None] & (columns < H)[None, :])


@triton.jit
def activate_backward(grad, rows, ups, counts, scale, out, out_up, scaled, parts, num_rows, num_slots, grad_stride,
                      row_stride, up_stride, out_stride, limit, alpha, H: tl.constexpr, ROWS: tl.constexpr,
                      COLUMNS: tl.constexpr, S: tl.constexpr, RAGGED: tl.constexpr, SCALED: tl.constexpr,
                      KIND: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    used = _rows_in_use(counts, num_rows, num_slots, S, RAGGED)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = (at < used)[:, None] & (columns < H)[None, :], (at < num_rows)[:, None] & (columns < H)[None, :]
    gate, up = _halves(rows, ups, at, columns, here, row_stride, up_stride, H, ROWS, COLUMNS, INTERLEAVED)
    incoming = tl.load(grad + at.to(tl.int64)[:, None] * grad_stride + columns[None, :], mask=here, other=0)
    incoming = incoming.to(tl.float32)
    weight = 1.0
    if SCALED:
        weight = tl.load(scale + at, mask=at < used, other=0).to(tl.float32)[:, None]
    grad_gate, grad_up, result = gated_tile_backward(incoming * weight, gate, up, limit, alpha, KIND)
    if SCALED:
        tl.store(scaled + at.to(tl.int64)[:, None] * H + columns[None, :],
                 (result * weight).to(scaled.dtype.element_ty), mask=inside)  # fmt: skip
        share = tl.sum(tl.where(here, result * incoming, 0.0), 1)
        tl.store(parts + at * tl.num_programs(1) + tl.program_id(1), share, mask=at < num_rows)
    begin = at.to(tl.int64)[:, None] * out_stride
    if INTERLEAVED:
        both = 2 * tl.program_id(1) * COLUMNS + tl.arange(0, 2 * COLUMNS)
        joined = tl.reshape(tl.join(grad_gate, grad_up), [ROWS, 2 * COLUMNS])
        tl.store(out + begin + both[None, :], joined.to(out.dtype.element_ty),
                 mask=(at < num_rows)[:, None] & (both < 2 * H)[None, :])  # fmt: skip
    else:
        tl.store(out + begin + columns[None, :], grad_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out_up + begin + columns[None, :], grad_up.to(out_up.dtype.element_ty), mask=inside)
