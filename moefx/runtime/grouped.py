"""Per-slot matrix products: rows sorted by slot times the matrix of their slot.

R rows, S slots, I input width, O output width. Rows beyond `sum(counts)` belong to no slot. Which implementation
runs is looked up by (device type, dtype); the CPU entries were measured by `benchmarks/grouped_mm.py`.
The functions are not differentiable: the compiler writes the backward pass out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Provider:
    """One implementation. `linear(rows, matrices [S, I, O], counts, exact, bias [S, O] or None)`,
    `wgrad(rows, grad, counts) -> [S, I, O]` written into (or added to) `out`; `fits(rows, O, S)` tells whether it takes
    operands of these widths, of so many slots."""

    name: str
    linear: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor]
    wgrad: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    fits: Callable[[Tensor, int, int], bool]


@torch.no_grad()
def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    *,
    transposed: bool = False,
    exact: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """rows [R, I] sorted by slot, weight [S, O, I] ([S, I, O] if transposed), counts [S] int64, bias [S, O] -> [R, O];
    or rows [R, .., I] -> [R, .., O].

    Rows past `sum(counts)` give zeros; `exact` promises that there are none, which saves a pass over the output on
    CUDA. The input gradient is the same function with `transposed` inverted.
    """
    matrices = weight if transposed else weight.transpose(1, 2)
    flat, flat_counts = _flat(rows, counts)
    out = _choose(flat, matrices.shape[2], len(matrices)).linear(flat, matrices, flat_counts, exact, bias)
    return out.view(*rows.shape[:-1], matrices.shape[2])


@torch.no_grad()
def grouped_wgrad(
    rows: Tensor, grad: Tensor, counts: Tensor, *, transposed: bool = False, out: Tensor | None = None
) -> Tensor:
    """rows [R, .., I], grad [R, .., O], counts [S] int64 -> [S, O, I] ([S, I, O] if transposed), zero for idle slots.

    With `out` of that shape the gradient is added to it in place and `out` is returned.
    """
    (rows, flat_counts), (grad, _) = _flat(rows, counts), _flat(grad, counts)
    # The gradient of the other layout is the transpose, and each layout is one product with the operands swapped.
    left, right = (rows, grad) if transposed else (grad, rows)
    return _choose(left, right.shape[1], len(counts)).wgrad(left, right.contiguous(), flat_counts, out)


def _flat(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, .., I] as [R * .., I], and how many of these a slot has."""
    return (rows, counts) if rows.dim() == 2 else (rows.flatten(0, -2), counts * rows.shape[1:-1].numel())


def _choose(rows: Tensor, width: int, slots: int) -> Provider:
    provider = PROVIDERS.get((rows.device.type, rows.dtype), LOOP)
    return provider if provider.fits(rows, width, slots) else LOOP


def _sizes(counts: Tensor, rows: int) -> list[int]:
    """Rows of every slot, read on the host, and of none."""
    found = counts.tolist()
    return [*found, rows - sum(found)]


def _loop_linear(rows: Tensor, matrices: Tensor, counts: Tensor, exact: bool, bias: Tensor | None) -> Tensor:
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    sizes = _sizes(counts, rows.shape[0])
    *results, rest = out.split(sizes)
    biases = [None] * len(results) if bias is None else bias.unbind()
    for part, matrix, shift, result, size in zip(rows.split(sizes), matrices.unbind(), biases, results, sizes):
        if size and shift is None:
            torch.mm(part, matrix, out=result)
        elif size:  # one rounding, as a linear of one expert has
            torch.addmm(shift, part, matrix, out=result)
    if sizes[-1]:
        rest.zero_()
    return out


def _loop_wgrad(left: Tensor, right: Tensor, counts: Tensor, out: Tensor | None) -> Tensor:
    result = left.new_empty(counts.numel(), left.shape[1], right.shape[1]) if out is None else out
    sizes = _sizes(counts, left.shape[0])
    for a, b, matrix, size in zip(left.split(sizes), right.split(sizes), result.unbind(), sizes):
        if size and out is None:
            torch.mm(a.t(), b, out=matrix)
        elif size:
            matrix.addmm_(a.t(), b)
        elif out is None:
            matrix.zero_()
    return result


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _grouped_linear(rows: Tensor, matrices: Tensor, counts: Tensor, exact: bool, bias: Tensor | None) -> Tensor:
    ends = _ends(counts)
    out = F.grouped_mm(rows, matrices, offs=ends)
    if bias is not None:
        slot = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
        out += bias[slot.clamp_(max=bias.shape[0] - 1)]
    if rows.device.type == "cpu":
        out[int(ends[-1]) :].zero_()
    elif not exact:
        # The rows past the last end are never written. Their number is on the device only, hence a mask.
        beyond = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        out.masked_fill_(beyond[:, None], 0)
    return out


def _grouped_wgrad(left: Tensor, right: Tensor, counts: Tensor, out: Tensor | None) -> Tensor:
    result = F.grouped_mm(left.t(), right, offs=_ends(counts))
    return result if out is None else out.add_(result)


def _always(rows: Tensor, width: int, slots: int) -> bool:
    return True


def _aligned(rows: Tensor, width: int, slots: int) -> bool:
    """The CUDA kernel wants rows of whole 16-byte units, at least one row, and fewer than 1024 slots. How many rows a
    slot has is free: rows lie one after the other in both operands (ATen/native/cuda/GroupMMCommon.cuh)."""
    unit = 16 // rows.element_size()
    if not rows.is_contiguous() or rows.data_ptr() % 16 or slots >= 1024:
        return False
    return rows.shape[0] > 0 and rows.shape[1] % unit == 0 and width % unit == 0


LOOP = Provider("mm loop", _loop_linear, _loop_wgrad, _always)
GROUPED_MM = Provider("F.grouped_mm", _grouped_linear, _grouped_wgrad, _always)
GROUPED_MM_CUDA = Provider("F.grouped_mm", _grouped_linear, _grouped_wgrad, _aligned)

# Everything not named here runs the loop. On CPU F.grouped_mm is a loop too and gains nothing in any pass (0.99 to
# 1.05 of our loop's time, benchmarks/results/grouped_mm_cpu.md); padded bmm loses four times under skew. The CUDA entry
# is not measured: there the loop would read the counts on the host.
PROVIDERS: Mapping[tuple[str, torch.dtype], Provider] = MappingProxyType(
    {
        ("cuda", torch.bfloat16): GROUPED_MM_CUDA,
    }
)
