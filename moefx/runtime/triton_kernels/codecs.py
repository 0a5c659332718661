"""Codecs of one byte an entry: rows become multiples of their own unit in one pass, and rows again in another.

N rows of width D. Encoding reads 2*D or 4*D bytes of a row, twice where it is wider than a tile, and writes D + 4;
decoding does the reverse. Bytes of fp8 are made of and taken apart as integers: sm_80 has no such conversion. bf16 has
no kernel: a cast is one pass already.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.runtime.triton_kernels.launch import as_rows, or_else, tile_of, warps_of
from moefx.transport import codecs as meaning

_SCALE_BYTES = 4
KINDS = MappingProxyType({"int8": (0, 0, 127.0), "fp8-e4m3": (3, 7, 448.0), "fp8-e5m2": (2, 15, 57344.0)})
"""{codec: (binary places of its numbers, bias of their exponent, the largest)}; no places: whole numbers."""


@or_else(meaning.encode)
def encode(rows: Tensor, codec: str) -> Tensor:
    """What `codecs.encode` gives for one of `KINDS`: rows [N, D] -> uint8 [N, D + 4]."""
    places, bias, largest = KINDS[codec]
    rows, width = as_rows(rows), rows.shape[1]
    payload = rows.new_empty(rows.shape[0], width + _SCALE_BYTES, dtype=torch.uint8)
    if payload.numel():
        height, columns = tile_of(width)
        to_bytes[(triton.cdiv(rows.shape[0], height),)](
            rows, payload, rows.shape[0], rows.stride(0), largest, width, height, columns, places, bias,
            num_warps=warps_of(columns))  # fmt: skip
    return payload


@or_else(meaning.decode)
def decode(payload: Tensor, codec: str, width: int, dtype: torch.dtype) -> Tensor:
    """What `codecs.decode` gives: uint8 [N, D + 4] -> rows [N, width = D] of `dtype`."""
    places, bias, _ = KINDS[codec]
    payload, rows = payload.contiguous(), payload.new_empty(payload.shape[0], width, dtype=dtype)
    if rows.numel():
        height, columns = tile_of(width)
        from_bytes[(triton.cdiv(rows.shape[0], height), triton.cdiv(width, columns))](
            payload, rows, rows.shape[0], min(torch.finfo(dtype).max, torch.finfo(torch.float32).max), width, height,
            columns, places, bias, num_warps=warps_of(columns))  # fmt: skip
    return rows


@triton.jit
def _nearest(x):
    """The nearest whole number of up to 22 binary places, the even one of two."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _byte_of(x, largest, PLACES: tl.constexpr, BIAS: tl.constexpr):
    x = tl.minimum(tl.maximum(x, -largest), largest)
    if PLACES == 0:
        found = _nearest(x).to(tl.int32) & 255
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Half of the last place that stays, less if that is even: what is carried goes into the exponent, as it must.
        kept = (size + ((1 << (22 - PLACES)) - 1) + ((size >> (23 - PLACES)) & 1)) >> (23 - PLACES)
        small = _nearest(tl.abs(x) * (1 << (BIAS + PLACES - 1))).to(tl.int32)
        is_small = size < ((128 - BIAS) << 23)
        found = tl.where(is_small, small, kept - ((127 - BIAS) << PLACES)) | ((bits >> 24) & 128)
    return found.to(tl.uint8)


@triton.jit
def _number_of(byte, PLACES: tl.constexpr, BIAS: tl.constexpr):
    if PLACES == 0:
        found = byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        bits = byte.to(tl.int32)
        size = bits & 127
        normal = ((size << (23 - PLACES)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        small = size.to(tl.float32) / (1 << (BIAS + PLACES - 1))
        found = tl.where(size < (1 << PLACES), small, normal)
        found = tl.where(bits > 127, -found, found)
    return found


@triton.jit
def to_bytes(rows, payload, num_rows, row_stride, largest, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             PLACES: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here, columns = (at < num_rows)[:, None], tl.arange(0, COLUMNS)
    source = rows + at.to(tl.int64)[:, None] * row_stride
    target = payload + at.to(tl.int64)[:, None] * (D + 4)
    most, wrong = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.int32)
    for begin in range(0, D, COLUMNS):
        inside = here & (begin + columns < D)[None, :]
        x = tl.load(source + begin + columns[None, :], mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(tl.where(x == x, x, 0.0)), 1))
        wrong = tl.maximum(wrong, tl.max((x != x).to(tl.int32), 1))
    unit = tl.div_rn(most, tl.zeros([ROWS], tl.float32) + largest)
    bad = (wrong > 0) | (unit == float("inf"))
    usable = (unit > 0) & (bad == 0)
    divisor = tl.where(usable, unit, 1.0)[:, None] + tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, D, COLUMNS):
        inside = here & (begin + columns < D)[None, :]
        x = tl.load(source + begin + columns[None, :], mask=inside, other=0).to(tl.float32)
        entry = tl.div_rn(tl.where(usable[:, None], x, 0.0), divisor)
        tl.store(target + begin + columns[None, :], _byte_of(entry, largest, PLACES, BIAS), mask=inside)
    bits = tl.where(bad, float("nan"), unit).to(tl.int32, bitcast=True)
    byte = tl.arange(0, 4)
    tl.store(target + D + byte[None, :], ((bits[:, None] >> (8 * byte)[None, :]) & 255).to(tl.uint8), mask=here)


@triton.jit
def from_bytes(payload, rows, num_rows, largest, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               PLACES: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, byte = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 4)
    here = (at < num_rows)[:, None]
    source = payload + at.to(tl.int64)[:, None] * (D + 4)  # loads of 4 bytes where D is a multiple of that
    parts = tl.load(source + D + byte[None, :], mask=here, other=0).to(tl.int32) << (8 * byte)[None, :]
    unit = tl.sum(parts, 1).to(tl.float32, bitcast=True)
    inside = here & (columns < D)[None, :]
    number = _number_of(tl.load(source + columns[None, :], mask=inside, other=0), PLACES, BIAS) * unit[:, None]
    number = tl.where(number > largest, largest, tl.where(number < -largest, -largest, number))  # NaN stays
    tl.store(rows + at.to(tl.int64)[:, None] * D + columns[None, :], number.to(rows.dtype.element_ty), mask=inside)
