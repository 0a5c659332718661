"""The kernels of `matmul`: a map of tiles, products with the matrix of a slot, and sums of outer products."""

from __future__ import annotations

import triton
import triton.language as tl

from moefx.runtime.triton_kernels.activations import gated_tile


@triton.jit
def map_tiles(counts, tiles, num_rows, bound, num_slots, ROWS: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.arange(0, S)
    count = tl.load(counts + slots, mask=slots < num_slots, other=0).to(tl.int32)
    count = tl.where(slots == num_slots, num_rows - tl.sum(count, 0), count)  # rows of nobody
    ends, tile_ends = tl.cumsum(count, 0), tl.cumsum((count + ROWS - 1) // ROWS, 0)
    passed = tile_ends[None, :] <= number[:, None]
    slot = tl.sum(passed.to(tl.int32), 1)
    mine = slots[None, :] == slot[:, None]
    end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
    size = tl.sum(tl.where(mine, count[None, :], 0), 1)
    before = tl.max(tl.where(passed, tile_ends[None, :], 0), 1)
    first = end - size + (number - before) * ROWS
    tl.store(tiles + number, tl.where(slot <= num_slots, slot, -1), mask=number < bound)
    tl.store(tiles + bound + number, first, mask=number < bound)
    tl.store(tiles + 2 * bound + number, end, mask=number < bound)


@triton.jit
def _grouped(number, down, across, GROUP: tl.constexpr):
    """Tile (row, column) of a program: GROUP tiles of rows take one tile of columns after the other."""
    per_group = GROUP * across
    first = (number // per_group) * GROUP
    size = tl.minimum(down - first, GROUP)
    inner = number % per_group
    return first + inner % size, inner // size


@triton.jit
def _dot(a, b, total, WIDENS: tl.constexpr):
    """WIDENS: for the interpreter, which multiplies the bits of bfloat16."""
    if WIDENS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def linear(rows, matrices, tiles, source, bias, scale, out, act, bound, num_slots, width, row_stride, slot_stride,
           depth_stride, column_stride, bias_stride, limit, alpha, inner, EVEN: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, GATHERS: tl.constexpr,
           HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr,
           WIDENS: tl.constexpr):  # fmt: skip
    GATED: tl.constexpr = KIND >= 0
    half = width // 2 if GATED else width
    tile, column = _grouped(tl.program_id(0), bound, tl.cdiv(half, COLUMNS), GROUP)
    slot = tl.load(tiles + tile)
    if slot >= 0:
        first, end = tl.load(tiles + bound + tile), tl.load(tiles + 2 * bound + tile)
        at = first + tl.arange(0, ROWS)
        columns = column * COLUMNS + tl.arange(0, COLUMNS)
        gate_at, up_at = columns, columns + half
        if INTERLEAVED:
            gate_at, up_at = 2 * columns, 2 * columns + 1
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total_up = total
        if slot < num_slots:
            from_row = tl.minimum(at, end - 1)  # loads need no mask along rows: what is too much is not stored
            if GATHERS:
                from_row = tl.load(source + from_row)
            steps = tl.arange(0, STEP)
            left = rows + from_row.to(tl.int64)[:, None] * row_stride + steps[None, :]
            begin = matrices + slot.to(tl.int64) * slot_stride + steps[:, None] * depth_stride
            right, right_up = begin + gate_at[None, :] * column_stride, begin + up_at[None, :] * column_stride
            inside = (columns < half)[None, :]
            for depth in range(0, inner, STEP):
                if EVEN:
                    a, b = tl.load(left), tl.load(right, mask=inside, other=0.0)
                else:
                    there = steps < inner - depth
                    a = tl.load(left, mask=there[None, :], other=0.0)
                    b = tl.load(right, mask=inside & there[:, None], other=0.0)
                total = _dot(a, b, total, WIDENS)
                if GATED:
                    b = tl.load(right_up, mask=inside & (EVEN | (steps < inner - depth)[:, None]), other=0.0)
                    total_up = _dot(a, b, total_up, WIDENS)
                left += STEP
                right += STEP * depth_stride
                right_up += STEP * depth_stride
            if HAS_BIAS:
                shift = bias + slot.to(tl.int64) * bias_stride
                total += tl.load(shift + gate_at, mask=columns < half, other=0).to(tl.float32)[None, :]
                if GATED:
                    total_up += tl.load(shift + up_at, mask=columns < half, other=0).to(tl.float32)[None, :]
            if SCALED:
                total *= tl.load(scale + at, mask=at < end, other=0).to(tl.float32)[:, None]
        here = (at < end)[:, None] & (columns < half)[None, :]
        line = at.to(tl.int64)[:, None]
        tl.store(out + line * width + gate_at[None, :], total.to(out.dtype.element_ty), mask=here)
        if GATED:
            tl.store(out + line * width + up_at[None, :], total_up.to(out.dtype.element_ty), mask=here)
            # What the backward will see is rounded, so the activation is of that.
            gate = total.to(out.dtype.element_ty).to(tl.float32)
            up = total_up.to(out.dtype.element_ty).to(tl.float32)
            result = gated_tile(gate, up, limit, alpha, KIND)
            tl.store(act + line * half + columns[None, :], result.to(act.dtype.element_ty), mask=here)


@triton.jit
def wgrad(left, right, counts, left_source, right_source, out, num_slots, height, width, left_stride, right_stride,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, S: tl.constexpr,
          LEFT_GATHERS: tl.constexpr, RIGHT_GATHERS: tl.constexpr, ADDS: tl.constexpr,
          WIDENS: tl.constexpr):  # fmt: skip
    slot = tl.program_id(1)
    row, column = _grouped(tl.program_id(0), tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS), GROUP)
    slots = tl.arange(0, S)
    count = tl.load(counts + slots, mask=slots < num_slots, other=0).to(tl.int32)
    end = tl.sum(tl.where(slots <= slot, count, 0), 0)
    begin = end - tl.sum(tl.where(slots == slot, count, 0), 0)
    down, across = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, STEP):
        at = first + steps
        inside = at < end
        of_left, of_right = at, at
        if LEFT_GATHERS:
            of_left = tl.load(left_source + at, mask=inside, other=0)
        if RIGHT_GATHERS:
            of_right = tl.load(right_source + at, mask=inside, other=0)
        a = tl.load(left + of_left.to(tl.int64)[:, None] * left_stride + down[None, :],
                    mask=inside[:, None] & (down < height)[None, :], other=0.0)  # fmt: skip
        b = tl.load(right + of_right.to(tl.int64)[:, None] * right_stride + across[None, :],
                    mask=inside[:, None] & (across < width)[None, :], other=0.0)  # fmt: skip
        total = _dot(tl.trans(a), b, total, WIDENS)
    target = out + slot.to(tl.int64) * height * width + down.to(tl.int64)[:, None] * width + across[None, :]
    here = (down < height)[:, None] & (across < width)[None, :]
    if ADDS:
        total += tl.load(target, mask=here, other=0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=here)
