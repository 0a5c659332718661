"""Choose, for every MoE region, schedule, number of chunks, all-to-all, codec and order, by predicted time.

The program is first compiled with whole regions. Its graphs tell what every stage of a region moves and computes, a
`Machine` what that takes; a candidate's time is the makespan of its tasks, forward and backward, in the simulator
(`moefx.costmodel`). What schedules other than the program's take follows from the same graphs (`planning.schedules`),
and what it takes where rows go to fewer of the ranks that share an expert (`planning.degrees`).
All is a function of the graphs, the machine and the sizes that all ranks compile for: every rank chooses the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sympy

from moefx import rooms
from moefx.context.decisions import Choice
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import RegionFacts
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.granularity import GranularityCache
from moefx.costmodel.machine import Machine
from moefx.costmodel.machines import PRESETS, preset
from moefx.costmodel.ways import FORMS
from moefx.errors import UnsupportedUse
from moefx.ir.describe import Symbols
from moefx.options import Options
from moefx.options.groups import PARM
from moefx.placement import policies
from moefx.planning.degrees import degrees as of_ranks
from moefx.planning.folding import SIMPLER, folds, layer_of
from moefx.planning.memory import Footprint, footprint, step_memory
from moefx.planning.pieces import Piece, Stages, as_written, seconds_outside, stages_of
from moefx.planning.plans import Caches, Decision, RegionPlan
from moefx.planning.pricing import DIRECT, FORMULAS, Candidate, More, Price, on_mesh
from moefx.planning.restoring import restore
from moefx.planning.schedules import (
    Capacity,
    Numbers,
    Sizes,
    allowed,
    by_capacity,
    bytes_of_rows,
    capacity_of,
    closed_forms,
    current,
    held_beside,
    numbers_of,
    parts_back,
    together,
    way_of,
)
from moefx.transport.codecs import IDENTITY, codec_named

DEGREES = (1, 2, 4, 8)
CODECS = (IDENTITY, "bf16", "int8")  # the most exact first
SCHEDULERS = ("optsche", "heuristic")


def check_names(options: Options) -> None:
    """Raises UnsupportedUse if the options are none, or want a choice made by what they do not give."""
    if not isinstance(options, Options):
        raise UnsupportedUse(f"the options are a {type(options).__name__}", hint="moefx.Options(chunks=2), for example")
    if options.keep == "auto" and None in (options.machine, options.memory_limit):
        raise UnsupportedUse("keep is 'auto', without a machine and a memory_limit to choose by",
                             hint="Options(machine=.., memory_limit=bytes); or name what is kept")  # fmt: skip
    policy = policies.chosen(options.placement)
    for is_asked, what, other in (
        (options.formula == PARM, f"the formula '{PARM}' needs a machine to choose by", "split='s1' or 's2'"),
        (policy is not None and policy.needs_machine,
         f"placement is {options.placement.policy!r}, without a machine to choose by", "placement='balanced'"),
    ):
        if is_asked and options.machine is None:
            raise UnsupportedUse(what, hint=f"machine=.., see python -m moefx calibrate; or {other}")
    if options.machine is not None and options.parallel.r is not None and rooms.degrees() is None:
        raise UnsupportedUse(f"r is {options.parallel.r} with a machine, and no feature knows what that takes",
                             hint="leave out one of them")  # fmt: skip
    rooms.check(options)


def machine_of(options: Options) -> Machine | None:
    """The machine that the options name. Raises MoefxError for a file or a name that is none."""
    named = options.machine
    if named is None or isinstance(named, Machine):
        return named
    is_file = Path(named).suffix == ".json" or Path(named).is_file()
    return Machine.load(named) if is_file and str(named) not in PRESETS else preset(str(named))


def decide(graphs: StepGraphs, ctx: PassContext, machine: Machine, *, caches: Caches | None = None,
           limit: float | None = None) -> Decision:
    """Plan the regions of a program that was scheduled with whole regions.

    caches: what earlier programs of the model taught. limit: bytes that the estimated peak may have; what needs least
    is chosen where nothing stays within it.
    """
    machine = on_mesh(machine, ctx.mesh)
    sizes = Sizes.of(graphs, ctx)
    stages = {name: stages_of(gm.graph.nodes, ctx) for name, gm in graphs.graphs.items()}
    names = Symbols.of(graphs.graphs.values()).names
    planner = _Planner(ctx, machine, sizes, dict(caches or {}), limit, names)
    if ctx.mesh.size("ep+esp") > 1:
        planner.before = {name: seconds_outside(gm.graph.nodes, ctx, machine, sizes.split, ctx.decisions.regions)
                          / max(1, len(stages[name])) for name, gm in graphs.graphs.items()}  # fmt: skip
    asked = replace(ctx, decisions=ctx.decisions.asked())
    forced, regions, folded = {}, {}, {}
    memory = step_memory(graphs, ctx.resident, of_ranks().arrived(graphs, stages))
    for number, facts in sorted(ctx.decisions.regions.items()):
        mine = {name: found[number] for name, found in stages.items() if number in found}
        if not facts.way.hops or not mine:
            forced[number] = asked.choice(number)
            layer = layer_of(graphs.forward.graph.nodes, number, facts.experts, sizes.whole, ctx.options.parallel.state)
            if layer is not None and not ctx.mesh.dims("ep+esp"):
                folded[number] = tuple(folds(ctx.mesh.root, layer, machine))
            continue
        shares = {True: sizes.split} | ({False: sizes.whole} if ctx.mesh.size("mp") > 1 else {})
        inside = {name: [each.kinds for each in stages[name].values()] for name in mine}
        feet = {is_split: [footprint(memory[name], found.kinds, inside[name], of)
                           for name, found in mine.items()] for is_split, of in shares.items()}  # fmt: skip
        regions[number] = mine, feet
    plans = {number: planner.plan(number, *known) for number, known in regions.items()}
    for group in together(ctx, set(regions)):
        if len({_shared(plans[number].chosen.choice) for number in group}) > 1:
            only = _common([plans[number] for number in group])
            plans |= {number: planner.plan(number, *regions[number], only=only) for number in group}
    found = Decision(machine, sizes.split, tuple(plans.values()), forced, planner.caches, folded)
    by_formula = rooms.formulas().get(ctx.options.formula)
    if by_formula is not None:
        chosen = {number: plan.chosen for number, plan in plans.items()}
        return replace(found, restoring=by_formula(graphs, ctx, machine, found.sizes, chosen))
    return found if limit is None else _within(found, graphs, ctx, limit)


def _within(found: Decision, graphs: StepGraphs, ctx: PassContext, limit: float) -> Decision:
    """The same with chunks, schedule, r and what is kept for the backward as the limit wants."""
    alone = {number for group in together(ctx, {plan.region for plan in found.regions}) if len(group) == 1
             for number in group}  # fmt: skip
    free = {number: Candidate(choice, 0.0, 0.0, 0.0) for number, choice in found.forced.items()}
    options = {number: [candidate] for number, candidate in free.items()}
    for plan in found.regions:
        free[plan.region], alike = plan.chosen, {}
        for each in plan.candidates:
            # OptSche has weight gradients at once; the heuristic keeps what they read till links have nothing to do.
            is_open = each.more.is_split == plan.chosen.more.is_split if plan.region in alone else (
                _shared(each.choice) == _shared(plan.chosen.choice))  # fmt: skip
            if is_open and (rooms.scheduler(ctx.options) is not None or each.choice.scheduler == SCHEDULERS[0]):
                alike.setdefault((each.choice.chunks, *_shared(each.choice)), []).append(each)
        options[plan.region] = [_simplest(some) for some in alike.values()]
    restoring = restore(graphs, ctx, found.machine, found.sizes, free, options, limit)
    plans = []
    for plan in found.regions:
        chosen = restoring.candidates[plan.region]
        changed = (f"the fastest within memory_limit; without the limit: {plan.chosen.choice.words()}, "
                   f"{1e3 * plan.chosen.seconds:.1f} ms")  # fmt: skip
        plans.append(plan if chosen is plan.chosen else replace(plan, chosen=chosen, reason=changed))
    return replace(found, regions=tuple(plans), restoring=restoring)


def _shared(choice: Choice) -> tuple[str | None, int | None]:
    """What regions with the same parameters have in common."""
    return choice.split, choice.r


def _common(plans: Sequence[RegionPlan]) -> tuple[str | None, int | None]:
    """The schedule and r that several regions can have and are fastest with, one with the other."""
    best = [{_shared(c.choice): c.seconds for c in reversed(plan.candidates)} for plan in plans]
    return min((name for name in best[0] if all(name in other for other in best)),
               key=lambda name: sum(other[name] for other in best))  # fmt: skip


class _Planner:
    """Plans regions one after the other; what is equal in several of them is priced only once."""

    def __init__(self, ctx: PassContext, machine: Machine, sizes: Sizes,
                 caches: dict[tuple[str, ...], GranularityCache], limit: float | None,
                 names: Mapping[str, str] | None = None) -> None:
        """names: of the symbols, in the emitted code."""
        self.ctx, self.machine, self.sizes, self.caches, self.limit = ctx, machine, sizes, caches, limit
        self.names = names or {}
        self.before: Mapping[str, float] = {}
        self.priced: dict[tuple[str, Choice], Candidate] = {}

    def plan(self, number: int, stages: Mapping[str, Stages], feet: Mapping[bool, Sequence[Footprint]],
             only: tuple[str | None, int | None] | None = None) -> RegionPlan:  # fmt: skip
        """feet: of the program, if ranks along `mp` share out rows, and if they do not. only: the one schedule and r
        that are left to choose."""
        facts, now = self.ctx.decisions.regions[number], current(number, self.ctx)
        capacity = None
        if self.ctx.mesh.size("mp") > 1 and "forward" in stages:
            capacity = capacity_of(facts, stages["forward"], self.sizes, self.ctx, self.machine)
        asked, found, open_ones = self.ctx.options.chunks, [], self._open(number, capacity)
        degrees = DEGREES if asked is None else (asked,)
        by_schedule = {name: numbers_of(name, facts, stages, self.sizes, self.ctx) for name, _ in open_ones}
        for schedule, r in open_ones:
            if only in (None, self._said(schedule, r, number)):
                numbers = by_schedule[schedule]
                more = self._more(schedule, r, facts, stages, numbers)
                mine = self._feet(more, feet)
                found += [replace(each, more=more) for each in
                          self._by_schedule(schedule, r, facts, numbers, degrees, mine)]  # fmt: skip
        numbers, price = numbers_of(now, facts, stages, self.sizes, self.ctx), Price(self.ctx, self.machine, facts.way)
        ranked = sorted(found, key=lambda c: (c.seconds, _complexity(c.choice)))
        chosen = _simplest(ranked)
        notes = {self._note(c.choice, facts) for c in found if c.choice.alltoall not in FORMULAS}
        formulas = {name: {kind: price.formula(pieces) for kind, pieces in mine.pieces.items() if pieces}
                    for name, mine in stages.items()}
        closed = closed_forms(facts, stages, self.sizes, self.ctx, price) if "forward" in stages else ()
        symbols = {symbol for mine in formulas.values() for formula in mine.values() for symbol in formula.free_symbols}
        new = {symbol: self._renamed(symbol) for symbol in symbols if str(symbol) in self.names}
        return RegionPlan(
            number, facts.module, chosen, tuple(ranked), _reason(chosen, ranked, now),
            {name: price.seconds_of_stages(mine, Choice()) for name, mine in numbers.items()},
            {name: {kind: formula.xreplace(new) for kind, formula in mine.items()} for name, mine in formulas.items()},
            {str(new[symbol]): self.sizes.split[str(symbol)] for symbol in sorted(new, key=lambda old: str(new[old]))},
            tuple(sorted(notes)), now,
            tuple(replace(each, formula=each.formula.xreplace(new), between=each.between.xreplace(new))
                  for each in closed),
            capacity and replace(capacity, formula=capacity.formula.xreplace(new)),
            parts_back(chosen.choice.split or now, facts, self.ctx), self._adaptive(facts, stages, numbers),
        )  # fmt: skip

    def _open(self, number: int, capacity: Capacity | None) -> list[tuple[str, int]]:
        """(schedule, r) that a region may have, those of the program first."""
        schedules = allowed(number, self.ctx)
        if self.ctx.options.formula == PARM and capacity is not None:
            schedules = (by_capacity(capacity, schedules),)
        found = [(name, r) for name in schedules for r in
                 of_ranks().allowed(number, name, self.ctx, self.limit is not None)]  # fmt: skip
        return found or [(current(number, self.ctx), self.ctx.options.parallel.r)]

    def _said(self, schedule: str, r: int, number: int) -> tuple[str | None, int | None]:
        """A schedule and r as choices say them: what is the program's own needs no word."""
        is_open = len(allowed(number, self.ctx)) > 1
        return schedule if is_open else None, None if r == self.ctx.mesh.size("esp") else r

    def _by_schedule(self, name: str, r: int, facts: RegionFacts, numbers: Numbers, degrees: tuple[int, ...],
                     feet: Sequence[Footprint]) -> list[Candidate]:  # fmt: skip
        """The candidates of one schedule and r. numbers: of the schedule, with r of all ranks."""
        ctx, is_all, way = self.ctx, r == self.ctx.mesh.size("esp"), way_of(name, facts, self.ctx)
        over = ""
        if not is_all:
            numbers, way, over = of_ranks().change(r, numbers, way, ctx)
        price = Price(ctx, self.machine, way, parts_back(name, facts, ctx), over, self.before)
        found: list[Candidate] = []
        nested = {each.name: each for each in rooms.nestings()
                  if is_all and "forward" in numbers and each.may(facts.number, name, ctx)}  # fmt: skip
        schedule, r_said = self._said(name, r, facts.number)
        if not way.hops and self.ctx.options.chunks is None:
            degrees = degrees[:1]  # no exchange that chunks could hide
        for left in self._left_open(price, nested):
            mine = nested[left[0]].pieces(numbers, facts, ctx) if left[0] in nested else numbers
            for some in [degrees] if self.limit is None else [(n,) for n in degrees]:  # a limit may want any
                found += self._candidates(f"{facts.number} {facts.module} {name} {r}", left, some, mine, feet, price)
        return [replace(each, choice=replace(each.choice, split=schedule, r=r_said)) for each in found]

    def _adaptive(self, facts: RegionFacts, stages: Mapping[str, Stages], numbers: Numbers) -> Any:
        """What r does, in closed form, where there are ranks with parts of experts to which rows go, or room for all.
        """
        is_one = self.ctx.mesh.size("esp") == 1 and self.limit is None
        if is_one or "forward" not in stages or facts.number in self.ctx.report.whole_over_esp:
            return None
        rows = bytes_of_rows(facts, stages["forward"], self.sizes, self.ctx)
        return of_ranks().closed(rows, numbers["forward"], self.ctx.mesh, self.machine)

    def _note(self, choice: Choice, facts: RegionFacts) -> str:
        """What the price of an all-to-all takes for granted."""
        nesting = rooms.nesting(choice.alltoall)
        found = None if nesting is None else nesting.note(facts, self.ctx)
        return found or f"there is no formula for the all-to-all '{choice.alltoall}': it is priced as '{DIRECT}'"

    def _renamed(self, symbol: sympy.Symbol) -> sympy.Symbol:
        return sympy.Symbol(self.names[str(symbol)], **symbol.assumptions0)

    def _more(self, schedule: str, r: int, facts: RegionFacts, stages: Mapping[str, Stages], numbers: Numbers) -> More:
        """What is held by a schedule and r beside what the program holds: weights, and tokens that are gathered first.
        """
        held = held_beside(schedule, facts, stages["forward"], self.sizes, self.ctx) if "forward" in stages else 0.0
        is_split = FORMS[schedule].is_split
        return replace(of_ranks().more(r, numbers, self.ctx), held=held, is_split=is_split)

    def _feet(self, more: More, feet: Mapping[bool, Sequence[Footprint]]) -> list[Footprint]:
        """Of the rows that a rank has then."""
        found = [foot.with_rows(more.rows) for foot in feet.get(more.is_split, feet[True])]
        return [replace(foot, around=foot.around + more.held, within=foot.within + more.held + more.weights)
                for foot in found]  # fmt: skip

    def _left_open(self, price: Price, nested: Iterable[str]) -> list[tuple[str, str, str]]:
        """(all-to-all, codec, scheduler) that the options leave open."""
        options, open_algorithms = self.ctx.options, FORMULAS if price.has_nodes else (DIRECT,)
        open_algorithms += (*nested,)
        if isinstance(options.alltoall.algorithm, tuple):
            open_algorithms = options.alltoall.algorithm if price.has_nodes else options.alltoall.algorithm[:1]
        elif options.alltoall.algorithm is not None:
            open_algorithms = (options.alltoall.algorithm,)
        return list(itertools.product(
            open_algorithms,
            CODECS if options.alltoall.lossy and options.alltoall.codec == IDENTITY else (options.alltoall.codec,),
            SCHEDULERS if rooms.scheduler(options) is None else (rooms.scheduler(options),),
        ))  # fmt: skip

    def _candidates(self, region: str, left: tuple[str, str, str], degrees: tuple[int, ...],
                    numbers: Mapping[str, Mapping[str, list[Piece]]], feet: Sequence[Footprint],
                    price: Price) -> list[Candidate]:  # fmt: skip
        """Those of one all-to-all, codec and scheduler that had to be looked at to know the best number of chunks."""
        alltoall, codec, scheduler = left
        contents = repr((price.groups, price.parts, price.weights, price.before, numbers))
        measured: dict[int, Candidate] = {}
        rings = self.ctx.decisions.rings

        def seconds(chunks: int) -> float:
            found = self._candidate(contents, numbers, Choice(chunks, alltoall, codec, scheduler), price)
            measured[chunks] = replace(found, memory=max(foot.peak(chunks, rings) for foot in feet))
            return found.seconds

        key = (region, *numbers, *left)
        batch = round(sum(p.amounts.payload for mine in numbers.values() for kind in ("A1", "A2") for p in mine[kind]))
        if len(degrees) > 1:
            chosen, self.caches[key] = self.caches.get(key, GranularityCache()).choose(batch, degrees, seconds)
        else:
            (chosen,) = degrees
        if chosen not in measured:
            seconds(chosen)
        # Nobody orders whole regions unless asked to: the first scheduler stands for all.
        is_first = rooms.scheduler(self.ctx.options) is not None or scheduler == SCHEDULERS[0]
        return [c for c in measured.values() if c.choice.chunks > 1 or is_first]

    def _candidate(self, contents: str, numbers: Mapping[str, Mapping[str, list[Piece]]], choice: Choice,
                   price: Price) -> Candidate:  # fmt: skip
        # Without a scheduler exchanges of a whole region start early and are waited for late, beside whatever can run
        # then: late weight gradients. The heuristic finds that order, ScheMoE's has them elsewhere.
        is_whole = choice.chunks == 1 and self.ctx.options.scheduler is None
        ordered = replace(choice, scheduler="heuristic") if is_whole else choice
        if (contents, ordered) not in self.priced:
            self.priced[contents, ordered] = price.candidate(as_written(numbers) if is_whole else numbers, ordered)
        return replace(self.priced[contents, ordered], choice=choice, scheduler=None if is_whole else choice.scheduler)


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that are about as fast as the fastest."""
    fastest = min(c.seconds for c in candidates)
    near = [c for c in candidates if c.seconds <= fastest * (1 + SIMPLER)]
    return min(near, key=lambda c: _complexity(c.choice))


def _complexity(choice: Choice) -> tuple:
    """Simplest first: exact, direct, whole, the paper's order."""
    codec = codec_named(choice.codec)
    alltoall = FORMULAS.index(choice.alltoall) if choice.alltoall in FORMULAS else len(FORMULAS)
    schedule = 0 if choice.split is None else list(FORMS).index(choice.split)
    return (0.0 if codec is None else codec.relative_error, schedule, choice.r is not None, alltoall, choice.chunks,
            choice.scheduler != SCHEDULERS[0])  # fmt: skip


def _reason(chosen: Candidate, ranked: Sequence[Candidate], now: str) -> str:
    if len(ranked) == 1:
        return "the options, and what was learned of other batch sizes, leave no other choice"
    whole = next((c for c in ranked if c.choice.whole and c.choice.split in (None, now)), None)
    if whole is chosen:
        return f"no other candidate is predicted to be more than {SIMPLER:.0%} faster"
    gain = "" if whole is None else f", {whole.seconds / chosen.seconds:.2f} times as fast as the whole region"
    if chosen is ranked[0]:
        return f"the fastest{gain}"
    return f"the simplest within {SIMPLER:.0%} of the fastest{gain}"
