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
    is known that some cannot.
    """
    if session.size(axes) == 1 or session.is_fake:
        return [fact]
    found: list[Any] = [None] * session.size(axes)
    group = session.group(axes, "compile")
    with session.guard(what, axes):
        session.meet(what, axes)
        dist.all_gather_object(found, fact, group=group)
    return found


def check_same_values(session: Session, axes: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    """Check that every rank along `axes` holds the same values, by the sum of their bits; all of them call this.

    Raises DivergenceError on all ranks, with the first tensor that differs, and who has other values than rank 0.
    """
    if session.size(axes) == 1 or session.is_fake:
        return
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors.values()]
    mine = list(zip(tensors, torch.stack(sums).tolist() if sums else ()))
    first, *others = gather(session, axes, mine, "comparing the weights of all ranks")
    for rank, theirs in enumerate(others, 1):
        unlike = [(a, b) for a, b in itertools.zip_longest(first, theirs, fillvalue=("nothing", 0)) if a != b]
        names = [(a, b) for (a, _), (b, _) in unlike if a != b]
        if names:
            ours, found = names[0]
            raise DivergenceError(f"rank {rank} of the mesh has the parameter {found} where rank 0 has {ours}",
                                  hint="give every rank the same model")  # fmt: skip
        if unlike:
            raise DivergenceError(
                f"rank {rank} of the mesh has other values of {unlike[0][0][0]} than rank 0 "
                f"({len(unlike)} of {len(first)} parameters differ)",
                hint="set one seed on all ranks before building the model, or load the same weights everywhere",
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
