"""Small facts that all ranks of a mesh must share before they run a program."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moefx.runtime.session import Session


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
