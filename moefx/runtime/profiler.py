"""When every task of a program ran on this rank, and how far the clocks of ranks are apart.

A profiled program is a copy of the emitted code that calls a `Run` wherever one task ends and the next one begins
(`moefx.link.instrument`). Times are seconds of this rank's `time.perf_counter()`. On CPU a mark reads that clock. On
CUDA it records an event on the current stream, and the times are those at which the device got there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

ROUNDS = 8  # exchanges per rank to compare clocks: the quickest counts


class Segment(NamedTuple):
    """A stretch of a program in which this rank ran one task.

    what: "compute"; "exchange", from the call that starts a collective to its end; or "wait", in which nothing but that
    collective's end is waited for. An exchange ends when this rank has all that it receives and has sent all it sends,
    as the backend reports it, at the latest when its wait returns.
    """

    what: str
    task: str
    begin_s: float
    end_s: float


class _HostClock:
    """Stamps are seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp


class _DeviceClock:
    """Stamps are events on the current stream."""

    def __init__(self) -> None:
        self._first = self.now()
        torch.cuda.synchronize()
        self._first_s = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        return self._first_s + self._first.elapsed_time(stamp) / 1e3


class _Handle(Protocol):
    def on_done(self, callback: Any) -> bool: ...


class _Step(Protocol):
    program: int
    number: int


class Run:
    """One execution of one graph of a program: `graph` is "forward" or "backward"."""

    def __init__(self, graph: str, program: int, step: int, clock: _HostClock | _DeviceClock) -> None:
        self.graph, self.program, self.step, self._clock = graph, program, step, clock
        self._marks: list[tuple[str, str, Any]] = []
        self._ends: dict[str, Any] = {}  # of exchanges; filled by the backend's threads

    def compute(self, task: str) -> None:
        """What runs until the next mark is this task."""
        self._marks.append(("compute", task, self._clock.now()))

    def exchange(self, task: str) -> None:
        """A collective is about to be started."""
        self._marks.append(("exchange", task, self._clock.now()))

    def under_way(self, task: str, handle: _Handle) -> None:
        """It was started; its end is noted when it comes."""
        handle.on_done(lambda: self._ends.setdefault(task, self._clock.now()))

    def wait(self, task: str) -> None:
        """What runs until the next mark is the wait for this collective."""
        self._marks.append(("wait", task, self._clock.now()))

    def end(self) -> None:
        """The last task has ended."""
        self._marks.append(("end", "", self._clock.now()))

    def segments(self) -> list[Segment]:
        """All that was marked, in the order of the marks; empty for a run that was cut off by an error."""
        if not self._marks or self._marks[-1][0] != "end":
            return []
        times = [self._clock.seconds(stamp) for _, _, stamp in self._marks]
        found = [Segment(what, task, *span) for (what, task, _), span in zip(self._marks, pairwise(times))]
        waited = {segment.task: segment.end_s for segment in found if segment.what == "wait"}
        return [segment._replace(end_s=self._end(segment, waited)) if segment.what == "exchange" else segment
                for segment in found]

    def _end(self, exchange: Segment, waited: dict[str, float]) -> float:
        """The backend may report an end just after the wait has returned."""
        latest = waited.get(exchange.task, exchange.end_s)
        noted = self._ends.get(exchange.task)
        return latest if noted is None else max(exchange.begin_s, min(latest, self._clock.seconds(noted)))


class Profiler:
    """Collects the runs of this rank while it is a session's `profiler`. `runs`: in the order in which they began.
    `loads`: {module: rows per expert [E] in each forward}."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _DeviceClock() if device.type == "cuda" else _HostClock()
        self.runs: list[Run] = []
        self.loads: dict[str, list[list[int]]] = {}

    def begin(self, graph: str, step: _Step) -> Run:
        """A program calls this first; what it returns takes the marks."""
        run = Run(graph, step.program, step.number, self._clock)
        self.runs.append(run)
        return run


@dataclass(frozen=True)
class ClockOffset:
    """This rank's clock minus that of the first rank, in seconds; the truth lies within `error_s` of it."""

    seconds: float = 0.0
    error_s: float = 0.0


def estimate(rounds: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """From (sent, read, received): the first rank's clock when it asked, the other one's when it answered, the first
    one's when the answer came. The quickest round bounds best: the answer lies between its ends (Cristian, Distributed
    Computing 3, 1989)."""
    sent, read, received = min(rounds, key=lambda r: r[2] - r[0])
    return ClockOffset(read - (sent + received) / 2, (received - sent) / 2)


def compare_clocks(
    group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int, device: torch.device
) -> ClockOffset:
    """This rank's offset; all `ranks` (global, of `group`) call it. A rank alone, or without a group, has none."""
    if group is None or len(ranks) == 1:
        return ClockOffset()
    first, box = ranks[0], torch.zeros(2, dtype=torch.float64, device=device)
    if rank != first:
        for _ in range(ROUNDS):
            dist.recv(box, first, group=group)
            box.fill_(time.perf_counter())
            dist.send(box, first, group=group)
        dist.recv(box, first, group=group)
        return ClockOffset(*box.tolist())
    for other in ranks[1:]:
        rounds = []
        for _ in range(ROUNDS):
            sent = time.perf_counter()
            dist.send(box, other, group=group)
            dist.recv(box, other, group=group)
            read = box.tolist()[0]
            rounds.append((sent, read, time.perf_counter()))
        found = estimate(rounds)
        dist.send(torch.tensor([found.seconds, found.error_s], dtype=torch.float64, device=device), other, group=group)
    return ClockOffset()
