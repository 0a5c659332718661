"""In which order ranks begin collectives, and whether that order could hold them up for good.

NCCL runs what a rank begins in one group in order, and what it begins in several groups at once only while the device
has room for all of it. So ranks must get through even if each collective waits for the end of the one before it,
whatever groups the two are of. Every collective begins at a place of the program that all its ranks share: those places
are an order of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Axes = str | tuple[str, ...]  # "dp+ep" or ("dp", "ep")


class Begun(NamedTuple):
    """A collective as one rank begins it: what it is, between which global ranks, and the purpose of their group."""

    kind: str
    ranks: tuple[int, ...]
    purpose: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.purpose}) of ranks {', '.join(map(str, self.ranks))}"


def deadlock(begun: Mapping[int, Sequence[Begun]]) -> str | None:
    """Who waits for what for good, where each rank begins these collectives one behind the end of the other; None if
    all get through. begun: by global rank, of all ranks that take part."""
    at = dict.fromkeys(begun, 0)
    while heads := {rank: each[at[rank]] for rank, each in begun.items() if at[rank] < len(each)}:
        ready = {head for head in heads.values() if all(heads.get(rank) == head for rank in head.ranks)}
        if not ready:
            lines = [f"    rank {rank}: its collective {at[rank]}, {head}" for rank, head in heads.items()]
            return "\n".join(["ranks begin collectives in orders that do not fit together:", *lines])
        for rank, head in heads.items():
            at[rank] += head in ready
    return None
