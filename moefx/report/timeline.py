"""`moefx.timeline` and `moefx.profile`: when every task of a step runs, as predicted and as measured.

    with moefx.profile(compiled) as p:          # all ranks
        loss = compiled(tokens, labels=tokens).loss
        loss.backward()
    print(p.hidden_share())                     # of this rank
    print(p.compare())                          # what the prediction of the step missed
    p.save("trace.json")                        # all ranks; the first one writes what all of them measured

The measured program is a copy of the emitted code that also notes the time wherever one task ends and the next begins;
outside of the `with` nothing runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from moefx.compiler.variant import Variant
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.tasks import COMPUTE, TaskGraph
from moefx.errors import UnsupportedUse
from moefx.model.api import CompiledModule
from moefx.planning.foreseen import Foreseen
from moefx.report.reports import programs_of
from moefx.report.step_times import Comparison
from moefx.report.traces import PREDICTED, HiddenShare, Process, Span, Trace, duration, moved, one_at_a_time
from moefx.runtime.agreement import gather
from moefx.runtime.profiler import ClockOffset, Profiler, Run, compare_clocks


def timeline(compiled: CompiledModule) -> Trace:
    """The predicted timeline of a step: its forward, then its backward, the same for all ranks. It is that of the
    program that ran last, else that was compiled last. If a model is compiled block by block, it has the forwards of
    all blocks and then their backwards, without what runs eagerly between them.

    The times are those of the machine that `Options(machine=)` names. Without one they are those of the preset that is
    nearest to the device, and only their ratios mean something. Raises UnsupportedUse if nothing was compiled.
    """
    found = [Prediction(variant) for variant in last_of(compiled)]
    runs = [*(each.spans["forward"] for each in found), *(each.spans.get("backward", []) for each in reversed(found))]
    return Trace((_predicted((0.0, spans) for spans in runs),), found[0].about)


def last_of(compiled: CompiledModule) -> list[Variant]:
    """Of the model, or of each of its blocks, the program that ran last, else that was compiled last. Raises
    UnsupportedUse if nothing was compiled."""
    programs_of(compiled)
    return [each.last[0] if each.last else each.variants[-1] for each in compiled._runners if each.variants]


def profile(compiled: CompiledModule) -> Profile:
    """Measure the steps that run inside `with moefx.profile(compiled) as p:`. All ranks enter it together, with no step
    under way. The steps' results are the same bits as without. It needs no GPU and no privileges."""
    return Profile(compiled)


class Profile:
    """What `profile` returns: a context manager that afterwards has what it measured. Entering it inside another
    profile of the same model raises UnsupportedUse. loads: {module: rows per expert [E] of every forward in it}, as in
    `moe_stats()`."""

    def __init__(self, compiled: CompiledModule) -> None:
        self._compiled, self._session = compiled, compiled._session
        self._offset = ClockOffset()
        self._runs: list[Run] = []
        self.loads: dict[str, list[list[int]]] = {}

    def __enter__(self) -> Profile:
        session = self._session
        if session.profiler is not None:
            raise UnsupportedUse("this model is being profiled already", hint="leave the outer moefx.profile first")
        if not session.is_fake:
            axes = session.view.names
            group = session.group(axes, "clock")
            with session.guard("comparing clocks", axes):
                self._offset = compare_clocks(group, session.ranks(axes), session.rank, session.device)
        session.profiler = Profiler(session.device)
        return self

    def __exit__(self, *exception: object) -> None:
        profiler, self._session.profiler = self._session.profiler, None
        self._runs, self.loads = profiler.runs, profiler.loads
        self._compiled.__dict__["_profile"] = self

    @cached_property
    def trace(self) -> Trace:
        """What this rank measured and, beginning with every run of it, what was predicted. Raises UnsupportedUse if
        nothing ran to its end."""
        variants = {v.program.digest: v for v in self._compiled._variants}
        runs = [run for run in self._runs if run.program in variants]  # a program may give way to another one
        if not any(run.segments() for run in runs):
            raise UnsupportedUse("no step ran in this profile", hint="run steps in the with block, and ask after it")
        made = {digest: Prediction(variants[digest]) for digest in {run.program for run in runs}}
        found: list[Span] = []
        beside = []
        for run in runs:
            prediction = made[run.program]
            spans = list(_spans_of(run, prediction.tasks[run.graph]))
            if spans:
                found += spans
                start_s = min(span.start_s for span in spans) - self._offset.seconds
                beside.append((start_s, [replace(s, step=run.step) for s in prediction.spans[run.graph]]))
        name, rank = f"rank {self._session.rank}", self._session.rank
        measured = Process(name, rank, tuple(_disjoint(found)), self._offset.seconds, self._offset.error_s)
        return Trace((measured.shifted(-self._offset.seconds), _predicted(beside)), next(iter(made.values())).about)

    def hidden_share(self) -> HiddenShare:
        """The share of the time with an exchange in flight in which this rank computes, measured and predicted."""
        return self.trace.hidden_share()

    def compare(self) -> Comparison:
        """Where the time of a step went on this rank, predicted beside measured, and what the prediction missed."""
        return Comparison.of(self.trace)

    def gather(self) -> Trace:
        """What all ranks measured, on the clock of the first one. All ranks call this."""
        session, mine = self._session, self.trace
        ranks = gather(session, session.view.names, mine.measured, "gathering timelines")
        return Trace((mine.predicted, *(process for processes in ranks for process in processes)), mine.about)

    def save(self, path: str | Path) -> Trace:
        """Write what all ranks measured, and return it. All ranks call this; the first one writes the file."""
        trace = self.gather()
        if self._session.index(self._session.view.names) == 0:
            trace.save(path)
        return trace


