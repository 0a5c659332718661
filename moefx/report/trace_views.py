"""A trace for readers: tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.ir import alike
from moefx.report.step_times import Comparison
from moefx.report.traces import Process, Span, Trace

_MS = 1e3


def summary(trace: Trace, top: int = 12) -> Group:
    """Per process: time, busy time of every track and the hidden share; then the `top` longest tasks, those of
    equal layers together; then where the time of a step goes, predicted beside measured."""
    steps = max((p.num_steps for p in trace.measured), default=0)
    title = f"{len(trace.measured)} ranks, {steps} steps, machine of the prediction: {trace.about.get('machine', '?')}"
    return Group(_tracks_table(trace, title), _tasks_table(trace, top), Comparison.of(trace),
                 Text(str(trace.hidden_share())))  # fmt: skip


def _tracks_table(trace: Trace, title: str) -> Table:
    tracks = list(dict.fromkeys(track for process in trace.processes for track in process.tracks))
    table = Table(title=title, title_justify="left", caption_justify="left",
                  caption="ms per step; busy time of every track; hidden: of the time with an exchange in flight, the "
                  "part in which the rank computes")  # fmt: skip
    table.add_column("process", no_wrap=True)
    for column in ("step", *tracks, "hidden", "clock"):
        table.add_column(column, justify="right")
    for process in trace.processes:
        busy, steps = process.busy(), max(process.num_steps, 1)
        clock = "" if process.rank is None else f"+-{process.clock_error_s * 1e6:.0f} us"
        table.add_row(process.name, _ms(process.run_seconds / steps), *(_ms(busy.get(t, 0.0) / steps) for t in tracks),
                      f"{process.hidden_share():.0%}", clock)  # fmt: skip
    return table


def _tasks_table(trace: Trace, top: int) -> Table:
    measured, predicted = _mean_times(trace.measured), _mean_times([trace.predicted] if trace.predicted else [])
    waited = _mean_times(trace.measured, waits=True)
    spans = {_task(span): span for process in trace.processes for span in process.spans}
    table = Table(title="longest tasks", title_justify="left", caption="ms, mean over ranks, steps and "
                  "layers; waited: how long a rank stood still for it", caption_justify="left")  # fmt: skip
    for column in ("task", "graph", "kind", "track"):
        table.add_column(column, overflow="fold")
    for column in ("measured", "predicted", "ratio", "waited"):
        table.add_column(column, justify="right")
    equal: dict[Any, list[tuple[str, str, str]]] = defaultdict(list)
    seconds = {task: measured.get(task, predicted.get(task, 0.0)) for task in spans}
    for task in sorted(spans, key=lambda task: (-seconds[task], task)):
        equal[_alike(spans[task])].append(task)
    for tasks in sorted(equal.values(), key=lambda tasks: -sum(map(seconds.get, tasks)))[:top]:
        span, mine, expected = spans[tasks[0]], _mean(measured, tasks), _mean(predicted, tasks)
        ratio = "" if not mine or not expected else f"{mine / expected:.2f}"
        names = span.name if len(tasks) == 1 else f"{len(tasks)} like {span.name}"
        table.add_row(names, span.graph, _label([*map(spans.get, tasks)]), span.track, _ms(mine),
                      _ms(expected), ratio, _ms(_mean(waited, tasks)) if span.is_exchange else "")  # fmt: skip
    return table


def _alike(span: Span) -> tuple:
    """What tasks of equal layers have in common."""
    return span.program, span.graph, re.sub(r"_?\d+", "", span.name), span.kind, span.chunk, span.track


def _mean(seconds: Mapping[tuple[str, str, str], float], tasks: Sequence[tuple[str, str, str]]) -> float | None:
    found = [seconds[task] for task in tasks if task in seconds]
    return sum(found) / len(found) if found else None


def _task(span: Span) -> tuple[str, str, str]:
    return span.program, span.graph, span.name


def _mean_times(processes: Sequence[Process], *, waits: bool = False) -> dict[tuple[str, str, str], float]:
    """{task: mean seconds over processes and over the steps in which it ran}"""
    total: dict[tuple[str, str, str], float] = defaultdict(float)
    runs: dict[tuple[str, str, str], set] = defaultdict(set)
    for process in processes:
        for span in process.spans:
            total[_task(span)] += span.waited_s if waits else span.seconds
            runs[_task(span)].add((process.name, span.step))
    return {task: seconds / len(runs[task]) for task, seconds in total.items()}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * _MS:.3f}"


def _label(spans: Sequence[Span]) -> str:
    """Of equal tasks; E[0 to 47].1: chunk 1 of regions 0 to 47."""
    regions = alike.ranges(span.layer for span in spans)
    return f"{spans[0].kind}[{regions}].{spans[0].chunk}" if spans[0].layer >= 0 else spans[0].kind
