"""Where the time of a step goes, predicted beside measured, and what the prediction missed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.costmodel.overlap import Overlap, stretches, together
from moefx.report.traces import Process, Span, Trace, duration

OFF = 0.15  # of the measured time: a prediction that misses by more is said to be off
_MOST = 0.75  # of a difference
IDLE = "idle: no computation, no exchange"
_DISPATCH = "dispatch, combine"
_WORDS = {"E": "experts", "W": "weight gradients", "dense": "dense", "A1": "rows out", "A2": "rows back",
          "AR": "gradients", "exchange_counts": "counts",
          **dict.fromkeys(("C1", "D1", "C2", "D2", "repack", "route"), _DISPATCH)}  # fmt: skip


def words_of(kind: str) -> str:
    """What a task of this kind does."""
    return _WORDS.get(kind, kind.replace("_", " "))


@dataclass(frozen=True)
class StepTimes:
    """A step of one rank, in the mean over steps and ranks: the executions of its programs, without what the user does
    between them. parts: what the seconds went to, each instant once: what is computed; where nothing is, what is waited
    for; where nothing is in flight either, `IDLE`."""

    seconds: float
    parts: Mapping[str, float]
    overlap: Overlap

    @classmethod
    def of(cls, processes: Iterable[Process]) -> StepTimes | None:
        """None: without a span."""
        processes = [process for process in processes if process.spans]
        steps = sum(process.num_steps for process in processes)
        if not steps:
            return None
        parts: dict[str, float] = defaultdict(float)
        for spans in (spans for process in processes for spans in process.executions):
            for name, seconds in _parts(spans).items():
                parts[name] += seconds / steps
        both = together(process.overlap for process in processes)
        seconds = math.fsum(process.run_seconds for process in processes) / steps
        return cls(seconds, dict(parts), Overlap(both.in_flight_s / steps, both.hidden_s / steps))

    def __str__(self) -> str:
        found, (in_flight_s, _) = f"a step takes {_ms(self.seconds)} ms; ", self.overlap
        if not in_flight_s:
            return found + "nothing is exchanged"
        return (f"{found}an exchange is in flight for {_ms(in_flight_s)} ms of it, and computation hides "
                f"{self.overlap.share:.0%} of that")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "parts": dict(self.parts), "in_flight_s": self.overlap.in_flight_s,
                "hidden_share": self.overlap.share}  # fmt: skip


def _parts(spans: list[Span]) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)
    for seconds, computing, exchanging in stretches([(s.start_s, s.end_s, s.track) for s in spans]):
        if computing:
            parts[words_of(spans[computing[0]].kind)] += seconds
        elif exchanging:  # the rank goes on when the first of them has ended
            parts[f"waiting for {words_of(spans[exchanging[0]].kind)}"] += seconds
    parts[IDLE] = max(0.0, duration(spans) - math.fsum(parts.values()))
    return parts


@dataclass(frozen=True)
class Comparison:
    """Of one program, or of all that ran in a profile. machine: whose times were predicted; is_given: by
    `Options(machine=)`, else the nearest preset's, which only orders tasks."""

    predicted: StepTimes | None
    measured: StepTimes | None
    machine: str = ""
    is_given: bool = True

    @classmethod
    def of(cls, trace: Trace) -> Comparison:
        predicted = [trace.predicted] if trace.predicted is not None else []
        return cls(StepTimes.of(predicted), StepTimes.of(trace.measured), trace.about.get("machine", "?"),
                   trace.about.get("machine_given", True))  # fmt: skip

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None where one of them is not known."""
        if self.predicted is None or self.measured is None or not self.measured.seconds:
            return None
        return self.predicted.seconds / self.measured.seconds - 1

    @property
    def differences(self) -> dict[str, float]:
        """Measured less predicted seconds of every part, the largest part of the whole difference first. {} where one
        of them is not known."""
        if self.error is None:
            return {}
        mine, expected = self.measured.parts, self.predicted.parts
        sign = -1 if self.error > 0 else 1
        found = {part: mine.get(part, 0.0) - expected.get(part, 0.0) for part in {**expected, **mine}}
        return dict(sorted(found.items(), key=lambda item: (-sign * item[1], item[0])))

    @property
    def causes(self) -> dict[str, float]:
        """The parts that make up most of the difference, if the prediction was off by more than 15 %."""
        found: dict[str, float] = {}
        if self.error is None or abs(self.error) <= OFF:
            return found
        whole = abs(self.measured.seconds - self.predicted.seconds)
        for part, seconds in self.differences.items():
            found[part] = seconds
            if abs(math.fsum(found.values())) >= _MOST * whole:
                break
        return found

    def __str__(self) -> str:
        """A sentence for each: the step, what is hidden, and what the prediction missed."""
        lines = [f"{name}: {times}" for name, times in (("predicted", self.predicted), ("measured", self.measured))
                 if times is not None]  # fmt: skip
        if self.error is not None and not self.is_given:
            lines.append(f"no machine was named: the prediction is for the preset {self.machine}, and only the order "
                         "of its tasks means something; measure yours with torchrun .. -m moefx calibrate, and name it "
                         "in moefx.compile(.., machine=..)")  # fmt: skip
        elif causes := self.causes:
            missed = _signed(self.measured.seconds - self.predicted.seconds)
            parts = ", ".join(f"{part} {_signed(seconds)} ms" for part, seconds in causes.items())
            lines.append(f"the prediction was off, {abs(self.error):.0%} too {'short' if self.error < 0 else 'long'}; "
                         f"most of the difference of {missed} ms: {parts}")  # fmt: skip
        return "\n".join(lines)

    def __rich__(self) -> Group:
        if self.error is None:
            return Group(Text(str(self)))
        table = Table(title="where the time of a step goes", title_justify="left", caption_justify="left",
                      caption="ms per step, forward and backward, mean over ranks and steps; each instant counts once",
                      )  # fmt: skip
        table.add_column("what the rank does")
        for column in ("predicted", "measured", "difference"):
            table.add_column(column, justify="right")
        for part, seconds in self.differences.items():
            both = (times.parts.get(part, 0.0) for times in (self.predicted, self.measured))
            table.add_row(part, *map(_ms, both), _signed(seconds))
        table.add_section()
        whole = self.predicted.seconds, self.measured.seconds
        table.add_row("step", *map(_ms, whole), _signed(whole[1] - whole[0]))
        return Group(table, Text(str(self)))

    def to_dict(self) -> dict[str, Any]:
        return {"predicted": self.predicted and self.predicted.to_dict(), "machine": self.machine,
                "measured": self.measured and self.measured.to_dict(), "error": self.error,
                "causes": self.causes}  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _signed(seconds: float) -> str:
    return f"{seconds * 1e3:+.3f}"
