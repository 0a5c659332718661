"""The steps of an all-to-all that is more than one exchange, and the rows of static blocks.

A `RoutePlan` says how many rows every rank has for every other; which of them a step moves, and where to, follows from
the algorithm alone (`moefx.transport.algorithms`). n ranks on the axis, m of them per node, R rows held by this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moefx.runtime.collectives import exchange_rows, resized
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session
from moefx.transport import blocks
from moefx.transport.algorithms import Transport, all_to_all_named, transport


def phase_rows(plan: RoutePlan, *, m: int, algorithm: str, step: str, reverse: bool) -> int:
    """R after the step."""
    return _transport(plan, m, algorithm).num_rows(step, plan.between(reverse=reverse))


def exchange_phase_start(
    session: Session,
    rows: Tensor,
    plan: RoutePlan,
    *,
    axis: Axes,
    m: int,
    algorithm: str,
    step: str,
    region: str,
    reverse: bool,
    num_rows: int,
) -> Handle[Tensor]:
    """One exchange of the algorithm, on the process group of its ranks: rows [R, ...] by receiver -> [num_rows, ...] by
    sender, zero behind what arrives. Where nobody of the group has rows for another, nothing is communicated."""
    here, pairs = _transport(plan, m, algorithm), plan.between(reverse=reverse)
    sent, received = here.splits(step, pairs)
    total = sum(received)
    assert num_rows >= total, f"{num_rows} rows cannot hold {total}"
    text = f"{algorithm} all_to_all{' back' if reverse else ''} of {region}, {step}"
    if here.is_idle(step, pairs):
        return Handle(session, text, axis, lambda: resized(rows, total, num_rows))
    source = rows[: sum(sent)].contiguous()
    make = rows.new_zeros if session.is_fake else rows.new_empty
    result = make((num_rows, *rows.shape[1:]))
    result[total:].zero_()
    over = all_to_all_named(algorithm).step(step).over
    part = None if over == "all" else (over, m)
    work = exchange_rows(session, result[:total], source, axis, text, splits=(received, sent), part=part)
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    own = sent[here.peers(step).index(plan.rank)]
    kind = "all_to_all" if over == "all" else f"all_to_all_{over}"
    session.record(kind, axis, region, (sum(sent) - own) * row_bytes)
    return Handle(session, text, axis, lambda: result, work=work, owned=(source, result))


def repack(
    rows: Sequence[Tensor], plan: RoutePlan, *, m: int, algorithm: str, step: str, reverse: bool, num_rows: int
) -> Tensor:
    """One local step: the blocks of the inputs [R, ...], joined and sorted -> [num_rows, ...], zero behind them. No
    copy where the result is a part of one input."""
    segments = _transport(plan, m, algorithm).segments(step, plan.between(reverse=reverse))
    pieces = [rows[which][start : start + length] for which, start, length in segments]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else rows[0][:0]
    return resized(found, found.shape[0], num_rows)


def block_plan(
    session: Session,
    sizes: tuple[int, ...],
    shape: Sequence[int],
    *,
    axis: Axes,
    expert_dim: int,
    row_dim: int,
    reverse: bool,
) -> RoutePlan:
    """The plan of static blocks of `shape` that are about to go out, or back if `reverse`: a rank of capacity C sends C
    times as many rows to every rank of the axis."""
    n, me = session.size(axis), session.index(axis)
    unit, _ = blocks.row_shape(shape, expert_dim, row_dim, n, reverse=reverse)
    rows = tuple(size * unit for size in sizes)
    pairs = np.repeat(np.asarray(rows, dtype=np.int64)[:, None], n, axis=1)
    return RoutePlan(me, (rows[me],) * n, tuple((size,) for size in rows), pairs)


def pack_blocks(x: Tensor, sizes: tuple[int, ...], *, expert_dim: int, row_dim: int, reverse: bool) -> Tensor:
    """Static blocks -> rows [R, width] by target rank."""
    return blocks.pack(x, sizes, expert_dim, row_dim, len(sizes), reverse=reverse)


def unpack_blocks(
    session: Session,
    rows: Tensor,
    sizes: tuple[int, ...],
    shape: Sequence[int],
    *,
    axis: Axes,
    expert_dim: int,
    row_dim: int,
    reverse: bool,
) -> Tensor:
    """Rows [R, width] by source rank -> static blocks of `shape`."""
    return blocks.unpack(rows, shape, sizes, expert_dim, row_dim, reverse=reverse, rank=session.index(axis))


def _transport(plan: RoutePlan, m: int, algorithm: str) -> Transport:
    return transport(algorithm, len(plan.send_rows), m, plan.rank)
