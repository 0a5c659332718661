"""`moefx.explain`: how the MoE regions of a program run, what else was considered, and why this was chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.analysis.sizes import typical_sizes
from moefx.compiler.pipeline import asked_for
from moefx.compiler.variant import Variant
from moefx.context.decisions import Choice
from moefx.costmodel.closed_form import optsche_formula
from moefx.costmodel.machine import Machine
from moefx.costmodel.memory import Peak
from moefx.ir import alike
from moefx.ir.describe import Symbols
from moefx.ir.header import mesh_text
from moefx.model.api import CompiledModule
from moefx.planning.folding import Fold, gain
from moefx.planning.memory import peaks
from moefx.planning.plans import RegionPlan
from moefx.planning.pricing import Candidate
from moefx.report.inspection import title_of
from moefx.report.placement import words_of
from moefx.report.reports import Printed, as_text, programs_of
from moefx.report.restoring import ClassReport, class_reports, table_of
from moefx.report.step_times import Comparison
from moefx.report.timeline import Profile, step_of
from moefx.rooms import Change
from moefx.transport.codecs import codec_named

_SHOWN = 8  # candidates in the text; the data has all
CALIBRATE = (
    "no machine was given, so nothing was predicted or chosen: what the options do not say has its default. "
    "Measure one with: torchrun --nproc-per-node N -m moefx calibrate --out machine.json; "
    "then moefx.compile(.., machine='machine.json')"
)


@dataclass(frozen=True)
class RegionReport:
    """How one MoE region runs.

    choice: what was asked for; `left_out` says what of it the program could not use. scheduler: who orders the tasks;
    None: nobody, exchanges start early and are waited for late. plan: the planner's account, None without a machine or
    where nothing is exchanged. codec_error: the largest error of an entry over the largest magnitude of its row, each
    time that rows are sent; 0 is exact. placement: who has copies of which experts now, and why.
    """

    region: int
    module: str
    choice: Choice
    reason: str
    codec_error: float
    scheduler: str | None
    plan: RegionPlan | None = None
    placement: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "region": self.region, "module": self.module, "reason": self.reason, "codec_error": self.codec_error,
            "choice": {**self.choice.to_dict(), "scheduler": self.scheduler}, "placement": list(self.placement),
        }  # fmt: skip
        if self.plan is not None:
            found |= {
                "chosen": _as_dict(self.plan.chosen),
                "candidates": [_as_dict(candidate) for candidate in self.plan.candidates],
                "stage_seconds": {name: dict(times) for name, times in self.plan.stages.items()},
                "formulas": {name: {kind: str(f) for kind, f in of.items()} for name, of in self.plan.formulas.items()},
                "formula_sizes": dict(self.plan.sizes), "notes": list(self.plan.notes),
                "closed_forms": [{**asdict(each), "formula": str(each.formula), "between": str(each.between)}
                                 for each in self.plan.closed],
                "capacity": self.plan.capacity
                and {**asdict(self.plan.capacity), "formula": str(self.plan.capacity.formula)},
                "adaptive": self.plan.adaptive and self.plan.adaptive.to_dict(self.plan),
            }
        return found


def _as_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        **candidate.choice.to_dict(), "scheduler": candidate.scheduler, "seconds": candidate.seconds,
        "forward_s": candidate.forward_s, "backward_s": candidate.backward_s, "exposed_s": candidate.exposed_s,
        "memory_bytes": candidate.memory,
    }  # fmt: skip


@dataclass(frozen=True)
class ProgramReport:
    """How one program runs. sizes: what the symbols in its code were when it was planned. peaks: bytes at the predicted
    peak of "forward" and "backward", by the graphs as they run. left_out: (where, why) of what was asked for and not
    used. left: the same of mixtures of experts that were not understood and stay whole on every rank (strict=False).
    drifting: the same of buffers that decide choices and are each rank's own. not_cut: the same of experts that are
    whole on every rank of `esp`. whole_over_mp: (parameters, why) that are whole on every rank of `mp`; names that
    differ in numbers are one, with `*`. cut_over_mp: of what is cut, the dim. schedules: (module of a region,
    its schedule, and why ranks along `mp` take no fewer rows). rows: (module, whether what it gives
    stays cut along tokens). mesh: the root mesh and its roles, of experts that are folded. notes: what was chosen for
    all regions together, and why. classes: what becomes of values that the backward reads. limit:
    `Options.memory_limit`. step: where its time goes, as predicted and, by the last `moefx.profile`, on this rank."""

    title: str
    machine: Machine | None
    sizes: Mapping[str, float]
    regions: tuple[RegionReport, ...]
    peaks: Mapping[str, Peak]
    left_out: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    drifting: tuple[tuple[str, str], ...] = ()
    not_cut: tuple[tuple[str, str], ...] = ()
    whole_over_mp: tuple[tuple[str, str], ...] = ()
    cut_over_mp: tuple[tuple[str, str], ...] = ()
    schedules: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    mesh: str = ""
    notes: tuple[str, ...] = ()
    classes: tuple[ClassReport, ...] = ()
    limit: float | None = None
    step: Comparison | None = None

    @property
    def summary(self) -> str:
        """One sentence: how much of whole regions is communication, and what of the program's communication computation
        hides, as `moefx.timeline` predicts it; "" where nothing is predicted."""
        plans = [region.plan for region in self.regions if region.plan is not None]
        shares = []
        for graph in dict.fromkeys(name for plan in plans for name in plan.stages):
            times = [item for plan in plans for item in plan.stages.get(graph, {}).items()]
            sent = sum(seconds for stage, seconds in times if stage[0] in "AG")
            total = sum(seconds for _, seconds in times)
            shares += [f"{sent / total:.0%} of their {graph}"] if total else []
        if not shares or self.step is None or self.step.predicted is None:
            return ""
        chunks = sorted({plan.chosen.choice.chunks for plan in plans})
        how = "1 chunk hides" if chunks == [1] else " or ".join(map(str, chunks)) + " chunks hide"
        return (f"In whole MoE regions communication is {' and '.join(shares)}; as chosen, {how} "
                f"{self.step.predicted.overlap.share:.0%} of the step's communication.")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "summary": self.summary,
            "step": self.step and self.step.to_dict(),
            "machine": None if self.machine is None else _machine(self.machine),
            "sizes": dict(self.sizes),
            "regions": [region.to_dict() for region in self.regions],
            "peak_memory": {name: {"bytes": peak.bytes, "node": peak.node} for name, peak in self.peaks.items()},
            "left_out": [{"where": where, "why": why} for where, why in self.left_out],
            "left": [{"where": where, "why": why} for where, why in self.left],
            "drifting": [{"where": where, "why": why} for where, why in self.drifting],
            "not_cut": [{"where": where, "why": why} for where, why in self.not_cut],
            "whole_over_mp": [{"where": where, "why": why} for where, why in self.whole_over_mp],
            "cut_over_mp": [{"where": where, "how": how} for where, how in self.cut_over_mp],
            "schedules": [{"where": where, "how": how} for where, how in self.schedules],
            "rows": [{"where": where, "how": how} for where, how in self.rows],
            "mesh": self.mesh,
            "notes": list(self.notes), "memory_limit": self.limit,
            "classes": [each.to_dict() for each in self.classes],
        }

    def __rich__(self) -> Group:
        parts: list[Any] = [Text(line) for line in (self.summary, _about(self.machine)) if line]
        if self.mesh:
            parts.insert(0, Text(f"mesh: {self.mesh}"))
        parts += [*map(Text, self.notes), *([self.step] if self.step is not None else [])]
        parts.insert(0, Text(self.title, style="bold"))
        if not self.regions:
            parts.append(Text("no MoE region"))
        parts += _once_each([_region(region) for region in self.regions])
        if any(region.plan for region in self.regions):
            parts.append(Text(f"OptSche with r chunks takes {optsche_formula()}, of the stages' seconds per chunk"))
        given = {name: size for name, size in self.sizes.items() if not name.startswith("u")}
        parts.append(Text(f"sizes: {_equal(given) or 'all are fixed'}"))
        planned = [region.plan.sizes for region in self.regions if region.plan is not None]
        if planned := {name: size for sizes in planned for name, size in sizes.items()}:
            parts.append(Text(f"sizes in the formulas, of whole regions: {_equal(planned)}"))
        parts += [Text(f"peak memory, {name}: {_mega(peak.bytes)} at {peak.node}") for name, peak in self.peaks.items()]
        if self.limit is not None:
            used = max(peak.bytes for peak in self.peaks.values())
            parts.append(Text(f"memory limit: {_mega(self.limit)}, of which {used / self.limit:.1%} are used"))
        parts += [table_of(self.classes)] if self.classes else []
        for what, found in (
            ("not used at", self.left_out), ("whole on every rank:", self.left),
            ("whole on every rank of 'esp':", self.not_cut), ("split:", self.schedules),
            ("rows over 'mp':", self.rows), ("cut over 'mp':", self.cut_over_mp),
            ("whole on every rank of 'mp':", self.whole_over_mp),
            ("each rank's own, and decides choices:", self.drifting),
        ):  # fmt: skip
            parts += map(Text, alike.once([f"{what} {where}: {why}" for where, why in found]))
        return Group(*parts)


def _equal(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {size:g}" for name, size in sizes.items())


@dataclass(frozen=True)
class Explanation(Printed):
    """All programs of a compiled model, the oldest first. `str()` is a table, `to_dict` and `to_json` are data. note:
    why a model's blocks were compiled one by one, and what that costs. changes: what features changed since then."""

    programs: tuple[ProgramReport, ...]
    note: str | None = None
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[RegionReport, ...]:
        """The regions of the newest program."""
        return self.programs[-1].regions

    def to_dict(self) -> dict[str, Any]:
        return {"programs": [program.to_dict() for program in self.programs], "note": self.note,
                **{name: [each.to_dict() for each in some] for name, some in self.changes.items()}}  # fmt: skip

    def __rich__(self) -> Group:
        lines = (Text(f"{name}: {each}") for name, some in self.changes.items() for each in some)
        return Group(super().__rich__(), *lines)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def explain(compiled: CompiledModule, *args: Any, **kwargs: Any) -> Explanation:
    """Why a model runs as it does: candidates for every MoE layer, predicted time and memory, formulas, the reason.

    With arguments, it explains the program for a call with them, and compiles it if necessary (all ranks call this
    then). Raises UnsupportedUse if nothing was compiled, and what compiling raises.
    """
    programs = tuple(report_of(variant, compiled._profile) for variant in programs_of(compiled, args, kwargs))
    return Explanation(programs, compiled._note,
                       {name: each.changes for name, each in compiled._followers.items()})  # fmt: skip


