"""Headers that every counts exchange carries, so that ranks which diverge learn it at their first exchange.

A header is (program hash, step number, region number, whether gradients are kept back, digest of the tables that say
where experts are), int64. On CUDA the received headers travel to the host on the side and are compared at the next host
read, since comparing them at once would be a synchronisation of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from moefx.errors import DivergenceError
from moefx.runtime.streams import HostCopy, Streams

LENGTH = 5
_MAX_LINES = 16


def fill(words: Tensor, numbers: Sequence[int]) -> None:
    """Write numbers into the first words of a message [.., int64] on the device. By kernels: a tensor made on the host
    would be a copy that CUDA may wait for."""
    for place, number in enumerate(numbers):
        words[place] = number


class HeaderBook:
    """Received headers that wait to be compared."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._pending: deque[tuple[HostCopy, Callable[[list[list[int]]], None]]] = deque()

    def receive(self, headers: Tensor, check: Callable[[list[list[int]]], None]) -> None:
        """headers [n, ..] int64 of n ranks, for `check`, which raises DivergenceError; on CPU it does so now."""
        if self._streams is None:
            check(headers.tolist())
        else:
            self._pending.append((HostCopy(self._streams, headers), check))

    def check_arrived(self) -> None:
        """Compare what has reached the host, without waiting. Raises DivergenceError."""
        while self._pending and self._pending[0][0].is_completed():
            copy, check = self._pending.popleft()
            check(copy.host.tolist())


def compare_data(numbers: list[list[int]], mine: int, ranks: Sequence[int]) -> None:
    """Of ranks along `mp`: sums over the inputs of a call, and over the state of the generator, if it draws numbers.
    Raises DivergenceError naming ranks that differ."""
    for place, what in enumerate(("read different data", "draw different random numbers")):
        other = next((r for r, each in zip(ranks, numbers) if each[place] != numbers[mine][place]), None)
        if other is not None:
            raise DivergenceError(
                f"ranks {min(other, ranks[mine])} and {max(other, ranks[mine])} along 'mp' {what}",
                where=f"rank {ranks[mine]}, start of the step",
                hint=("give all ranks along mp one batch: compiled.data_mesh says which of the batches a rank reads",
                      "set one seed on all ranks along mp")[place],
            )  # fmt: skip


def compare(headers: list[list[int]], mine: int, ranks: Sequence[int], region: str) -> None:
    """Raises DivergenceError naming this rank and those whose header differs from its own."""
    own = headers[mine]
    if all(header == own for header in headers):
        return
    lines = []
    for rank, header in zip(ranks, headers, strict=True):
        if header != own or rank == ranks[mine]:
            program, number, place, keeps, tables = header
            other = ", in another region" if region != "the backward" else ", of other outputs or in another place"
            where = "" if place == own[2] else other
            where += ", in no_sync()" if keeps else ""
            is_near = (number, place) == (own[1], own[2])  # else tables may differ, or be of a backward, which has none
            where += ", with another placement of experts" if is_near and tables != own[4] else ""
            lines.append(f"    rank {rank}: program {program & (2**64 - 1):016x}, step {number}{where}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"    and {len(lines) - _MAX_LINES} more ranks"]
    raise DivergenceError(
        "Ranks do not run the same program, step and region:\n" + "\n".join(lines),
        where=f"rank {ranks[mine]}, step {own[1]}, {region or 'start of the step'}",
        hint="all ranks must compile the same model and options and call it equally often, in the same order "
        "and with no_sync() around the same calls",
    )
