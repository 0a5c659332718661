"""Timelines as data: spans of tasks per rank, what they say of hidden communication, and the Chrome trace format.

A `Trace` has a process per rank and one for what was predicted. `save` writes the JSON that Perfetto (ui.perfetto.dev)
and chrome://tracing open: a process per rank, a track per resource, times in microseconds; `load` reads it back.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from moefx.costmodel.overlap import Overlap, overlap, together
from moefx.costmodel.tasks import COMPUTE, COPY, INSIDE
from moefx.errors import MoefxError

FORMAT = "moefx timeline 1"
PREDICTED = "predicted"
TRACKS = (COMPUTE, "comm", "intra", "inter", "counts", "gradient", "host", "d2h", "h2d", COPY)  # from the top
_SCALE = 1e6  # the format's microseconds


@dataclass(frozen=True)
class Span:
    """One task, or, where a graph is in no scheduler's order, one uninterrupted part of it.

    name, kind, track (the resource), chunk and layer are those of `costmodel.tasks.Task`. graph: "forward" or
    "backward" of step number `step` of a program, given by its hash in hex. start_s, end_s: seconds. waited_s: for how
    long of it the rank did nothing but wait for this collective.
    """

    name: str
    kind: str
    track: str
    start_s: float
    end_s: float
    graph: str = "forward"
    step: int = 0
    program: str = ""
    chunk: int = 0
    layer: int = 0
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_exchange(self) -> bool:
        """Whether ranks exchange something, as in `costmodel.overlap`."""
        return self.track not in INSIDE


@dataclass(frozen=True)
class Process:
    """The spans of one rank, or, with rank None, what was predicted for every rank.

    clock_offset_s: this rank's clock minus the first rank's, already taken from the spans; the truth lies within
    clock_error_s.
    """

    name: str
    rank: int | None
    spans: tuple[Span, ...]
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0

    @property
    def tracks(self) -> list[str]:
        """Those with spans, from the top."""
        found = {span.track for span in self.spans}
        return [track for track in TRACKS if track in found] + sorted(found - set(TRACKS))

    @property
    def runs(self) -> dict[tuple[int, str], list[Span]]:
        """{(step, graph): its spans}, by time."""
        runs: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(self.spans, key=lambda s: s.start_s):
            runs.setdefault((span.step, span.graph), []).append(span)
        return runs

    @property
    def num_steps(self) -> int:
        return len({span.step for span in self.spans})

    @property
    def executions(self) -> list[list[Span]]:
        """The spans of every time that the forward or the backward of a program ran, in no order."""
        found: dict[tuple[str, int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.program, span.step, span.graph].append(span)
        return list(found.values())

    @property
    def run_seconds(self) -> float:
        """Sum of the durations of all executions, from the first start to the last end."""
        return math.fsum(map(duration, self.executions))

    def busy(self) -> dict[str, float]:
        """{track: seconds during which it ran something}."""
        return {track: math.fsum(s.seconds for s in self.spans if s.track == track) for track in self.tracks}

    @property
    def overlap(self) -> Overlap:
        return together(overlap((s.start_s, s.end_s, s.track) for s in spans) for spans in self.executions)

    def hidden_share(self) -> float:
        """The part of the time with an exchange in flight in which this rank computes; 1 without exchanges."""
        return self.overlap.share

    def shifted(self, seconds: float) -> Process:
        return replace(self, spans=tuple(moved(self.spans, seconds)))


class HiddenShare(NamedTuple):
    """The part of the time with an exchange in flight in which the rank computes, 1 is all of it: of all measured
    ranks and steps, both times summed, and as predicted. nan: there is none."""

    measured: float
    predicted: float

    def __str__(self) -> str:
        found = f"{self.predicted if math.isnan(self.measured) else self.measured:.0%} of the communication is hidden"
        if math.isnan(self.measured):
            return f"predicted: {found}"
        return found if math.isnan(self.predicted) else f"{found} (predicted: {self.predicted:.0%})"


@dataclass(frozen=True)
class Trace:
    """Timelines on one clock, in seconds. At most one of the processes is a prediction."""

    processes: tuple[Process, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def predicted(self) -> Process | None:
        return next((p for p in self.processes if p.rank is None), None)

    @property
    def measured(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.rank is not None)

    def rank(self, rank: int) -> Process:
        """What was measured on a rank. Raises KeyError."""
        for process in self.measured:
            if process.rank == rank:
                return process
        raise KeyError(f"no rank {rank} in this trace; it has {[p.rank for p in self.measured]}")

    @property
    def typical_step(self) -> int:
        """The step of median duration on the first rank, or the predicted one. Raises MoefxError without a span."""
        steps: dict[int, float] = defaultdict(float)
        for (step, _), spans in (self.measured or self.processes)[0].runs.items() if self.processes else ():
            steps[step] += duration(spans)
        if not steps:
            raise MoefxError("the trace has no spans", hint="profile at least one step")
        return sorted(steps, key=lambda step: (steps[step], step))[len(steps) // 2]

    def of_step(self, step: int) -> Trace:
        """That step alone, in all processes that have it. Raises MoefxError for a step that is in none."""
        found = [replace(process, spans=tuple(span for span in process.spans if span.step == step))
                 for process in self.processes]  # fmt: skip
        if not any(process.spans for process in found):
            there = sorted({span.step for process in self.processes for span in process.spans})
            raise MoefxError(f"the trace has no step {step}", hint=f"one of {', '.join(map(str, there))}")
        return replace(self, processes=tuple(process for process in found if process.spans))

    def hidden_share(self) -> HiddenShare:
        """Of all ranks together; NaN for what this trace does not have."""
        measured = together(process.overlap for process in self.measured).share if self.measured else math.nan
        return HiddenShare(measured, math.nan if self.predicted is None else self.predicted.hidden_share())

    def to_chrome(self) -> dict[str, Any]:
        """The JSON object of the Chrome trace format; the first span starts at 0."""
        zero = min((s.start_s for p in self.processes for s in p.spans), default=0.0)
        events = [event for pid, process in enumerate(self.processes) for event in _events(pid, process, zero)]
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"format": FORMAT, **self.about}}

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(json.dumps(self.to_chrome(), indent=None, separators=(",", ":")))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Raises MoefxError for a file that is no trace of moefx."""
        try:
            return cls.from_chrome(json.loads(Path(path).read_text()))
        except OSError as error:
            raise MoefxError(f"the trace cannot be read: {error.strerror}", where=str(path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MoefxError(
                f"this is not a trace of moefx ({type(error).__name__}: {error})", where=str(path),
                hint="give a file that the save() of moefx.profile(..) or moefx.timeline(..) wrote",
            ) from error

    @classmethod
    def from_chrome(cls, data: Mapping[str, Any]) -> Trace:
        """Raises ValueError, KeyError, TypeError or AttributeError for anything that `to_chrome` did not make."""
        about = dict(data["otherData"])
        if about.pop("format") != FORMAT:
            raise ValueError(f"the format is not '{FORMAT}'")
        heads: dict[int, dict[str, Any]] = {}
        spans: dict[int, list[Span]] = defaultdict(list)
        for event in data["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "process_name":
                heads[event["pid"]] = event["args"]
            elif event["ph"] == "X":
                start = event["ts"] / _SCALE
                spans[event["pid"]].append(
                    Span(name=event["name"], start_s=start, end_s=start + event["dur"] / _SCALE, **event["args"])
                )
        return cls(tuple(Process(spans=tuple(spans[pid]), **head) for pid, head in heads.items()), about)


_HEAD = tuple(f.name for f in fields(Process) if f.name != "spans")
_IN_EVENT = ("name", "start_s", "end_s")  # the other fields of a span are the event's "args"


def _events(pid: int, process: Process, zero: float) -> Iterator[dict[str, Any]]:
    head = {name: getattr(process, name) for name in _HEAD}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": head}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, track in enumerate(process.tracks):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    for span in process.spans:
        yield {
            "ph": "X", "pid": pid, "tid": process.tracks.index(span.track), "name": span.name, "cat": span.kind,
            "ts": (span.start_s - zero) * _SCALE, "dur": span.seconds * _SCALE,
            "args": {key: value for key, value in asdict(span).items() if key not in _IN_EVENT},
        }  # fmt: skip


def duration(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(s.end_s for s in spans) - min(s.start_s for s in spans) if spans else 0.0


def moved(spans: Iterable[Span], seconds: float) -> Iterator[Span]:
    return (replace(s, start_s=s.start_s + seconds, end_s=s.end_s + seconds) for s in spans)


def one_at_a_time(spans: Iterable[Span]) -> list[Span]:
    """The communication of one track, so that its spans are disjoint: what was started while another collective was
    under way counts from when that one ended."""
    found: list[Span] = []
    free = -math.inf
    for span in sorted(spans, key=lambda s: (s.end_s, s.start_s)):
        found.append(replace(span, start_s=min(max(span.start_s, free), span.end_s)))
        free = span.end_s
    return found
