"""How an explanation is shown as text: three sentences, then tables, of what decides alike once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.context.decisions import Choice
from moefx.costmodel.machine import Machine
from moefx.ir import alike
from moefx.planning.plans import RegionPlan
from moefx.planning.pricing import Candidate
from moefx.report.restoring import table_of

if TYPE_CHECKING:
    from moefx.report.explanation import ProgramReport, RegionReport

_SHOWN = 6  # candidates in the text; the data has all
_MOST, _LINES = 6, 12  # entries, and lines of a kind
NO_MACHINE = ("No machine was given, so nothing is predicted or chosen, and what the options leave open has its "
              "default.")  # fmt: skip
CALIBRATE = ("Measure one with: torchrun --nproc-per-node N -m moefx calibrate --out machine.json; then "
             "moefx.compile(.., machine='machine.json')")  # fmt: skip


# ---- sentences


def sentences(program: ProgramReport) -> tuple[str, str, str]:
    """What runs; what it takes, or why nobody knows; how much memory it needs."""
    return _runs(program), program.summary or _takes(program), _needs(program)


def _runs(program: ProgramReport) -> str:
    ranks, count = program.ranks, len(program.regions)
    where = f"{program.model} runs on {ranks} rank{'s' * (ranks > 1)}"
    groups = decisions(program.regions)
    if not groups:
        return f"{where} and has no MoE layer, so experts exchange nothing."
    ways = [f"{found[0].choice.words()}" for found in groups]
    if len(groups) == 1:
        return f"{where}, and {'its MoE layer runs' if count == 1 else f'its {count} MoE layers run'} with {ways[0]}."
    each = [f"{len(found)} with {way}" for found, way in zip(groups, ways)][:3]
    more = f"; {len(groups) - 3} more ways" if len(groups) > 3 else ""
    return f"{where}, and its {count} MoE layers run in {len(groups)} ways: {'; '.join(each)}{more}."


def _takes(program: ProgramReport) -> str:
    if program.machine is None:
        return NO_MACHINE
    if program.step is None or program.step.predicted is None:
        return "Nothing is predicted for it."
    return f"A step is predicted to take {_time(program.step.predicted.seconds)}, and no MoE layer exchanges rows."


def _needs(program: ProgramReport) -> str:
    if not program.peaks:
        return "It needs no memory."
    graph, peak = max(program.peaks.items(), key=lambda item: item[1].bytes)
    limit = "" if program.limit is None else f", {peak.bytes / program.limit:.1%} of the {_mega(program.limit)} allowed"
    return f"A rank needs {_mega(peak.bytes)} at the peak, in the {graph} at {peak.node}, without the optimizer{limit}."


def choice_sentence(choice: Choice, reason: str, plan: RegionPlan | None) -> str:
    """What was chosen for a region, and against what."""
    if plan is None:
        return f"Chosen: {choice.words()}: {reason}."
    said = f"Chosen: {choice.words()} ({_time(plan.chosen.seconds)}): {reason}."
    others = [each for each in plan.candidates if each.choice != plan.chosen.choice]
    if not others:
        return f"{said} Nothing else was open."
    best, whole = others[0], next((each for each in others if each.choice.whole), None)
    said += f" Next of {len(plan.candidates)} ways: {best.choice.words()} ({_against(best, plan)}"
    return said + (f"); direct, 1 chunk: {_against(whole, plan)}." if whole not in (None, best) else ").")


def _against(candidate: Candidate, plan: RegionPlan) -> str:
    more = candidate.seconds / plan.chosen.seconds - 1 if plan.chosen.seconds else 0.0
    return f"{_time(candidate.seconds)}, {more:+.0%}"


def decisions(regions: Sequence[RegionReport]) -> list[list[RegionReport]]:
    """Regions that decide alike: the same choice, for the same reason whatever its figures."""
    found: dict[tuple, list[RegionReport]] = {}
    for region in regions:
        found.setdefault((region.choice, region.scheduler, re.sub(r"\d", "", region.reason)), []).append(region)
    return list(found.values())


# ---- the whole text


def text(program: ProgramReport) -> Group:
    parts: list[Any] = [Text(program.title, style="bold"), *map(Text, program.sentences)]
    parts += [Text(f"mesh: {program.mesh}")] if program.mesh else []
    parts += [Text(_about(program.machine)), *map(Text, program.notes)]
    parts += [program.step] if program.step is not None else []
    groups = decisions(program.regions)
    for number, group in enumerate(groups[:_MOST]):
        parts += _entry(group) if not number else [Text(f"{_place(group)}: {group[0].sentence}")]
    parts += [Text(f"{len(groups) - _MOST} more ways, see to_dict()")] if len(groups) > _MOST else []
    given = {name: size for name, size in program.sizes.items() if not name.startswith("u")}
    parts.append(Text(f"sizes: {_equal(given) or 'all are fixed'}"))
    if planned := groups and groups[0][0].plan:
        parts.append(Text(f"sizes in the formulas, of whole regions: {_equal(planned.sizes)}"))
    parts += [Text(f"peak memory, {name}: {_mega(peak.bytes)} at {peak.node}") for name, peak in program.peaks.items()]
    if program.limit is not None:
        used = max(peak.bytes for peak in program.peaks.values())
        parts.append(Text(f"memory limit: {_mega(program.limit)}, of which {used / program.limit:.1%} are used"))
    parts += [Text(f"gradients: {'; '.join(program.reductions)}")] if program.reductions else []
    parts += [table_of(program.classes)] if program.classes else []
    for what, found in (
        ("not used at", program.left_out), ("whole on every rank:", program.left),
        ("whole on every rank of 'esp':", program.not_cut), ("split:", program.schedules),
        ("rows over 'mp':", program.rows), ("cut over 'mp':", program.cut_over_mp),
        ("whole on every rank of 'mp':", program.whole_over_mp),
        ("each rank's own, and decides choices:", program.drifting),
    ):  # fmt: skip
        lines = alike.once([f"{what} {where}: {why}" for where, why in found])
        parts += map(Text, lines[:_LINES])
        parts += [Text(f"{what} {len(lines) - _LINES} more, see to_dict()")] if len(lines) > _LINES else []
    return Group(*parts)


def several(programs: Sequence[ProgramReport]) -> Iterator[Any]:
    """Programs that are alike but for the numbers of blocks are one. The first of those that train is told in full, of
    the others the sentences."""
    if len(programs) == 1:
        yield programs[0]
        return
    whole = max(programs, key=lambda each: (sum("backward" in name for name in each.peaks), len(each.regions)))
    groups = alike.groups(["\n".join((each.title, *each.sentences)) for each in programs])
    for places in groups:
        told = [each for each in (programs[place] for place in places) if each is whole]
        titles = alike.once([programs[place].title for place in places])
        if told:
            yield whole
        else:
            yield Text("\n".join(titles), style="bold")
            yield from map(Text, programs[places[0]].sentences)
        if len(places) > 1:
            yield Text(f"{len(places)} programs are alike: {'; '.join(titles)}")


def _equal(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {size:g}" for name, size in sizes.items())


def _about(machine: Machine | None) -> str:
    if machine is None:
        return CALIBRATE
    source = machine.provenance
    assumed = [figure for figure, found in machine.sources.items() if found.kind == "assumed"]
    more = f"; {len(assumed)} of {len(machine.sources)} figures assumed" if machine.sources else ""
    return (f"machine {machine.name} ({source.kind}{' on ' + source.date if source.date else ''}: {source.text}), "
            f"{machine.ranks_per_node} ranks per node{more}")


def _place(regions: Sequence[RegionReport]) -> str:
    return (f"region {alike.ranges(region.region for region in regions)} "
            f"({'; '.join(alike.once([region.module for region in regions]))})")  # fmt: skip


def _entry(regions: Sequence[RegionReport]) -> list[Any]:
    """What is said of regions that decide alike, with the figures of the first."""
    region = regions[0]
    choice, plan = region.choice, region.plan
    if plan is None:
        row = f"chunks {choice.chunks}, all-to-all {choice.alltoall}, codec {choice.codec}, "
        row += f"scheduler {region.scheduler or 'none'}"
        parts: list[Any] = [Text(f"{_place(regions)}: {row}; {region.reason}")]
    else:
        parts = [Text(f"{_place(regions)}: {region.reason}"), _table(plan)]
        if len(plan.candidates) > _SHOWN:
            parts.append(Text(f"of {len(plan.candidates)} candidates; memory is estimated"))
        parts += [*_closed(plan), *map(Text, plan.words_of_r)]
        for name, times in plan.stages.items():
            parts.append(Text(f"{name}, ms: {', '.join(f'{kind} {s * 1e3:.3f}' for kind, s in times.items() if s)}"))
        parts += [Text(note) for note in plan.notes]
    parts += [Text(f"{'    ' if line else 'placement: '}{words}") for line, words in enumerate(region.placement)]
    if region.codec_error:
        parts.append(Text(f"the codec '{choice.codec}' changes numbers: each time rows are sent, an entry is off by up "
                          f"to {region.codec_error:.2g} of the largest in its row; a later router that is in doubt "
                          "may then choose other experts"))
    if len(regions) > 1:
        parts.append(Text(_alike(regions)))
    return parts


def _alike(regions: Sequence[RegionReport]) -> str:
    times = [region.plan.chosen.seconds for region in regions if region.plan is not None]
    if not times or _time(min(times)) == _time(max(times)):
        return f"{len(regions)} equal regions"
    return (f"{len(regions)} regions decide alike, in {_time(min(times))} to {_time(max(times))}; "
            f"the figures are those of region {regions[0].region}")  # fmt: skip


def _table(plan: RegionPlan) -> Table:
    table = Table()
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
    return table


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