def report_of(variant: Variant, profile: Profile | None = None) -> ProgramReport:
    """profile: the last one of the model."""
    ctx, decision = variant.context, variant.context.decisions.plan
    plans = {plan.region: plan for plan in decision.regions} if decision is not None else {}
    wholes = [facts for number, facts in sorted(ctx.decisions.regions.items()) if facts.of == number]
    regions = []
    for facts in wholes:
        number, plan = facts.number, plans.get(facts.number)
        choice = ctx.choice(number) if decision is None else decision.choices[number]
        if plan is not None:
            reason = plan.reason
        else:
            reason = "the options or their defaults" if decision is None else "nothing is exchanged: nothing to choose"
            reason += _fold(() if decision is None else decision.folds.get(number, ()))
        codec = codec_named(choice.codec)
        error = 0.0 if codec is None else codec.relative_error
        regions.append(RegionReport(number, facts.module, choice, reason, error, ctx.scheduler, plan,
                                    words_of(variant, facts)))  # fmt: skip
    sizes = typical_sizes(variant.scheduled.values(), ctx)
    names = Symbols.of(variant.scheduled.values()).names
    in_code = {new: sizes[old] for old, new in names.items() if old in sizes}
    skipped = [entry for record in variant.records if record.name in asked_for() for entry in record.skipped]
    return ProgramReport(title_of(variant), None if decision is None else decision.machine, in_code, tuple(regions),
                         peaks(variant.step, ctx, sizes), tuple(dict.fromkeys(skipped)),
                         (*ctx.report.left.items(), *ctx.report.kept_whole.items()), tuple(ctx.report.drifting.items()),
                         tuple(ctx.not_cut.items()), _by_pattern(ctx.report.whole_over_mp),
                         _by_pattern(ctx.report.cut_over_mp), _by_pattern(ctx.report.schedules),
                         _by_pattern(ctx.report.rows),
                         mesh_text(ctx.mesh) if ctx.mesh.is_folded else "",
                         () if decision is None else decision.notes, class_reports(ctx, sizes),
                         ctx.options.memory_limit, step_of(variant, profile))  # fmt: skip


