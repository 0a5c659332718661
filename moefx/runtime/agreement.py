"""Small facts that all ranks of a mesh must share before they run a program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefx import progress
from moefx.errors import DivergenceError
from moefx.layout import Layout
from moefx.runtime.session import Session

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def gather(session: Session, axes: tuple[str, ...], fact: Any, what: str, why: str = "") -> list[Any]:
    """`fact` of every rank along `axes`, in their order; every one of them calls this. why: for whoever reads what this
    rank did; ranks may come for different reasons.

    Picklable values only. Raises CollectiveError naming the ranks that do not come, and DivergenceError as soon as it
    is known that some cannot, or came for something else.
    """
    if session.size(axes) == 1 or session.is_fake:
        return [fact]
    progress.step(what)
    found: list[Any] = [None] * session.size(axes)
    group = session.group(axes, "compile")
    with session.guard(what + why, axes):
        session.meet(what + why, axes)
        dist.all_gather_object(found, (what, fact), group=group)
    if any(other != what for other, _ in found):
        lines = [f"    rank {rank}: {other}" for rank, (other, _) in zip(session.ranks(axes), found)]
        raise DivergenceError(
            "Ranks came together for different things:\n" + "\n".join(lines),
            where=f"rank {session.rank}, {what}",
            hint="make the same calls in the same order on all ranks: training, evaluation, checkpoints",
        )
    return [fact for _, fact in found]


def check_same_values(session: Session, axes: tuple[str, ...], held: Mapping[str, Tensor],
                      layouts: Mapping[str, Layout] | None = None, *, hint: str | None = None) -> None:  # fmt: skip
    """Check that all ranks along `axes` hold the same values, of a tensor with one of the `layouts` those that share a
    part of it, by the sum of their bits; all of them call this.

    hint: what to do where they differ, if that is not how the weights were first set. Raises DivergenceError on all
    ranks, with the first tensor that differs, and who has other values than whom.
    """
    if session.size(axes) == 1 or session.is_fake:
        return
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in held.values()]
    totals = torch.stack(sums).tolist() if sums else []
    place = dict(zip(session.view.names, session.view.coordinates))
    parts = [_part((layouts or {}).get(name, Layout()), place) for name in held]
    found = gather(session, axes, list(zip(held, parts, totals)), "comparing the weights of all ranks")
    firsts: dict[tuple[str, Any], tuple[int, int]] = {}  # who has a part first, and its sum
    for rank, theirs in enumerate(found):
        _compare_names([name for name, *_ in theirs], [name for name, *_ in found[0]], rank)
        sharers = [(name, total, *firsts.setdefault((name, part), (rank, total))) for name, part, total in theirs]
        unlike = [(name, first) for name, total, first, wanted in sharers if total != wanted]
        if unlike:
            raise DivergenceError(
                f"rank {rank} of the mesh has different values of {unlike[0][0]} than rank {unlike[0][1]} "
                f"({len(unlike)} of {len(theirs)} tensors differ)",
                hint=hint or "set one seed on all ranks before building the model, or load the same weights everywhere",
            )


def _part(layout: Layout, place: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Which part of a tensor is at a place: the same where copies of it are."""
    same = layout.sharers(place)
    return tuple((dim, here) for dim, here in place.items() if dim not in same)


def _compare_names(theirs: list[str], first: list[str], rank: int) -> None:
    for ours, found in itertools.zip_longest(first, theirs, fillvalue="nothing"):
        if ours != found:
            raise DivergenceError(f"rank {rank} of the mesh has the parameter {found} where rank 0 has {ours}",
                                  hint="give every rank the same model")  # fmt: skip


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
