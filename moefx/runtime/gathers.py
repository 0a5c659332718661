"""Rows of ranks that read different data, gathered, summed and scattered. `sizes` [n] are the ranks' rows, which a
plan of who has how many for whom says as well."""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.runtime.collectives import all_reduce_start, exchange_rows, resized
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session

Sizes = tuple[int, ...]


def gather_rows_start(session: Session, x: Tensor, sizes: Sizes | RoutePlan, *, dim: int, axis: Axes,
                      region: str = "tokens") -> Handle[Tensor]:  # fmt: skip
    """[.., sizes[r], ..] -> [.., sum(sizes), ..]. Rows past `sizes[r]` stay behind."""
    each = _each(sizes)
    mine = x.movedim(dim, 0)[: each[session.index(axis)]]
    return _moved(session, [mine] * len(each), each, axis, "all_gather", region, lambda rows: rows.movedim(0, dim))


def scatter_rows_start(session: Session, x: Tensor, sizes: Sizes | RoutePlan, *, dim: int, axis: Axes,
                       region: str = "tokens", num_rows: int | None = None) -> Handle[Tensor]:  # fmt: skip
    """[.., sum(sizes), ..] -> the sum over the ranks of this rank's rows, [.., sizes[r], ..]; in the order of ranks.
    num_rows: how many rows come out, zero past those."""
    each = _each(sizes)
    n, own = len(each), each[session.index(axis)]
    total = own if num_rows is None else num_rows
    parts = list(x.movedim(dim, 0).split(each))

    def finish(rows: Tensor) -> Tensor:
        return resized(rows.view(n, own, *rows.shape[1:]).sum(0), own, total).movedim(0, dim)

    return _moved(session, parts, [own] * n, axis, "reduce_scatter", region, finish)


def _each(sizes: Sizes | RoutePlan) -> list[int]:
    return list(sizes.receive_splits if isinstance(sizes, RoutePlan) else sizes)


def _moved(session: Session, parts: list[Tensor], received: list[int], axis: Axes, kind: str, region: str,
           finish) -> Handle[Tensor]:  # fmt: skip
    """What every rank has for every other, by an exchange: ranks have different numbers of rows."""
    source = torch.cat(parts)
    make = source.new_zeros if session.is_fake else source.new_empty
    result = make((sum(received), *source.shape[1:]))
    sent, text = [part.shape[0] for part in parts], f"{kind} of {region}"
    work = exchange_rows(session, result, source, axis, text, splits=(received, sent))
    row_bytes = source.element_size() * source.shape[1:].numel()
    session.record(kind, axis, region, (sum(sent) - sent[session.index(axis)]) * row_bytes)
    return Handle(session, text, axis, lambda: finish(result).contiguous(), work=work, owned=(source, result))


def keep_rows(session: Session, x: Tensor, sizes: Sizes, *, dim: int, axis: Axes) -> Tensor:
    """This rank's rows of those of all: a view."""
    place = session.index(axis)
    return x.narrow(dim, sum(sizes[:place]), sizes[place])


def keep_rows_backward(session: Session, grad: Tensor, sizes: Sizes, *, dim: int, axis: Axes) -> Tensor:
    """The transpose: zeros for the rows of others."""
    out = grad.new_zeros((*grad.shape[:dim], sum(sizes), *grad.shape[dim + 1 :]))
    keep_rows(session, out, sizes, dim=dim, axis=axis).copy_(grad)
    return out


def sum_rows_start(session: Session, rows: Tensor, *, axis: Axes, owned: bool = False) -> Handle[Tensor]:
    """The sum of `rows` over the ranks. They are left alone unless `owned` says that they may be overwritten."""
    return all_reduce_start(session, rows, axes=axis, scale=1, name="rows", owned=owned, purpose="parts")
