"""Small facts that all ranks of a mesh must share before they run a program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefx.errors import DivergenceError
from moefx.runtime.session import Session

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def gather(session: Session, axes: tuple[str, ...], fact: Any, what: str) -> list[Any]:
    """`fact` of every rank along `axes`, in their order; every one of them calls this.

    Picklable values only. Raises CollectiveError naming the ranks that do not come, and DivergenceError as soon as it
    is known that some cannot, or came for something else.
    """
    if session.size(axes) == 1 or session.is_fake:
        return [fact]
    found: list[Any] = [None] * session.size(axes)
    group = session.group(axes, "compile")
    with session.guard(what, axes):
        session.meet(what, axes)
        dist.all_gather_object(found, (what, fact), group=group)
    if any(other != what for other, _ in found):
        lines = [f"    rank {rank}: {other}" for rank, (other, _) in zip(session.ranks(axes), found)]
        raise DivergenceError(
            "Ranks came together for different things:\n" + "\n".join(lines),
            where=f"rank {session.rank}, {what}",
            hint="make the same calls in the same order on all ranks: training, evaluation, checkpoints",
        )
    return [fact for _, fact in found]


def check_same_values(session: Session, axes: tuple[str, ...], whole: Mapping[str, Tensor],
                      parts: Mapping[str, Tensor] | None = None, *, spread: str | None = None,
                      hint: str | None = None) -> None:  # fmt: skip
    """Check that every rank along `axes` holds the same values of `whole`, and of `parts` those of the first rank with
    its place on the axis `spread`, by the sum of their bits; all of them call this.

    hint: what to do where they differ, if that is not how the weights were first set. Raises DivergenceError on all
    ranks, with the first tensor that differs, and who has other values than whom.
    """
    if session.size(axes) == 1 or session.is_fake:
        return
    tensors = {**whole, **(parts or {})}
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors.values()]
    mine = list(zip(tensors, torch.stack(sums).tolist() if sums else ()))
    place = 0 if spread is None else session.index(spread)
    fact = place, mine[: len(whole)], mine[len(whole) :]
    found = gather(session, axes, fact, "comparing the weights of all ranks")
    firsts: dict[int, int] = {}
    for rank, (place, ours, own) in enumerate(found):
        _compare(ours, found[0][1], rank, 0, hint)
        first = firsts.setdefault(place, rank)
        _compare(own, found[first][2], rank, first, hint)


def _compare(theirs: list[tuple[str, int]], first: list[tuple[str, int]], rank: int, who: int,
             hint: str | None) -> None:  # fmt: skip
    unlike = [(a, b) for a, b in itertools.zip_longest(first, theirs, fillvalue=("nothing", 0)) if a != b]
    names = [(a, b) for (a, _), (b, _) in unlike if a != b]
    if names:
        ours, found = names[0]
        raise DivergenceError(f"rank {rank} of the mesh has the parameter {found} where rank {who} has {ours}",
                              hint="give every rank the same model")  # fmt: skip
    if unlike:
        raise DivergenceError(
            f"rank {rank} of the mesh has different values of {unlike[0][0][0]} than rank {who} "
            f"({len(unlike)} of {len(first)} tensors differ)",
            hint=hint or "set one seed on all ranks before building the model, or load the same weights everywhere",
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
