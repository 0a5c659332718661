"""Rows of several ranks, put together on all of them. In Parm's baseline ranks that have parts of the same experts
gather their tokens first, and every one of them sends all of these (ranks that read the same data gather copies); in S3
they gather what arrived.

Shapes: rank r of n along the axis has sizes[r] rows in a dim, T of them in all. `sizes` is what `exchange_sizes` gives,
or the traffic [n, n*S] along the axis.
Source: Parm, Eq. 1 and Fig. 1 (ESP-AllGather, ESP-AllReduce, ESP-Split).
"""

from __future__ import annotations

from functools import partial

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir import world
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import Stage, Tokens, argument, nbytes, value
from moefx.ir.redistribute import redistribute


@meaning(
    "x [.. dim~ ..], sizes [..~] -> [.. total ..]",
    gradient=lambda grad, x, sizes, total, dim, *how: scatter_rows(grad, sizes, x.shape[dim], dim, *how),
)
def gather_rows(x: Tensor, sizes: Tensor, total: int, dim: int, n: int, axis: str) -> Tensor:
    """The rows of all ranks: [.., sizes[r], ..] -> [.., T, ..]. What flows back is summed."""
    return world.current().all_gather(x.movedim(dim, 0).contiguous(), axis).movedim(0, dim).contiguous()


@meaning("x [.. dim~ ..], sizes [..~] -> [.. size ..]")
def scatter_rows(x: Tensor, sizes: Tensor, size: int, dim: int, n: int, axis: str) -> Tensor:
    """The transpose of `gather_rows`: the sum over the ranks of this rank's rows, [.., T, ..] -> [.., size, ..]."""
    here = world.current()
    return _own(here.all_reduce(x, axis), sizes, dim, here.coordinate(axis)).clone()


@meaning(
    "x [.. dim~ ..], sizes [..~] -> [.. size ..]",
    gradient=lambda grad, x, sizes, total, dim, *how: keep_rows_backward(grad, sizes, x.shape[dim], dim, *how),
)
def keep_rows(x: Tensor, sizes: Tensor, size: int, dim: int, n: int, axis: str) -> Tensor:
    """This rank's rows of those of all: [.., T, ..] -> [.., size, ..]. Every rank has the gradient of its own."""
    return _own(x, sizes, dim, world.current().coordinate(axis)).clone()


@meaning("grad [.. dim~ ..], sizes [..~] -> [.. total ..]")
def keep_rows_backward(grad: Tensor, sizes: Tensor, total: int, dim: int, n: int, axis: str) -> Tensor:
    """The transpose of `keep_rows`: zeros for the rows of others."""
    out = grad.new_zeros((*grad.shape[:dim], total, *grad.shape[dim + 1 :]))
    _own(out, sizes, dim, world.current().coordinate(axis)).copy_(grad)
    return out


@meaning(
    "rows [..], counts [..~] -> [..]",
    gradient=lambda grad, rows, *how: sum_rows(grad, *how),
)
def sum_rows(rows: Tensor, counts: Tensor | None, expert_dim: int, axis: str) -> Tensor:
    """The sum of what ranks with parts of the same experts make of the same rows. Each reads some rows of it, so what
    flows back is summed, too."""
    return world.current().all_reduce(rows, axis)


@meaning(
    "x [.. row_dim~ ..], sizes [..~] -> [.. out_rows ..]",
    gradient=lambda grad, x, sizes, total, dim, *how: scatter_parts(grad, sizes, x.shape[dim], dim, *how),
)
def gather_parts(x: Tensor, sizes: Tensor, out_rows: int, row_dim: int, n: int, axis: str) -> Tensor:
    """The rows that arrived at any of the ranks with parts of the same experts, by rank: [.., sizes[r], ..] ->
    [.., T, ..]. Dropped rows stand at the tail and stay at home."""
    own = _each(sizes)[world.current().coordinate(axis)]
    return gather_rows(x.narrow(row_dim, 0, own), sizes, out_rows, row_dim, n, axis)


@meaning(
    "x [.. row_dim~ ..], sizes [..~] -> [.. out_rows ..]",
    gradient=lambda grad, x, sizes, total, dim, *how: gather_parts(grad, sizes, x.shape[dim], dim, *how),
)
def scatter_parts(x: Tensor, sizes: Tensor, out_rows: int, row_dim: int, n: int, axis: str) -> Tensor:
    """The transpose of `gather_parts`: what these ranks made of this rank's rows, summed, [.., T, ..] ->
    [.., out_rows, ..]; zeros for dropped rows."""
    here = world.current()
    found = _own(here.all_reduce(x, axis), sizes, row_dim, here.coordinate(axis))
    out = sized(x, row_dim, out_rows).zero_()
    out.narrow(row_dim, 0, found.shape[row_dim]).copy_(found)
    return out


def _own(x: Tensor, sizes: Tensor, dim: int, place: int) -> Tensor:
    each = _each(sizes)
    return x.narrow(dim, sum(each[:place]), each[place])


def _each(sizes: Tensor) -> list[int]:
    """[n] of them, or traffic, of which every rank sends all its rows to every other."""
    found = torch.as_tensor(sizes)
    return (found if found.dim() == 1 else found.view(len(found), len(found), -1)[:, 0].sum(1)).tolist()


def _check_sizes(node) -> str | None:
    found, n = value(argument(node, "sizes")), argument(node, "n")
    return None if found.shape[0] == n else f"sizes are those of {found.shape[0]} ranks, not of {n}"


def _of_x(node: Node) -> sympy.Expr:
    return nbytes(argument(node, "x"))


_ops, _runtime = torch.ops.moefx, "moefx.runtime.gathers"
_gather = partial(redistribute, moved=True)
_gather(
    _ops.gather_rows.default, "V", "R", of_user=True, workspace=nbytes,
    runtime=f"{_runtime}.gather_rows_start(session, x, sizes, dim=dim, axis=axis)",
)  # fmt: skip
_gather(
    _ops.scatter_rows.default, "P", "V", of_user=True, workspace=_of_x,
    runtime=f"{_runtime}.scatter_rows_start(session, x, sizes, dim=dim, axis=axis)",
)  # fmt: skip
_gather(
    _ops.keep_rows.default, "R", "V", of_user=True, is_view=lambda call: True,
    runtime=f"{_runtime}.keep_rows(session, x, sizes, dim=dim, axis=axis)",
)  # fmt: skip
_gather(
    _ops.keep_rows_backward.default, "V", "P", of_user=True,
    runtime=f"{_runtime}.keep_rows_backward(session, grad, sizes, dim=dim, axis=axis)",
)  # fmt: skip
_gather(
    _ops.sum_rows.default, "P", "R", stage=Stage.BACK,
    tokens=Tokens({"counts": "slots", "rows": "slot"}, "slot", moves=True, or_blocks=True),
    runtime=f"{_runtime}.sum_rows_start(session, rows, axis=axis, owned=is_owned)",
)  # fmt: skip
_of_parts = partial(_gather, check=_check_sizes, tokens=Tokens({}, rule="gathered", moves=True))
_of_parts(
    _ops.gather_parts.default, "V", "R", stage=Stage.OUT, workspace=nbytes,
    runtime=f"{_runtime}.gather_rows_start(session, x, sizes, dim=row_dim, axis=axis, region=region)",
)  # fmt: skip
_of_parts(
    _ops.scatter_parts.default, "P", "V", stage=Stage.BACK, workspace=_of_x,
    runtime=f"{_runtime}.scatter_rows_start(session, x, sizes, dim=row_dim, axis=axis, region=region, "
            "num_rows=out_rows)",
)  # fmt: skip
