"""Parameters of which every rank has some rows, gathered before they are used: what `materialize` is to others.

A bucket of parameters [R, ..] is one collective. Rank r along the axis has the rows that DTensor's `Shard(0)` gives it,
dim by dim of the mesh, as many as `torch.chunk` cuts; a graph's values have the sizes of the first rank's, which has
the most. `dtype` is what they are gathered as, and on the way back what gradients become; None: as they are.
Source: ZeRO-3 (Rajbhandari et al. 2020); FSDP2 (`torch.distributed.fsdp.fully_shard`).
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor

from moefx.axes import split_axes
from moefx.ir import world
from moefx.ir.meaning import meaning
from moefx.ir.op import Stage, argument, nbytes, numel, value
from moefx.ir.redistribute import redistribute
from moefx.layout import chunked


@meaning(
    lambda shards, rows, inputs, scale, n, axis, dtype: [
        shard.new_empty((total, *shard.shape[1:]), dtype=dtype) for shard, total in zip(shards, rows)
    ],
    gradient=lambda grads, shards, _, inputs, scale, n, axis, dtype: scatter_shards(
        grads, [shard.shape[0] for shard in shards], inputs, scale, n, axis, dtype and shards[0].dtype
    ),
)
def gather_shards(shards: list[Tensor], rows: list[int], inputs: list[int], scale: float, n: int, axis: str,
                  dtype: torch.dtype | None) -> list[Tensor]:  # fmt: skip
    """Parameters as all ranks together have them: [own rows, ..] each -> [rows, ..] each. inputs: which inputs of the
    program they are. The gradient of each is summed over the ranks, times `scale`, and every rank gets its rows."""
    found = []
    for shard, total in zip(shards, rows, strict=True):
        each = _each(total, axis)
        padded = shard.new_zeros((each[0], *shard.shape[1:]), dtype=dtype)
        padded[: shard.shape[0]] = shard
        parts = world.current().all_gather(padded, axis).split(each[0])
        found.append(torch.cat([part[:size] for part, size in zip(parts, each)]))
    return found


@meaning(
    lambda grads, most, inputs, scale, n, axis, dtype: [
        grad.new_empty((size, *grad.shape[1:]), dtype=dtype) for grad, size in zip(grads, most)
    ]
)
def scatter_shards(grads: list[Tensor], most: list[int], inputs: list[int], scale: float, n: int, axis: str,
                   dtype: torch.dtype | None) -> list[Tensor]:  # fmt: skip
    """The transpose of `gather_shards`: the sum over the ranks of the gradient of this rank's rows, times `scale`,
    [rows, ..] each -> [own rows, ..] each. most: how many of them the first rank has."""
    here, found = world.current(), []
    for grad in grads:
        total = here.all_reduce(grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous(), axis) * scale
        part = total.split(_each(grad.shape[0], axis))[here.coordinate(axis)]
        found.append(part.to(dtype or grad.dtype, copy=True))
    return found


def _each(rows: int, axis: str) -> list[int]:
    return chunked(rows, [world.current().size(dim) for dim in split_axes(axis)])


def _own(node) -> sympy.Expr:
    """What a rank sends of a bucket: as much as the first one."""
    dtype = argument(node, "dtype")
    return sum((numel(each) * (dtype or value(each).dtype).itemsize for each in argument(node, "shards")), sympy.S.Zero)


def _padded(node) -> sympy.Expr:
    return argument(node, "n") * _own(node)


def _whole(node) -> sympy.Expr:
    return nbytes(argument(node, "grads"))


def _uneven(node) -> sympy.Expr:
    """What arrives of parameters whose rows do not divide: it is put together."""
    rows, n, dtype = (argument(node, name) for name in ("rows", "n", "dtype"))
    return sum((n * numel(each) * (dtype or value(each).dtype).itemsize
                for each, total in zip(argument(node, "shards"), rows) if total % n), sympy.S.Zero)  # fmt: skip


def _cast(node) -> sympy.Expr:
    """What leaves is copied where it is cast; few rows that fill up are not counted."""
    return sympy.S.Zero if argument(node, "dtype") is None else _own(node)


def _check_rows(node) -> str | None:
    shards, rows, inputs, n = (argument(node, name) for name in ("shards", "rows", "inputs", "n"))
    if not len(shards) == len(rows) == len(inputs):
        return f"{len(shards)} parameters, {len(rows)} numbers of rows and {len(inputs)} inputs"
    if len({value(each).dtype for each in shards}) > 1:
        return "its parameters are of several dtypes"
    most = [value(each).shape[0] for each in shards]
    wrong = next((i for i, total in enumerate(rows) if not -(-total // n) <= most[i] <= total), None)
    return None if wrong is None else f"{rows[wrong]} rows over {n} ranks are not parts of up to {most[wrong]}"


_runtime = "moefx.features.fsdp.runtime"
redistribute(
    torch.ops.moefx.gather_shards.default, "V", "R", of="shards", whole=_padded, check=_check_rows,
    stage=Stage.WEIGHTS, at_wait=_uneven, under_way=_cast,
    runtime=f"{_runtime}.gather_shards_start(session, shards, rows, axis=axis, dtype=dtype, region=region)",
)  # fmt: skip
redistribute(
    torch.ops.moefx.scatter_shards.default, "P", "V", of="grads", stage=Stage.SHARDS, workspace=_whole,
    at_wait=lambda node: sympy.S.Zero, under_way=lambda node: _whole(node) - nbytes(node),
    runtime=f"{_runtime}.scatter_shards_start(session, step_state, grads, names=input_names, axis=axis, scale=scale, "
            "dtype=dtype, region=region)",
)  # fmt: skip
