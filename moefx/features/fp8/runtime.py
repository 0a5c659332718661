"""Products per expert in fp8, as emitted code calls them. R rows, S slots, I input width, O output width."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefx.runtime import grouped, kernels

FP8 = torch.float8_e4m3fn


class Scaled(NamedTuple):
    """entries [.., I] of fp8, in one piece, times scale [..] in fp32."""

    entries: Tensor
    scale: Tensor


@torch.no_grad()
def scaled_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, *, transposed: bool = False, bias: Tensor | None = None
) -> Tensor:
    """What `runtime.grouped.grouped_linear` gives, of rows and weights in fp8: rows [R, .., I] sorted by slot, weight
    [S, O, I] ([S, I, O] if transposed), counts [S] int64, bias [S, O] -> [R, .., O]; zeros past `sum(counts)`.

    On CUDA rows are bfloat16, and I and O multiples of 16.
    """
    flat, inner = rows.reshape(-1, rows.shape[-1]), rows.shape[1:-1].numel()
    left, right = scaled(flat), scaled(weight.transpose(1, 2) if transposed else weight)
    multiply = by_torch if rows.is_cuda else by_parts
    out = multiply(left, right, counts if inner == 1 else counts * inner, bias)
    return out.to(rows.dtype).view(*rows.shape[:-1], out.shape[-1])


def scaled(x: Tensor) -> Scaled:
    """x [.., I] in fp8, its largest entry as the largest number that there is. What is not finite makes all of it NaN.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = (largest / torch.finfo(FP8).max).clamp_(min=torch.finfo(torch.float32).tiny)  # rows of zeros stay zeros
    return Scaled((x / scale).to(FP8).contiguous(), scale.squeeze(-1))


def by_parts(left: Scaled, right: Scaled, counts: Tensor, bias: Tensor | None) -> Tensor:
    """left [R, I], right [S, O, I], bias [S, O] -> [R, O] fp32, by a product in fp32 of what fp8 holds."""
    rows, weight = (each.entries.float().mul_(each.scale.unsqueeze(-1)) for each in (left, right))
    return grouped.grouped_linear(rows, weight, counts, bias=None if bias is None else bias.float())


def by_torch(left: Scaled, right: Scaled, counts: Tensor, bias: Tensor | None) -> Tensor:
    """The same in bfloat16, by torch's product of fp8. How many rows a slot has is free, as in `runtime.grouped`."""
    if not len(left.entries):
        return left.entries.new_zeros(0, right.entries.shape[1], dtype=torch.bfloat16)
    per_row = F.ScalingType.RowWise
    out = F.scaled_grouped_mm(left.entries, right.entries.transpose(1, 2), left.scale, per_row, right.scale, per_row,
                              offs=counts.cumsum(0).to(torch.int32), output_dtype=torch.bfloat16)  # fmt: skip
    return kernels.finish_rows(out, counts, bias)
