"""`moefx.explain`: how the MoE regions of a program run, what else was considered, and why this was chosen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from moefx.analysis.sizes import typical_sizes
from moefx.compiler.pipeline import asked_for
from moefx.compiler.variant import Variant
from moefx.context.decisions import Choice
from moefx.costmodel.closed_form import optsche_formula
from moefx.costmodel.machine import Machine
from moefx.costmodel.memory import Peak
from moefx.ir.describe import Symbols
from moefx.ir.header import mesh_text
from moefx.model.api import CompiledModule
from moefx.planning.folding import Fold, gain
from moefx.planning.memory import peaks
from moefx.planning.plans import RegionPlan
from moefx.planning.pricing import Candidate
from moefx.report import explanation_views as views
from moefx.report.inspection import title_of
from moefx.report.placement import words_of
from moefx.report.reports import Printed, programs_of
from moefx.report.restoring import ClassReport, class_reports
from moefx.report.step_times import Comparison
from moefx.report.timeline import Profile, step_of
from moefx.rooms import Change
from moefx.transport.codecs import codec_named


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

    @property
    def sentence(self) -> str:
        """What was chosen, and against what."""
        return views.choice_sentence(self.choice, self.reason, self.plan)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "region": self.region, "module": self.module, "reason": self.reason, "codec_error": self.codec_error,
            "choice": {**self.choice.to_dict(), "scheduler": self.scheduler}, "placement": list(self.placement),
            "sentence": self.sentence,
        }  # fmt: skip
        if self.plan is not None:
            found |= {
                "chosen": _as_dict(self.plan.chosen),
                "candidates": [_as_dict(candidate) for candidate in self.plan.candidates],
                "stage_seconds": {name: dict(times) for name, times in self.plan.stages.items()},
                "formulas": {name: {kind: str(f) for kind, f in of.items()} for name, of in self.plan.formulas.items()},
                "optsche_formula": str(optsche_formula()), "formula_sizes": dict(self.plan.sizes),
                "notes": list(self.plan.notes),
                "closed_forms": [{**asdict(each), "formula": str(each.formula), "between": str(each.between)}
                                 for each in self.plan.closed],
                "capacity": self.plan.capacity
                and {**asdict(self.plan.capacity), "formula": str(self.plan.capacity.formula)},
                "adaptive": self.plan.adaptive and self.plan.adaptive.to_dict(self.plan),
            }
        return found


def _as_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        **candidate.choice.to_dict(), "words": candidate.choice.words(), "scheduler": candidate.scheduler,
        "seconds": candidate.seconds, "forward_s": candidate.forward_s, "backward_s": candidate.backward_s,
        "exposed_s": candidate.exposed_s, "memory_bytes": candidate.memory,
    }  # fmt: skip


@dataclass(frozen=True)
class ProgramReport:
    """How one program runs. model: the class of what it runs, or the path of the block; ranks: of the mesh. sizes: what
    the symbols in its code were when it was planned. peaks: bytes at the predicted peak of "forward" and "backward", by
    the graphs as they run. left_out: (where, why) of what was asked for and not used. left: the same of mixtures of
    experts that were not understood and stay whole on every rank (strict=False). drifting: the same of buffers that
    decide choices and are each rank's own. not_cut: the same of experts that are whole on every rank of `esp`.
    whole_over_mp: (parameters, why) that are whole on every rank of `mp`; names that differ in numbers are one, with
    `*`. cut_over_mp: of what is cut, the dim. schedules: (module of a region, its schedule, and why ranks along `mp`
    take no fewer rows). rows: (module, whether what it gives stays cut along tokens). mesh: the root mesh and its
    roles, of experts that are folded. notes: what was chosen for all regions together, and why. classes: what becomes
    of values that the backward reads. reductions: of gradients, how they travel. limit: `Options.memory_limit`. step:
    where its time goes, as predicted and, by the last `moefx.profile`, on this rank."""

    title: str
    model: str
    ranks: int
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
    reductions: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, str, str]:
        """What runs and how; what a step is predicted to take; what memory a rank needs."""
        return views.sentences(self)

    @property
    def summary(self) -> str:
        """One sentence: how long a step takes, how much of whole regions is communication, and what of the program's
        communication computation hides, as `moefx.timeline` predicts it; "" where nothing is predicted."""
        plans = [region.plan for region in self.regions if region.plan is not None]
        shares = []
        for graph in dict.fromkeys(name for plan in plans for name in plan.stages):
            times = [item for plan in plans for item in plan.stages.get(graph, {}).items()]
            sent = sum(seconds for stage, seconds in times if stage[0] in "AG")
            total = sum(seconds for _, seconds in times)
            shares += [f"{sent / total:.0%} of the {graph}"] if total else []
        if not shares or self.step is None or self.step.predicted is None:
            return ""
        chunks = sorted({plan.chosen.choice.chunks for plan in plans})
        how = "1 chunk hides" if chunks == [1] else " or ".join(map(str, chunks)) + " chunks hide"
        step = self.step.predicted
        return (f"A step is predicted to take {step.seconds * 1e3:.3f} ms: communication is {' and '.join(shares)} in "
                f"whole MoE regions; as chosen, {how} {step.overlap.share:.0%} of the step's communication.")

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "model": self.model, "ranks": self.ranks,
            "sentences": list(self.sentences),
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
            "mesh": self.mesh, "reductions": list(self.reductions),
            "notes": list(self.notes), "memory_limit": self.limit,
            "classes": [each.to_dict() for each in self.classes],
        }

    def __rich__(self) -> Group:
        return views.text(self)


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
        note = [Text(self.note)] if self.note else []
        return Group(*note, *views.several(self.programs), *lines)

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
    model = variant.path or type(variant.program.home.model).__name__
    return ProgramReport(title_of(variant), model, ctx.mesh.size(ctx.mesh.everyone),
                         None if decision is None else decision.machine, in_code, tuple(regions),
                         peaks(variant.step, ctx, sizes), tuple(dict.fromkeys(skipped)),
                         (*ctx.report.left.items(), *ctx.report.kept_whole.items()), tuple(ctx.report.drifting.items()),
                         tuple(ctx.not_cut.items()), _by_pattern(ctx.report.whole_over_mp),
                         _by_pattern(ctx.report.cut_over_mp), _by_pattern(ctx.report.schedules),
                         _by_pattern(ctx.report.rows),
                         mesh_text(ctx.mesh) if ctx.mesh.is_folded else "",
                         () if decision is None else decision.notes, class_reports(ctx, sizes),
                         ctx.options.memory_limit, step_of(variant, profile),
                         tuple(ctx.report.reductions.values()))  # fmt: skip


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
