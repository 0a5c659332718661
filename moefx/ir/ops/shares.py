"""Shares of rows: of what all ranks along `mp` have, every rank takes some rows to the experts, and gets all results.

Shapes: T rows in a dim, n ranks along the axis; rank r has rows r*T//n to (r+1)*T//n, so shares differ by one at most.
Source: the token split and AllGather of Parm's dedicated schedules (section 3.2). `sum_own_rows` and `vary_rows` are
the two halves of tensor parallelism whose rows stay cut: Megatron-LM's sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

from functools import partial

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir import world
from moefx.ir.level import Level
from moefx.ir.meaning import fresh_size, meaning
from moefx.ir.op import argument, define, free, nbytes
from moefx.ir.redistribute import redistribute
from moefx.transport import shares


@meaning(fresh_size)
def num_own_rows(x: Tensor, dim: int, n: int, axis: str) -> int:
    """How many rows of x this rank takes: a fresh unbacked size of the graph."""
    here = world.current()
    return shares.sizes(x.shape[dim], here.size(axis))[here.coordinate(axis)]


@meaning(fresh_size)
def num_chunk_rows(x: Tensor, dim: int, chunk: int, chunks: int) -> int:
    """How many rows of x a chunk takes: a fresh unbacked size of the graph. A program must not be one for chunks of a
    single row, or of none, because that is what the first call had."""
    return x.shape[dim] * (chunk + 1) // chunks - x.shape[dim] * chunk // chunks


@meaning(
    "x [.. dim~ ..] -> [.. size ..]",
    gradient=lambda grad, x, size, dim, *how: all_rows(grad, x.shape[dim], dim, *how),
)
def own_rows(x: Tensor, size: int, dim: int, n: int, axis: str, apart: bool = False) -> Tensor:
    """This rank's `size` rows of what all ranks have: [.., T, ..] -> [.., size, ..]. Every rank has the whole gradient
    of x: all get the parts of all. apart: the rows are a batch of their own, and ops may mix them."""
    here = world.current()
    return x.narrow(dim, shares.start(x.shape[dim], here.size(axis), here.coordinate(axis)), size).clone()


@meaning(
    "part [.. dim~ ..] -> [.. total ..]",
    gradient=lambda grad, x, size, dim, *how: own_rows(grad, x.shape[dim], dim, *how),
)
def all_rows(part: Tensor, total: int, dim: int, n: int, axis: str, apart: bool = False) -> Tensor:
    """The rows of all ranks, from the share of each: [.., size, ..] -> [.., total, ..]. All read them alike: the
    gradient of a rank's share is its part of the whole one."""
    found = world.current().all_gather(part.movedim(dim, 0).contiguous(), axis)
    assert found.shape[0] == total, f"the shares of {n} ranks are {found.shape[0]} rows, not {total}"
    return found.movedim(0, dim).contiguous()


@meaning(
    "x [.. dim~ ..] -> [.. size ..]",
    gradient=lambda grad, x, size, dim, *how: all_rows(grad, x.shape[dim], dim, *how),
)
def sum_own_rows(x: Tensor, size: int, dim: int, n: int, axis: str) -> Tensor:
    """The sum over the ranks of this rank's rows: [.., T, ..] -> [.., size, ..]. `own_rows` of what `sum_parts` gives,
    for half of its bytes."""
    here = world.current()
    total = here.all_reduce(x, axis)
    return total.narrow(dim, shares.start(x.shape[dim], here.size(axis), here.coordinate(axis)), size).clone()


@meaning(
    "part [.. dim~ ..] -> [.. total ..]",
    gradient=lambda grad, x, size, dim, *how: sum_own_rows(grad, x.shape[dim], dim, *how),
)
def vary_rows(part: Tensor, total: int, dim: int, n: int, axis: str) -> Tensor:
    """`all_rows` for readers of which every rank has other ones: the gradient of a rank's share is the sum over the
    ranks of what flows back to it."""
    return all_rows._init_fn(part, total, dim, n, axis)


def _in_order(node: Node) -> sympy.Expr:
    """Rows are gathered along the first dim."""
    return nbytes(node) if argument(node, "dim") else sympy.S.Zero


_ops, _runtime = torch.ops.moefx, "moefx.runtime.shares"
_share = partial(define, of_user=True)  # what the model computes, of some of its rows
_share(
    _ops.num_own_rows.default, volume=free, again=False, drawn="routing",
    runtime=f"{_runtime}.num_own_rows(session, x, dim=dim, axis=axis)",
)  # fmt: skip
_share(
    _ops.num_chunk_rows.default, volume=free, again=False, drawn="routing",
    runtime=f"{_runtime}.num_chunk_rows(x, dim=dim, chunk=chunk, chunks=chunks)",
)  # fmt: skip
_move = partial(redistribute, of_user=True)
_move(
    _ops.own_rows.default, "I", "V", dim="dim", drawn="routing", is_view=lambda call: True,
    runtime=f"{_runtime}.own_rows(session, x, size, dim=dim, axis=axis)",
)  # fmt: skip
_move(
    _ops.all_rows.default, "V", "I", workspace=_in_order, levels=frozenset({Level.MOE, Level.PLACED}),
    runtime=f"{_runtime}.all_rows_start(session, part, total, dim=dim, axis=axis)",
)  # fmt: skip
_move(
    _ops.sum_own_rows.default, "P", "V", dim="dim", workspace=lambda node: nbytes(argument(node, "x")),
    runtime=f"{_runtime}.sum_own_rows_start(session, x, dim=dim, axis=axis)",
)  # fmt: skip
_move(
    _ops.vary_rows.default, "V", "R", workspace=_in_order,
    runtime=f"{_runtime}.all_rows_start(session, part, total, dim=dim, axis=axis)",
)  # fmt: skip
