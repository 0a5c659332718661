"""Time that adds up over spans of a program: of the host, or on CUDA of the device's current stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Clock = Callable[[], int]


class Stopwatch:
    """clock: nanoseconds of the host."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter_ns) -> None:
        self._device, self._clock = device, clock
        self._ns = 0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """What runs inside counts."""
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._spans.append((start, end))
        else:
            start_ns = self._clock()
            yield
            self._ns += self._clock() - start_ns

    @property
    def is_done(self) -> bool:
        """Whether the device is behind all spans."""
        return all(end.query() for _, end in self._spans)

    def nanoseconds(self) -> int:
        """Of all spans; waits for the device where it is not done."""
        for _, end in self._spans:
            end.synchronize()
        return self._ns + sum(int(1e6 * start.elapsed_time(end)) for start, end in self._spans)
