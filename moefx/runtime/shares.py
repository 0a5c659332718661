"""A rank's share of rows that all ranks along an axis have, and the rows of all shares."""

from __future__ import annotations

from torch import Tensor

from moefx.runtime.gathers import scatter_rows_start
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session
from moefx.transport import shares


def num_own_rows(session: Session, x: Tensor, *, dim: int, axis: Axes) -> int:
    """How many rows of a dim this rank takes."""
    return shares.sizes(x.shape[dim], session.size(axis))[session.index(axis)]


def num_chunk_rows(x: Tensor, *, dim: int, chunk: int, chunks: int) -> int:
    """How many rows of a dim a chunk takes."""
    return x.shape[dim] * (chunk + 1) // chunks - x.shape[dim] * chunk // chunks


def own_rows(session: Session, x: Tensor, size: int, *, dim: int, axis: Axes) -> Tensor:
    """This rank's rows of a dim: a view."""
    return x.narrow(dim, shares.start(x.shape[dim], session.size(axis), session.index(axis)), size)


def all_rows_start(session: Session, part: Tensor, total: int, *, dim: int, axis: Axes) -> Handle[Tensor]:
    """The rows of all ranks [.., total, ..], from the share of each. Shares travel in one size, that of the largest."""
    n, text = session.size(axis), "all_gather of rows"
    sizes = shares.sizes(total, n)
    rows = part.movedim(dim, 0)
    largest, row = max(sizes), rows.shape[1:]
    mine = rows.contiguous()
    if mine.shape[0] < largest:
        mine = mine.new_zeros((largest, *row))
        mine[: rows.shape[0]] = rows
    make = mine.new_zeros if session.is_fake else mine.new_empty
    gathered = make((n * largest, *row))
    with session.guard(text, axis):
        work = session.all_gather(gathered.view(-1), mine.view(-1), axis, "rows")
    session.record("all_gather", axis, "rows", (n - 1) * mine.numel() * mine.element_size())

    def finish() -> Tensor:
        found = gathered
        if min(sizes) < largest:
            found = gathered.new_empty((total, *row))
            for place, size in enumerate(sizes):
                start = shares.start(total, n, place)
                found[start : start + size] = gathered[place * largest : place * largest + size]
        return found.movedim(0, dim).contiguous()

    return Handle(session, text, axis, finish, work=work, owned=(mine, gathered))


def sum_own_rows_start(session: Session, x: Tensor, *, dim: int, axis: Axes) -> Handle[Tensor]:
    """The sum over the ranks of this rank's rows: [.., total, ..] -> [.., size, ..]."""
    sizes = shares.sizes(x.shape[dim], session.size(axis))
    return scatter_rows_start(session, x, tuple(sizes), dim=dim, axis=axis)
