"""What every slot has of its own, on the rows of the slot: biases and their gradients, zeros where nobody's rows are.

Rows [R, D] are sorted by slot, counts [S] int64; those past `sum(counts)` are nobody's. Sums over rows go in two steps
of a fixed order, chunks of rows and then the chunks of a slot, so they are the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.runtime import kernels
from moefx.runtime.triton_kernels.launch import as_rows, or_else, tile_of, warps_of

CHUNK = 128  # rows of one partial sum


@or_else(kernels.expert_rows)
def expert_rows(param: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """param [S, ...], counts [S] -> [num_rows, ...], the parameter of each row's slot; zero past the counts."""
    flat = as_rows(param)
    out = flat.new_empty(num_rows, flat.shape[1])
    _per_slot(out, flat, counts, copies=True)
    return out.view(num_rows, *param.shape[1:])


@or_else(kernels.finish_rows)
def finish_rows(rows: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add bias [S, D] of its slot to every row of rows [R, D], in place, and set the rows past `sum(counts)` to zero.
    Without a bias only these are written, and none is read. Returns rows, which must be contiguous."""
    assert rows.is_contiguous(), "rows are finished in place"
    _per_slot(rows, None if bias is None else as_rows(bias), counts, copies=False)
    return rows


def _per_slot(out: Tensor, param: Tensor | None, counts: Tensor, *, copies: bool) -> None:
    if out.numel():
        height, columns = tile_of(out.shape[1])
        slots = counts.numel()
        per_slot[(triton.cdiv(out.shape[0], height),)](
            out, out if param is None else param, counts.contiguous(), out.shape[0], slots,
            0 if param is None else param.stride(0), out.shape[1], height, columns,
            triton.next_power_of_2(max(slots, 2)), param is not None, copies, num_warps=warps_of(columns))  # fmt: skip


@or_else(kernels.expert_rows_backward)
def expert_rows_backward(g: Tensor, counts: Tensor) -> Tensor:
    """g [R, ...], counts [S] -> [S, ...], the sum over each slot's rows; zero for idle slots."""
    flat, slots = as_rows(g), counts.numel()
    width = flat.shape[1]
    out = flat.new_empty(slots, width)
    if not flat.numel():
        return out.zero_().view(slots, *g.shape[1:])
    columns = min(triton.next_power_of_2(max(width, 16)), 128)
    bound, across = flat.shape[0] // CHUNK + slots, triton.cdiv(width, columns)
    parts = flat.new_empty(bound, width, dtype=torch.float32)
    padded = triton.next_power_of_2(max(slots, 2))
    sum_chunks[(bound, across)](flat, counts.contiguous(), parts, slots, flat.stride(0), width, CHUNK, columns,
                                padded)  # fmt: skip
    sum_parts[(slots, across)](parts, counts.contiguous(), out, slots, width, CHUNK, 16, columns, padded)
    return out.view(slots, *g.shape[1:])


@triton.jit
def per_slot(out, param, counts, num_rows, num_slots, param_stride, D: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, S: tl.constexpr, HAS_PARAM: tl.constexpr, COPIES: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, S)
    count = tl.load(counts + slots, mask=slots < num_slots, other=0).to(tl.int32)
    total = tl.sum(count, 0)
    inside, owned = rows < num_rows, rows < total
    if HAS_PARAM or tl.program_id(0) * ROWS + ROWS > total:
        ends = tl.cumsum(count, 0)
        slot = tl.sum((rows[:, None] >= ends[None, :]).to(tl.int32), 1).to(tl.int64)
        for first in tl.static_range(0, D, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            here = inside[:, None] & (columns < D)[None, :]
            target = out + rows.to(tl.int64)[:, None] * D + columns[None, :]
            if HAS_PARAM:
                mine = here & owned[:, None]
                value = tl.load(param + slot[:, None] * param_stride + columns[None, :], mask=mine, other=0)
                if not COPIES:
                    value = (value.to(tl.float32) + tl.load(target, mask=mine, other=0).to(tl.float32))
                tl.store(target, value.to(out.dtype.element_ty), mask=here)
            else:
                tl.store(target, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=here & ~owned[:, None])


@triton.jit
def sum_chunks(g, counts, parts, num_slots, g_stride, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
               S: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0)
    slots = tl.arange(0, S)
    count = tl.load(counts + slots, mask=slots < num_slots, other=0).to(tl.int32)
    chunks = tl.cumsum((count + CHUNK - 1) // CHUNK, 0)
    slot = tl.sum((chunks <= chunk).to(tl.int32), 0)
    if slot < num_slots:
        is_mine = slots == slot
        end = tl.sum(tl.where(slots <= slot, count, 0), 0)
        size = tl.sum(tl.where(is_mine, count, 0), 0)
        before = tl.sum(tl.where(is_mine, chunks - (count + CHUNK - 1) // CHUNK, 0), 0)
        rows = end - size + (chunk - before) * CHUNK + tl.arange(0, CHUNK)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here = (rows < end)[:, None] & (columns < width)[None, :]
        value = tl.load(g + rows.to(tl.int64)[:, None] * g_stride + columns[None, :], mask=here, other=0)
        tl.store(parts + chunk.to(tl.int64) * width + columns, tl.sum(value.to(tl.float32), 0), mask=columns < width)


@triton.jit
def sum_parts(parts, counts, out, num_slots, width, CHUNK: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
              S: tl.constexpr):  # fmt: skip
    slot = tl.program_id(0)
    slots = tl.arange(0, S)
    count = tl.load(counts + slots, mask=slots < num_slots, other=0).to(tl.int32)
    chunks = (count + CHUNK - 1) // CHUNK
    end = tl.sum(tl.where(slots <= slot, chunks, 0), 0)
    begin = end - tl.sum(tl.where(slots == slot, chunks, 0), 0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, end, STEP):
        rows = first + tl.arange(0, STEP)
        here = (rows < end)[:, None] & (columns < width)[None, :]
        total += tl.sum(tl.load(parts + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=here, other=0), 0)
    tl.store(out + slot.to(tl.int64) * width + columns, total.to(out.dtype.element_ty), mask=columns < width)
