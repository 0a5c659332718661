"""Headers that every counts exchange carries, so that ranks which diverge learn it at their first exchange.

A header is (program hash, step number, region number, whether gradients are kept back), int64. On CUDA the received
headers travel to the host on the side and are compared at the next host read, since comparing them at once would be a
synchronisation of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.errors import DivergenceError

LENGTH = 4
_MAX_LINES = 16


class HeaderBook:
    """Received headers that wait to be compared."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, Tensor, int, Sequence[int], str]] = deque()

    def receive(self, headers: Tensor, mine: int, ranks: Sequence[int], region: str) -> None:
        """headers [n, LENGTH] int64 of the global `ranks`, this rank's at `mine`. On CPU raises DivergenceError now."""
        if headers.device.type == "cpu":
            compare(headers.tolist(), mine, ranks, region)
            return
        host = torch.empty(headers.shape, dtype=headers.dtype, pin_memory=True)
        host.copy_(headers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((arrived, host, mine, ranks, region))

    def check_arrived(self) -> None:
        """Compare what has reached the host, without waiting. Raises DivergenceError."""
        while self._pending and self._pending[0][0].query():
            _, host, mine, ranks, region = self._pending.popleft()
            compare(host.tolist(), mine, ranks, region)


def compare(headers: list[list[int]], mine: int, ranks: Sequence[int], region: str) -> None:
    """Raises DivergenceError naming this rank and those whose header differs from its own."""
    own = headers[mine]
    if all(header == own for header in headers):
        return
    lines = []
    for rank, header in zip(ranks, headers, strict=True):
        if header != own or rank == ranks[mine]:
            program, number, place, keeps = header
            where = "" if place == own[2] else ", in another region"
            where += ", in no_sync()" if keeps else ""
            lines.append(f"    rank {rank}: program {program & (2**64 - 1):016x}, step {number}{where}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"    and {len(lines) - _MAX_LINES} more ranks"]
    raise DivergenceError(
        "Ranks do not run the same program, step and region:\n" + "\n".join(lines),
        where=f"rank {ranks[mine]}, step {own[1]}, {region or 'start of the step'}",
        hint="all ranks must compile the same model and options and call it equally often, in the same order "
        "and with no_sync() around the same calls",
    )
