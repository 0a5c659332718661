"""Parameters of which every rank has some rows: a bucket of them gathered, or the gradients of one summed and cut.

Rank r along the axis has the rows of `layout.chunked`. One message per pair of ranks, whatever the bucket holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.layout import chunked
from moefx.runtime.gradients import told_apart
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session


def gather_shards_start(session: Session, shards: Sequence[Tensor], rows: Sequence[int], *, axis: Axes, region: str,
                        dtype: torch.dtype | None = None) -> Handle[list[Tensor]]:  # fmt: skip
    """[own rows, ..] each, of one dtype -> [rows, ..] each, as `dtype` if given. Every rank sends as much as the first,
    who has the most; where rows divide, nothing is copied, neither before nor behind."""
    each = [_rows_of_all(session, total, axis) for total in rows]
    mine = [_filled_up(shard.to(dtype or shard.dtype), most) for shard, (most, *_) in zip(shards, each)]
    make = torch.zeros if session.is_fake else torch.empty
    gathered = [make((session.size(axis) * part.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device)
                for part in mine]  # fmt: skip
    text = f"gather_shards of {region}"
    with session.guard(text, axis):
        work = session.all_gather_several(gathered, mine, axis, "weights")
    session.record("all_gather", axis, region, (session.size(axis) - 1) * sum(part.nbytes for part in mine))
    return Handle(session, text, axis, lambda: [*map(_joined, gathered, each)], work=work, owned=mine)


def _filled_up(shard: Tensor, most: int) -> Tensor:
    if shard.shape[0] == most:
        return shard.contiguous()
    return torch.cat([shard, shard.new_zeros((most - shard.shape[0], *shard.shape[1:]))])


def _joined(gathered: Tensor, counts: list[int]) -> Tensor:
    """What ranks sent, without what fills up."""
    if len({*counts}) == 1:
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.chunk(len(counts)), counts)])


def scatter_shards_start(session: Session, step, grads: Sequence[Tensor], *, names: Sequence[str], axis: Axes,
                         scale: float, region: str, dtype: torch.dtype | None = None,
                         ) -> Handle[dict[str, Tensor | None]]:  # fmt: skip
    """[rows, ..] each, of one dtype -> by name, the sum over the ranks of this rank's rows times `scale`, [own rows,
    ..] each, as `dtype` if given: added in the order of ranks, in single precision at least, in one piece of memory.

    In an unsynchronised step these are put aside under `names` and the handle gives None; the next one adds them."""
    n, me = session.size(axis), session.index(axis)
    by_rank = [*zip(*(grad.split(_rows_of_all(session, grad.shape[0], axis)) for grad in grads))]
    held = [torch.cat([part.reshape(-1) for parts in by_rank for part in parts])]
    sent, shapes = [sum(part.numel() for part in parts) for parts in by_rank], [part.shape for part in by_rank[me]]
    held.append((held[0].new_zeros if session.is_fake else held[0].new_empty)(n * sent[me]))
    text = f"scatter_shards of {region}"
    with session.guard(text, axis):
        work = session.all_to_all(held[1], held[0], [sent[me]] * n, sent, axis, purpose="shards")
    session.record("reduce_scatter", axis, region, (sum(sent) - sent[me]) * held[0].element_size())
    exact, dtype = torch.promote_types(grads[0].dtype, torch.float32), dtype or grads[0].dtype

    def finish() -> dict[str, Tensor | None]:
        received = held.pop()
        held.clear()  # what was sent has left
        total = received.view(n, -1).sum(0, dtype=exact).mul_(scale).to(dtype)
        parts = [part.view(shape) for part, shape in zip(total.split([*map(math.prod, shapes)]), shapes)]
        return {key: step.buffers.kept_back(name, part, step.synchronise)
                for key, name, part in zip(told_apart(names), names, parts)}

    return Handle(session, text, axis, finish, work=work, owned=held)


def _rows_of_all(session: Session, rows: int, axis: Axes) -> list[int]:
    return chunked(rows, [session.size(dim) for dim in session.view.axes(axis)])
