"""Parameters of which every rank has some rows: a bucket of them gathered, or the gradients of one summed and cut.

Rank r along the axis has the rows of `layout.chunked`. One message per pair of ranks, whatever the bucket holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.layout import chunked
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session


def gather_shards_start(session: Session, shards: Sequence[Tensor], rows: Sequence[int], *, axis: Axes,
                        region: str) -> Handle[list[Tensor]]:  # fmt: skip
    """[own rows, ..] each, of one dtype -> [rows, ..] each. Every rank sends as much as the first, who has the most; a
    parameter alone whose rows divide is neither copied before nor behind."""
    each = [_rows_of_all(session, total, axis) for total in rows]
    sizes = [most * _width(shard) for (most, *_), shard in zip(each, shards)]
    mine = _flat(shards, sizes)
    make = mine.new_zeros if session.is_fake else mine.new_empty
    gathered = make(session.size(axis) * mine.numel())
    text = f"gather_shards of {region}"
    with session.guard(text, axis):
        work = session.all_gather(gathered, mine, axis, "weights")
    session.record("all_gather", axis, region, (session.size(axis) - 1) * mine.nbytes)

    def finish() -> list[Tensor]:
        parts = gathered.view(session.size(axis), -1).split(sizes, 1)
        return [_joined(part, counts, shard) for part, counts, shard in zip(parts, each, shards)]

    return Handle(session, text, axis, finish, work=work, owned=(mine, gathered))


def _joined(parts: Tensor, counts: list[int], shard: Tensor) -> Tensor:
    """What ranks sent [n, ..] of a parameter, without what fills up."""
    if len({*counts}) == 1:
        return parts.reshape(-1, *shard.shape[1:])
    width = _width(shard)
    return torch.cat([part[: count * width] for part, count in zip(parts, counts)]).view(-1, *shard.shape[1:])


def _flat(shards: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    flat = [shard.reshape(-1) for shard in shards]
    if all(part.numel() == size for part, size in zip(flat, sizes)):
        return flat[0] if len(flat) == 1 else torch.cat(flat)
    out = flat[0].new_zeros(sum(sizes))
    for room, part in zip(out.split(list(sizes)), flat):
        room[: part.numel()] = part
    return out


def scatter_shards_start(session: Session, grads: Sequence[Tensor], *, axis: Axes, region: str,
                         ) -> Handle[list[Tensor]]:  # fmt: skip
    """[rows, ..] each, of one dtype -> the sum over the ranks of this rank's rows, [own rows, ..] each: summed in the
    order of ranks, all in one piece of memory."""
    n, me = session.size(axis), session.index(axis)
    by_rank = list(zip(*(grad.split(_rows_of_all(session, grad.shape[0], axis)) for grad in grads)))
    source = torch.cat([part.reshape(-1) for parts in by_rank for part in parts])
    sent = [sum(part.numel() for part in parts) for parts in by_rank]
    make = source.new_zeros if session.is_fake else source.new_empty
    owned = [source, make(n * sent[me])]
    text = f"scatter_shards of {region}"
    with session.guard(text, axis):
        work = session.all_to_all(owned[1], source, [sent[me]] * n, sent, axis, purpose="shards")
    session.record("reduce_scatter", axis, region, (sum(sent) - sent[me]) * source.element_size())
    shapes = [part.shape for part in by_rank[me]]
    del source

    def finish() -> list[Tensor]:
        del owned[0]  # it has left
        total = owned.pop().view(n, -1).sum(0)
        return [part.view(shape) for part, shape in zip(total.split([shape.numel() for shape in shapes]), shapes)]

    return Handle(session, text, axis, finish, work=work, owned=owned)


def _rows_of_all(session: Session, rows: int, axis: Axes) -> list[int]:
    return chunked(rows, [session.size(dim) for dim in session.view.axes(axis)])


def _width(shard: Tensor) -> int:
    return math.prod(shard.shape[1:])
