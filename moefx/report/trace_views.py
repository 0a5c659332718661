"""A trace for readers: tables, and a still picture of one step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.costmodel.tasks import COMPUTE
from moefx.errors import MoefxError
from moefx.ir import alike
from moefx.report.step_times import Comparison, words_of
from moefx.report.svg import legend, text, ticks, write
from moefx.report.traces import Process, Span, Trace, duration

_MS = 1e3

# Fill by the kind of task; ScheMoE's names, see costmodel.tasks.Task.
_COLORS = {
    "E": "#3a6ea5", "W": "#7d9fc7", "C1": "#9ec59f", "D1": "#9ec59f", "C2": "#9ec59f", "D2": "#9ec59f",
    "repack": "#9ec59f", "route": "#cfe3cf", "dense": "#c3c9d1", "A1": "#e8833a", "A2": "#f2b27d", "AR": "#b58bc2",
}  # fmt: skip
_OTHER = "#d9a441"  # counts and what goes to the host
_LEGEND = ("E", "W", "C1", "dense", "A1", "A2", "AR")
_TRACKS = {"compute": "computation", "comm": "exchange of rows", "intra": "within nodes", "inter": "between nodes",
           "counts": "exchange of counts", "gradient": "gradients", "host": "read by the host",
           "d2h": "copy to the host", "h2d": "copy to the device"}  # fmt: skip
_WIDTH, _LEFT, _ROW, _GAP, _MARGIN = 1100, 190, 20, 10, 20


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


def typical_step(trace: Trace) -> int:
    """The step of median duration on the first rank, or the predicted one."""
    processes = trace.measured or trace.processes
    steps: dict[int, float] = defaultdict(float)
    for (step, _), spans in processes[0].runs.items() if processes else ():
        steps[step] += duration(spans)
    if not steps:
        raise MoefxError("the trace has no spans", hint="profile at least one step")
    return sorted(steps, key=lambda step: (steps[step], step))[len(steps) // 2]


def draw(trace: Trace, path: str | Path, *, step: int | None = None, title: str = "") -> Path:
    """Write an SVG picture of one step (None: a typical one): predicted above, every rank below, on one scale.

    Forward and backward begin at the left each, on every process for itself. Raises MoefxError for a step that the
    trace does not have.
    """
    number = typical_step(trace) if step is None else step
    blocks = [
        (f"{graph}, {process.name}", replace(process, spans=tuple(spans)))
        for graph in ("forward", "backward")
        for process in trace.processes
        if (spans := process.runs.get((number, graph)))
    ]
    if not blocks:
        steps = sorted({s for p in trace.processes for s, _ in p.runs})
        raise MoefxError(f"the trace has no step {number}", hint=f"one of {', '.join(map(str, steps))}")
    longest = max(duration(process.spans) for _, process in blocks)
    scale = (_WIDTH - _LEFT - _MARGIN) / (longest or 1.0)
    parts, y = _head(title), 64
    for name, process in blocks:
        drawn, y = _block(name, process, scale, y)
        parts += drawn
    parts += _axis(longest, scale, y)
    return write(path, _WIDTH, y + 40, parts)


def _head(title: str) -> list[str]:
    fills = [*((words_of(kind), _COLORS[kind]) for kind in _LEGEND), ("counts and other", _OTHER)]
    named = [text(_MARGIN, 24, title, 'font-size="15" font-weight="bold"')] if title else []
    return [*named, *legend(_LEFT, 36, fills)]


def _block(name: str, process: Process, scale: float, y: int) -> tuple[list[str], int]:
    """One run of one process: a row per track. Returns the y below it."""
    zero, hides = min(span.start_s for span in process.spans), any(span.is_exchange for span in process.spans)
    said = f"{name}: {duration(process.spans) * _MS:.1f} ms"
    said += f", {process.hidden_share():.0%} of the communication is hidden" if hides else ""
    parts = [text(_MARGIN, y + 12, said, 'font-weight="bold"')]
    y += 18
    for track in process.tracks:
        parts.append(text(_LEFT - 8, y + 14, _TRACKS.get(track, track), 'text-anchor="end" fill="#555"'))
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _MARGIN}" height="{_ROW - 3}" '
                     f'fill="{"#f4f6f9" if track == COMPUTE else "#fbf6f0"}"/>')  # fmt: skip
        for span in (s for s in process.spans if s.track == track):
            parts.append(_box(span, _LEFT + (span.start_s - zero) * scale, y, span.seconds * scale))
        y += _ROW
    return parts, y + _GAP


def _box(span: Span, x: float, y: int, width: float) -> str:
    words = f"chunk {span.chunk}" if span.layer >= 0 else ""
    fits = words and width > 7 * len(words)
    inside = text(x + width / 2, y + 13, words, 'text-anchor="middle" font-size="10"') if fits else ""
    about = f"{words_of(span.kind)}{f', region {span.layer}, {words}' if words else ''}"
    return (f'<g><title>{escape(f"{span.name}: {about}, {span.seconds * _MS:.3f} ms")}</title>'
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="{_ROW - 3}" '
            f'fill="{_COLORS.get(span.kind, _OTHER)}" stroke="white" stroke-width="0.4"/>{inside}</g>')  # fmt: skip


def _axis(longest_s: float, scale: float, y: int) -> list[str]:
    parts = []
    for tick in ticks(longest_s * _MS) if longest_s else ():
        x = _LEFT + tick / _MS * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#555"/>')
        parts.append(text(x, y + 18, f"{tick:g}", 'text-anchor="middle" fill="#555"'))
    return [*parts, text(_LEFT - 16, y + 18, "time in ms", 'text-anchor="end" fill="#555"')]
