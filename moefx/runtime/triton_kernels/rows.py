"""Rows between token order and slot order: who reads and writes goes by token, so a token's row is read once.

`perm [N]` lists pairs in slot order; `places [N]` is its inverse, the row of each pair. A program has some tokens and
all their choices: dispatch reads D and writes K*D elements per token, combine reads K*D and writes D, and the gradient
of a weighted combine reads D + K*D and writes K*D. These are the least that there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefx.runtime import kernels
from moefx.runtime.triton_kernels.launch import MOST, as_rows, or_else, tile_of, warps_of

_PAIRS = 1024  # of a program that inverts


@or_else(kernels.dispatch)
def dispatch(x: Tensor, perm: Tensor, K: int, rows: int | None = None) -> Tensor:
    """x [T, ...], perm [T*K] -> rows [T*K, ...], or the first `rows` of them."""
    return _spread(x, places_of(perm), K, perm.numel() if rows is None else rows)


@or_else(kernels.combine)
def combine(rows: Tensor, weights: Tensor | None, perm: Tensor, K: int) -> Tensor:
    """rows [R, ...] in slot order, weights [T, K] or None, perm [T*K] -> [T, ...], the (weighted) sum over choices, in
    the promoted dtype of rows and weights. Pairs past the R rows count as zeros."""
    return collect(rows, weights, places_of(perm), K)


@or_else(kernels.combine_backward)
def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor | None, perm: Tensor, K: int
) -> tuple[Tensor, Tensor | None]:
    """grad [T, ...], rows [R, ...], weights [T, K] or None, perm [T*K] -> grad_rows [R, ...], grad_weights [T, K] or
    None, in the dtypes of rows and weights."""
    if weights is None:
        return _spread(grad, places_of(perm), K, rows.shape[0]).to(rows.dtype), None
    return collect_backward(grad, rows, weights, places_of(perm), K)


def places_of(perm: Tensor) -> Tensor:
    """perm [N] int64 -> places [N] int32, `places[perm[r]] == r`."""
    assert perm.numel() <= MOST, f"{perm.numel()} pairs are more than 32 bits can count"
    places = torch.empty_like(perm, dtype=torch.int32)
    if perm.numel():
        invert[(triton.cdiv(perm.numel(), _PAIRS),)](perm.contiguous(), places, perm.numel(), _PAIRS)
    return places


def _spread(x: Tensor, places: Tensor, K: int, num_rows: int) -> Tensor:
    flat = as_rows(x)
    out = flat.new_empty(num_rows, flat.shape[1])
    if out.numel():
        height, columns = tile_of(flat.shape[1])
        spread[(triton.cdiv(flat.shape[0], height),)](
            flat, places, out, flat.shape[0], num_rows, flat.stride(0), K, flat.shape[1], height, columns,
            num_warps=warps_of(columns))  # fmt: skip
    return out.view(num_rows, *x.shape[1:])


def collect(rows: Tensor, weights: Tensor | None, places: Tensor, K: int) -> Tensor:
    """`combine` by places [N] int32; pairs with a place past the rows count as zeros."""
    flat, tokens = as_rows(rows), places.numel() // K
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    out = flat.new_empty(tokens, flat.shape[1], dtype=dtype)
    if out.numel():
        height, columns = tile_of(flat.shape[1])
        weighted = weights is not None
        gather_sum[(triton.cdiv(tokens, height),)](
            flat, places, weights.contiguous() if weighted else flat, out, tokens, flat.shape[0], flat.stride(0),
            K, flat.shape[1], height, columns, weighted, num_warps=warps_of(columns))  # fmt: skip
    return out.view(tokens, *rows.shape[1:])


def collect_backward(grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """`combine_backward` by places [N] int32. Rows that are no pair's place are not written."""
    flat, flat_grad = as_rows(rows), as_rows(grad)
    grad_rows = flat.new_empty(flat.shape)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    if not flat.numel():
        return grad_rows.view(rows.shape), grad_weights.zero_()
    height, columns = tile_of(flat.shape[1])
    gather_sum_backward[(triton.cdiv(grad.shape[0], height),)](
        flat_grad, flat, weights.contiguous(), places, grad_rows, grad_weights, grad.shape[0], flat.shape[0],
        flat_grad.stride(0), flat.stride(0), K, flat.shape[1], height, columns, num_warps=warps_of(columns),
    )  # fmt: skip
    return grad_rows.view(rows.shape), grad_weights


@triton.jit
def invert(perm, places, num_pairs, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_pairs
    pairs = tl.load(perm + rows, mask=inside, other=0)
    tl.store(places + pairs, rows, mask=inside)


@triton.jit
def spread(x, places, out, num_tokens, num_rows, x_stride, K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    for first in tl.static_range(0, D, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        here = inside[:, None] & (columns < D)[None, :]
        value = tl.load(x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=here, other=0)
        for choice in range(K):
            place = tl.load(places + tokens * K + choice, mask=inside, other=num_rows)
            given = here & (place < num_rows)[:, None]
            tl.store(out + place.to(tl.int64)[:, None] * D + columns[None, :], value, mask=given)


@triton.jit
def gather_sum(rows, places, weights, out, num_tokens, num_rows, rows_stride, K: tl.constexpr, D: tl.constexpr,
               TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    for first in tl.static_range(0, D, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        here = inside[:, None] & (columns < D)[None, :]
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for choice in range(K):
            pairs = tokens * K + choice
            place = tl.load(places + pairs, mask=inside, other=num_rows)
            given = here & (place < num_rows)[:, None]
            source = rows + place.to(tl.int64)[:, None] * rows_stride + columns[None, :]
            value = tl.load(source, mask=given, other=0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + pairs, mask=inside, other=0).to(tl.float32)[:, None]
            total += value
        target = out + tokens.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def gather_sum_backward(grad, rows, weights, places, grad_rows, grad_weights, num_tokens, num_rows, grad_stride,
                        rows_stride, K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
                        COLUMNS: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    columns = tl.arange(0, COLUMNS)
    of_token = grad + tokens.to(tl.int64)[:, None] * grad_stride
    whole: tl.constexpr = D <= COLUMNS  # then the gradient of a token stays in registers
    gradient = tl.load(of_token + columns[None, :], mask=inside[:, None] & (columns < D)[None, :], other=0)
    gradient = gradient.to(tl.float32)
    for choice in range(K):
        pairs = tokens * K + choice
        place = tl.load(places + pairs, mask=inside, other=num_rows)
        given = place < num_rows
        scale = tl.load(weights + pairs, mask=inside, other=0).to(tl.float32)
        product = tl.zeros([TOKENS], tl.float32)
        for first in tl.static_range(0, D, COLUMNS):
            at = first + columns
            here = given[:, None] & (at < D)[None, :]
            if not whole:
                gradient = tl.load(of_token + at[None, :], mask=here, other=0).to(tl.float32)
            source = rows + place.to(tl.int64)[:, None] * rows_stride + at[None, :]
            value = tl.load(source, mask=here, other=0).to(tl.float32)
            product += tl.sum(tl.where(here, gradient * value, 0.0), 1)
            target = grad_rows + place.to(tl.int64)[:, None] * D + at[None, :]
            tl.store(target, (gradient * scale[:, None]).to(grad_rows.dtype.element_ty), mask=here)
        tl.store(grad_weights + pairs, product.to(grad_weights.dtype.element_ty), mask=inside)