def _fold(found: Sequence[Fold]) -> str:
    """What spreading the experts would bring, where that is predicted to be faster."""
    if not found or found[0].ep * found[0].esp == 1:
        return ""
    whole, best = next(fold for fold in found if fold.ep * fold.esp == 1), found[0]
    return f"; experts are whole on every rank: with ep={best.ep}, esp={best.esp} {gain(best, whole)}"


def _by_pattern(found: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Of layers that are alike one."""
    each = {(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), re.sub(r"_\d+\b|\(.*\)", "", why).strip()): None
            for name, why in found.items()}  # fmt: skip
    return tuple(each)


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name, "digest": machine.digest(), "kind": machine.provenance.kind,
        "from": machine.provenance.text, "date": machine.provenance.date, "ranks_per_node": machine.ranks_per_node,
        "sources": {figure: f"{source.kind}: {source.text}" for figure, source in machine.sources.items()},
    }  # fmt: skip


def _about(machine: Machine | None) -> str:
    if machine is None:
        return CALIBRATE
    source = machine.provenance
    assumed = [figure for figure, found in machine.sources.items() if found.kind == "assumed"]
    more = f"; {len(assumed)} of {len(machine.sources)} figures assumed" if machine.sources else ""
    return (f"machine {machine.name} ({source.kind}{' on ' + source.date if source.date else ''}: {source.text}), "
            f"{machine.ranks_per_node} ranks per node{more}")


def _region(region: RegionReport) -> list[Any]:
    choice, plan = region.choice, region.plan
    if plan is None:
        row = f"chunks {choice.chunks}, all-to-all {choice.alltoall}, codec {choice.codec}, "
        row += f"scheduler {region.scheduler or 'none'}"
        parts: list[Any] = [Text(f"region {region.region} ({region.module}): {row}; {region.reason}")]
    else:
        table = Table(title=f"region {region.region} ({region.module}): {region.reason}", title_justify="left")
        columns = ("", "chunks", "all-to-all", "codec", "scheduler", "forward", "backward", "exposed", "memory")
        for column in columns:
            table.add_column(column, justify="right" if column in (*columns[5:], "chunks") else "left")
        if plan.chosen.choice.split is not None:
            table.add_column("split")
        if any(candidate.choice.r is not None for candidate in plan.candidates):
            table.add_column("r", justify="right")
        shown = list(plan.candidates[:_SHOWN])
        for candidate in shown if plan.chosen in shown else [*shown, plan.chosen]:
            table.add_row("->" if candidate is plan.chosen else "", *_cells(candidate))
        parts = [table]
        if len(plan.candidates) > len(shown):
            parts.append(Text(f"of {len(plan.candidates)} candidates; memory is estimated"))
        parts += [*_closed(plan), *map(Text, plan.words_of_r)]
        for name, formulas in plan.formulas.items():
            times = plan.stages[name]
            parts += [Text(f"{name} {kind}: {_time(times[kind] + times.get(f'{kind}.intra', 0.0))} = {formula}")
                      for kind, formula in formulas.items()]
        parts += [Text(note) for note in plan.notes]
    parts += [Text(f"{'    ' if line else 'placement: '}{words}") for line, words in enumerate(region.placement)]
    if region.codec_error:
        parts.append(Text(f"the codec '{choice.codec}' changes numbers: each time rows are sent, an entry is off by up "
                          f"to {region.codec_error:.2g} of the largest in its row; a later router that is in doubt "
                          "may then choose other experts"))
    return parts


def _once_each(regions: Sequence[list[Any]]) -> list[Any]:
    """What is said of each region; where the same is said of several, once."""
    found: list[Any] = []
    for places in alike.groups(["\n".join(map(_words, parts)) for parts in regions]):
        for each in zip(*(regions[place] for place in places)):
            found.append(each[0])
            if isinstance(each[0], Table):
                each[0].title = alike.joined([table.title for table in each])
            else:
                found[-1] = Text(alike.joined([text.plain for text in each]))
        if len(places) > 1:
            found.append(Text(f"{len(places)} equal regions"))
    return found


def _words(part: Table | Text) -> str:
    """All of it; a title by itself, as it would be wrapped where the table ends."""
    if isinstance(part, Text):
        return part.plain
    title, part.title = part.title, None
    try:
        return f"{title}\n{as_text(part)}"
    finally:
        part.title = title


def _closed(plan: RegionPlan) -> list[Text]:
    """The schedules in closed form, with the best predicted time of each that is open."""
    of_rooms = {each.alltoall for each in plan.closed}
    best = {(c.choice.split or plan.schedule, c.choice.alltoall if c.choice.alltoall in of_rooms else ""): c.seconds
            for c in reversed(plan.candidates)}  # fmt: skip
    lines = []
    for each in plan.closed:
        key = each.schedule, each.alltoall
        is_priced = each.is_open and key in best
        found = f"forward and backward {_time(best[key])} at best" if is_priced else "not open"
        lines += [Text(f"split {each.schedule}: {found}; {each.name} = {_time(each.seconds)} = {each.formula}"),
                  Text(f"    between nodes {each.bytes_between:.0f} bytes = {each.between}")]  # fmt: skip
    if plan.capacity is not None and plan.closed:
        c = plan.capacity
        lines.append(Text(f"S2 is faster than S1 below T* = {c.threshold:.3g} tokens per expert, with omega = "
                          f"{c.omega:.3g}; here are {c.tokens:.3g}; T* = {c.formula}"))  # fmt: skip
    return lines


def _cells(candidate: Candidate) -> tuple[str, ...]:
    c, scheduler = candidate.choice, candidate.scheduler or "none"
    seconds = (candidate.forward_s, candidate.backward_s, candidate.exposed_s)
    schedule = () if c.split is None else (c.split,)
    schedule += () if c.r is None else (str(c.r),)
    return str(c.chunks), c.alltoall, c.codec, scheduler, *map(_time, seconds), _mega(candidate.memory), *schedule


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"
