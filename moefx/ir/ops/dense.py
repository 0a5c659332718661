"""Tensor parallelism of what is no expert, over the axis `mp`, whose ranks read the same data (Megatron-LM, section 3).

`vary` stands before products whose weights are cut by columns, `sum_parts` behind those whose weights are cut by rows:
Megatron's f and g. `own_part` is a rank's part of what all ranks have, to meet what is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.ir import world
from moefx.ir.factors import factors
from moefx.ir.level import Level
from moefx.ir.meaning import meaning
from moefx.ir.op import Along, argument, define, free, value
from moefx.ir.redistribute import redistribute
from moefx.layout import padded, part_of


class _Vary(torch.autograd.Function):
    """Identity whose transpose sums the gradient. Traced through, so that it costs nothing in the forward."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.moefx.sum_parts(grad, ctx.axis), None


def vary(x: Tensor, axis: str) -> Tensor:
    """What all ranks along an axis have, for readers of which every rank has other ones: the gradient is the sum over
    the ranks of what flows back."""
    return _Vary.apply(x, axis)


@meaning("x [..] -> [..]", gradient=lambda grad, *_: grad)
def sum_parts(x: Tensor, axis: str) -> Tensor:
    """The sum over the ranks along an axis, the same on all of them, who read it alike: the gradient of every rank's
    part is that of the sum."""
    return world.current().all_reduce(x, axis)


@meaning(
    "x [.. dim~ ..] -> [.. dim//n ..]",
    gradient=lambda back, x, *how: own_part_backward(back.contiguous(), *how),
)
def own_part(x: Tensor, dim: int, pieces: Sequence[int], n: int, axis: str) -> Tensor:
    """This rank's entries of a dim that every rank has whole: an equal share of each piece.

    Constraints: the pieces add up to the dim, and divide by n, the number of ranks along the axis.
    """
    return part_of(x, dim, pieces, n, world.current().coordinate(axis)).clone()


@meaning(
    "grad [.. dim~ ..] -> [.. dim*n ..]",
    gradient=lambda back, grad, *how: own_part(back, *how),
)
def own_part_backward(grad: Tensor, dim: int, pieces: Sequence[int], n: int, axis: str) -> Tensor:
    """The transpose of `own_part`: zeros for the entries of other ranks."""
    return padded(grad, dim, pieces, n, world.current().coordinate(axis))


def _divides(node) -> str | None:
    x, dim, pieces, n = (argument(node, name) for name in ("x", "dim", "pieces", "n"))
    size = value(x).shape[dim]
    if sum(pieces) == size and not any(piece % n for piece in pieces):
        return None
    return f"dim {dim} of size {size} is not {'+'.join(map(str, pieces))}, each of which divides over {n} ranks"


_ops, _runtime = torch.ops.moefx, "moefx.runtime.collectives"
_LEVELS = frozenset({Level.MOE, Level.PLACED})
define(vary, volume=free, levels=_LEVELS, along=Along("I", "R"), factors=factors("x [..] -> [..]"))
redistribute(
    _ops.sum_parts.default, "P", "I", levels=_LEVELS, of_user=True,
    runtime=f"{_runtime}.sum_parts_start(session, x, axis=axis, owned=is_owned)",
)  # fmt: skip
redistribute(
    _ops.own_part.default, "R", "V", dim="dim", check=_divides,
    is_view=lambda call: len(argument(call, "pieces")) == 1,
    runtime=f"{_runtime}.own_part(session, x, dim=dim, pieces=pieces, axis=axis)",
)  # fmt: skip
redistribute(
    _ops.own_part_backward.default, "V", "P",
    runtime=f"{_runtime}.own_part_backward(session, grad, dim=dim, pieces=pieces, axis=axis)",
)  # fmt: skip