class Prediction:
    """Of a step of a program. about: whose times it goes by. tasks: {graph: its tasks}, each with the predicted
    seconds. spans: {graph: when they run}, from 0."""

    def __init__(self, variant: Variant) -> None:
        graphs = variant.scheduled
        found = Foreseen(StepGraphs(graphs["forward"], graphs.get("backward")), variant.context)
        self.about = {"machine": found.prices.machine.name, "machine_given": variant.context.machine is not None}
        self.tasks = found.tasks
        program = _named(variant.program.digest)
        self.spans: dict[str, list[Span]] = {}
        for graph, tasks in self.tasks.items():
            times = found.timelines[graph]
            self.spans[graph] = [
                Span(t.name, t.kind, t.resource, times.start[t.name], times.end[t.name], graph, 0, program, t.chunk,
                     t.layer)
                for t in tasks
            ]  # fmt: skip


def step_of(variant: Variant, profile: Profile | None) -> Comparison | None:
    """Of one program: what this rank measured in a profile, and what was predicted for it; without a measurement the
    prediction alone, if a machine was named."""
    try:
        found, name = profile and profile.trace, _named(variant.program.digest)
    except UnsupportedUse:  # nothing ran in it
        found = None
    if found is not None and any(span.program == name for span in found.measured[0].spans):
        return Comparison.of(replace(found, processes=tuple(
            replace(process, spans=tuple(span for span in process.spans if span.program == name))
            for process in found.processes)))  # fmt: skip
    if variant.context.machine is None:
        return None
    prediction = Prediction(variant)
    return Comparison.of(Trace((_predicted((0.0, spans) for spans in prediction.spans.values()),), prediction.about))


def _named(program: int) -> str:
    return f"{program:016x}"


def _predicted(runs: Iterable[tuple[float, list[Span]]]) -> Process:
    """Predictions of runs as one process, each at the time given for it or, if later, the end of the one before."""
    found: list[Span] = []
    free = float("-inf")
    for start_s, spans in runs:
        free = max(free, start_s)
        found += moved(spans, free)
        free += duration(spans)
    return Process(PREDICTED, None, tuple(found))


def _spans_of(run: Run, tasks: TaskGraph) -> Iterator[Span]:
    """The tasks of one measured run, on this rank's clock."""
    segments = run.segments()
    waited: dict[str, float] = defaultdict(float)
    for segment in segments:
        if segment.what == "wait":
            waited[segment.task] += segment.end_s - segment.begin_s
    for what, name, begin_s, end_s in segments:
        if what != "wait":
            task = tasks[name]
            yield Span(name, task.kind, task.resource, begin_s, end_s, run.graph, run.step, _named(run.program),
                       task.chunk, task.layer, waited[name] if what == "exchange" else 0.0)  # fmt: skip


def _disjoint(spans: list[Span]) -> Iterator[Span]:
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    for track, mine in tracks.items():
        yield from mine if track == COMPUTE else one_at_a_time(mine)
