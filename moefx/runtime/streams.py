"""What a device does beside the work of its current stream.

Computation is on the current stream. A collective is on the stream of its process group: torch lets that one wait for
the current stream when it begins, and the current stream for it in the wait. Copies are on lanes, streams of the
session's own, by what stands here. Nobody else makes a stream or an edge between two. What a lane or a collective
reads or writes is owned by a handle until the host or the current stream is behind it: only then is its memory used
again, which the current stream does in order.

On CPU there are none of them. `link.recorded` has streams that note who uses which memory behind whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

HOST_READS = "host reads"  # the lane of what the host reads when it is there


class Mark(Protocol):
    """A place on a lane."""

    def is_done(self) -> bool:
        """Whether the lane is behind it, as the host knows from now on."""

    def wait(self, timeout: timedelta = ...) -> object:
        """The current stream waits until the lane is there; the host does not."""

    def synchronize(self) -> None:
        """The host waits until then."""

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back, with the lane as the current stream."""


class Streams(Protocol):
    """The lanes of one session; each does one thing after the other."""

    def begin(self, lane: str, work: Callable[[], object], behind: Mark | None = None) -> Mark:
        """Let a lane do `work`, copies, behind what the current stream has to do so far, and behind a mark."""

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Not initialised, from and to which lanes copy."""


class CudaStreams:
    """Of the current device."""

    def __init__(self) -> None:
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()  # a backward runs in another thread

    def begin(self, lane: str, work: Callable[[], object], behind: Mark | None = None) -> Mark:
        with self._lock:
            stream = self._lanes.get(lane)
            if stream is None:  # the host cannot begin an exchange before it has read its sizes
                stream = self._lanes[lane] = torch.cuda.Stream(priority=-1 if lane == HOST_READS else 0)
        stream.wait_stream(torch.cuda.current_stream())
        if behind is not None:
            stream.wait_event(behind.event)
        with torch.cuda.stream(stream):
            work()
        mark = _CudaMark(stream, torch.cuda.Event())
        mark.event.record(stream)
        return mark

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self.stream, self.event = stream, event

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def on_done(self, callback: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            callback()


class HostCopy:
    """A copy to the host. It owns what is read. The wait polls: a plain synchronize could not be given up on."""

    def __init__(self, streams: Streams, source: Tensor) -> None:
        self._host, self._source = streams.host_memory(source.shape, source.dtype), source
        self._mark = streams.begin(HOST_READS, lambda: self._host.copy_(source, non_blocking=True))

    def is_completed(self) -> bool:
        if self._source is not None and self._mark.is_done():
            self._source = None
        return self._source is None

    @property
    def host(self) -> Tensor:
        """Behind a wait."""
        assert self._source is None, "nobody has waited for what the host reads"
        return self._host

    def on_done(self, callback: Callable[[], object]) -> None:
        """As that of a mark."""
        self._mark.on_done(callback)

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Raises RuntimeError when the device did not get here within `timeout`."""
        start = time.monotonic()
        while not self.is_completed():
            now = time.monotonic()
            if now - start > timeout.total_seconds():
                raise RuntimeError(f"the device did not finish within {timeout.total_seconds():g} s")
            time.sleep(0 if now - start < 1e-3 else 5e-5)
        return True
