"""Time several ways to do the same step beside one another, so that what disturbs one disturbs all.

Separate launches of the same program differ by tens of per cent on a shared machine. Here every round runs every
contestant once, in an order that moves on by one from round to round, in the same processes; only ratios within a round
are compared. A step begins on all ranks at once and counts until the last rank is done.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from cluster import link_bytes

Step = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def measure(steps: Mapping[str, Step], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """{name: seconds of the slowest rank in each round}; equal on all ranks. Every rank gives the same names."""
    names = list(steps)
    for _ in range(warm_up):
        for name in names:
            steps[name]()
    found = torch.zeros(rounds, len(names), dtype=torch.float64)
    for number in range(rounds):
        for place in range(len(names)):
            which = (place + number) % len(names)
            dist.barrier()
            start = time.perf_counter()
            steps[names[which]]()
            found[number, which] = time.perf_counter() - start
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {name: found[:, which].tolist() for which, name in enumerate(names)}


def wire_bytes(step: Step) -> int:
    """Bytes that the node of this rank sends to other nodes of an emulated cluster in a step."""
    dist.barrier()
    before = link_bytes("eth0")
    step()
    dist.barrier()
    return link_bytes("eth0") - before


def ratios(seconds: Mapping[str, Sequence[float]], name: str, baseline: str) -> Spread:
    """Round by round, the time of `name` over that of `baseline`."""
    return Spread.of([a / b for a, b in zip(seconds[name], seconds[baseline])])


def split_half(chosen: str, figures: Mapping[str, Sequence[float]]) -> tuple[str, float, float]:
    """What is lost by a choice that was made without measuring, and by one that was made from half of the measurements.
    figures: of every choice, round by round. Returns (the fastest on odd rounds; what `chosen` takes more than it on
    even rounds, as a share; what it takes more than the fastest on even rounds: chance alone)."""
    odd, even = ({name: statistics.median(found[first::2]) for name, found in figures.items()} for first in (1, 0))
    oracle = min(odd, key=odd.__getitem__)
    return oracle, even[chosen] / even[oracle] - 1, even[oracle] / min(even.values()) - 1


def load() -> str:
    """What else the machine was doing, for the record: the load average includes this benchmark's own ranks."""
    one, five, _ = os.getloadavg()
    return f"{one:.1f} over one minute, {five:.1f} over five, {os.cpu_count()} cores"
