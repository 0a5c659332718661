"""Which program is made for a call where there is a machine: programs with whole regions are looked at first.

    the mesh spreads no experts    a program with whole experts says how they should be spread (`planning.folding`)
    rows are nobody's choice yet   two programs, of which the second keeps activations cut over `mp`: the faster one
    copies of experts              planned before a call, or in it behind the gate (`planning.placing`); room for
                                   as many as pay within a limit of memory
    regions                        what is chosen for each of them (`planning.planner`); then the program that is run
    what rooms propose             other programs (`rooms.Proposal`), if a whole step is predicted to be faster

All is a function of the model, the options and the machine: every rank chooses the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from moefx import rooms
from moefx.analysis.tasks import stage_of
from moefx.axes import MeshSpec
from moefx.capture.trace import Captured
from moefx.compiler.pipeline import Pipeline
from moefx.context.decisions import Decisions
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import amounts_of
from moefx.costmodel.machine import Machine
from moefx.costmodel.memory import Peak
from moefx.errors import MeshError, RaiseError, UnsupportedUse
from moefx.ir.op import Stage
from moefx.ir.ops.order import wait
from moefx.ir.regions import region_of
from moefx.options import Options
from moefx.planning.folding import SIMPLER, best_fold
from moefx.planning.foreseen import Foreseen
from moefx.planning.limits import check_memory, next_limit, peak_of
from moefx.planning.pieces import outside
from moefx.planning.placing import costs_of, planned_late, skewed_seconds
from moefx.planning.planner import Caches, Decision, decide
from moefx.planning.pricing import on_mesh

log = logging.getLogger("moefx")


def _room_for(copies: int) -> str:
    return f"ranks have room for {copies} {'copy' if copies == 1 else 'copies'} of experts"


def step_seconds(graphs: StepGraphs, ctx: PassContext, decision: Decision) -> float:
    """Of a whole step: its regions as they were planned, and beside them one node after the other. Reductions of
    gradients are left out: they run beside it; and copies of experts, which differ from call to call."""
    planned, machine = {plan.region: plan.chosen.seconds for plan in decision.regions}, on_mesh(ctx.machine, ctx.mesh)
    nodes = [node for gm in graphs.graphs.values() for node in outside(gm.graph.nodes, ctx, planned)
             if stage_of(node) is not Stage.WEIGHTS or region_of(node) not in ctx.decisions.slots]  # fmt: skip
    again = sum(row.seconds for row in decision.restoring.rows) if decision.restoring else 0.0
    return again + sum(planned.values()) + sum(machine.start_s if node.target is wait
                                               else machine.time_of(amounts_of(node), decision.sizes, ctx.mesh.root)
                                               for node in nodes)  # fmt: skip


class Attempt(NamedTuple):
    """A captured call behind all passes. looked_at: the program with whole regions that choices were made by, where it
    is another one."""

    captured: Captured
    ctx: PassContext
    pipeline: Pipeline
    graphs: StepGraphs
    looked_at: tuple[StepGraphs, PassContext] | None = None


Run = Callable[[MeshSpec, Decisions], Attempt]


@dataclass(frozen=True)
class Chooser:
    """run: captures and runs the passes. may_fold: whether experts may still be spread in another way."""

    run: Run
    options: Options
    machine: Machine
    caches: Caches
    may_fold: bool

    def choose(self, mesh: MeshSpec) -> Attempt:
        """Raises MoefxError where nothing stays within the limit of memory, and what passes raise."""
        whole, decision = self.look(mesh)
        late = planned_late(whole.graphs, whole.ctx) if self.options.placement.policy == "auto" else set()
        misses: list[Peak] = []
        while True:
            found = whole
            given = partial(Decisions, rows=whole.ctx.decisions.rows, late=late, spare=whole.ctx.decisions.spare)
            if late or not decision.is_whole:
                try:
                    found = self.run(whole.ctx.mesh, decision.asks_for(given()))
                except UnsupportedUse as error:
                    whole, decision = self._with_rows_to_all(whole, decision, error)
                    continue
            found.ctx.decisions.plan = decision
            peak = check_memory(found.graphs, found.ctx, misses)
            if peak is None:
                found = self._with_proposals(found, given)
                again = found is not whole and rooms.choose(self.options)
                return found._replace(looked_at=(whole.graphs, whole.ctx)) if again else found
            misses.append(peak)
            limit = next_limit(decision, misses, self.options.memory_limit)
            again = decide(whole.graphs, whole.ctx, self.machine, caches=self.caches, limit=limit)
            decision = replace(again, notes=decision.notes)

    def _with_proposals(self, found: Attempt, given: Callable[[], Decisions]) -> Attempt:
        """What was planned, or what a room proposes in its place, if a step is predicted to be faster by it and it
        stays within the limit of memory. given: what a program is made by besides a plan."""
        plan = found.ctx.decisions.plan
        proposed = rooms.proposals(found.ctx)
        if not proposed:
            return found
        foreseen = Foreseen(found.graphs, found.ctx)
        seconds, best, chosen = foreseen.seconds, found, "what was planned"
        said = [f"a step is predicted to take {1e3 * seconds:.3f} ms as planned"]
        for room, proposals in proposed.items():
            if seconds <= foreseen.floor * (1 + SIMPLER):
                least = f"{1e3 * foreseen.floor:.3f} ms"
                said.append(f"{proposals[0].words} not tried, as {least} of these are taken in any order")
                continue
            for each in proposals:
                asked = replace(plan.asks_for(given()), choices=dict(each.choices), proposed_by=room)
                other, took, words = self._try(found.ctx.mesh, asked, each)
                said.append(f"{each.words}: {words}")
                if other is None or took * (1 + SIMPLER) >= seconds:
                    break
                seconds, best, chosen = took, other, each.words
                best.ctx.decisions.plan = plan.changed(each.choices, each.words)
        note = f"{'; '.join(said)}. Taken: {chosen}"
        best.ctx.decisions.plan = replace(best.ctx.decisions.plan, notes=(*plan.notes, note))
        return best

    def _try(self, mesh: MeshSpec, decisions: Decisions, proposal: rooms.Proposal) -> tuple[Attempt | None, float, str]:
        """What is proposed, and the seconds of a step, also in words; or why it cannot be."""
        try:
            found = self.run(mesh, decisions)
        except (RaiseError, UnsupportedUse) as error:
            return None, 0.0, f"cannot be: {error.what}"
        records = [each for each in found.pipeline.records if each.name == proposal.needs]
        if not any(each.changes for each in records):
            why = "; ".join(dict.fromkeys(why for each in records for _, why in each.skipped))
            return None, 0.0, f"cannot be: {why}"
        peak, limit = peak_of(found.graphs, found.ctx).bytes, self.options.memory_limit
        seconds = Foreseen(found.graphs, found.ctx).seconds
        words = f"{1e3 * seconds:.3f} ms"
        if limit is not None and peak > limit:
            return None, seconds, f"{words}, but it needs {peak / 1e6:.3f} MB, more than memory_limit"
        return found, seconds, words

    def look(self, mesh: MeshSpec) -> tuple[Attempt, Decision]:
        """The program with whole regions that the one which runs is chosen by, and what should become of them."""
        return self._with_room(*self._with_rows(*self._spread(*self._look(mesh))))

    def _with_rows_to_all(self, whole: Attempt, decision: Decision, error: UnsupportedUse) -> tuple[Attempt, Decision]:
        """The same where no r is chosen, if that is what could not be. Raises the error if it is not."""
        if whole.ctx.options.parallel.r is not None or all(choice.r is None for choice in decision.choices.values()):
            raise error
        log.info("rows go to all ranks that share an expert, as they cannot go to fewer: %s", error)
        options = whole.ctx.options.changed(r=whole.ctx.mesh.size("esp"))
        whole = whole._replace(ctx=replace(whole.ctx, options=options))
        again = decide(whole.graphs, whole.ctx, self.machine, caches=self.caches, limit=self.options.memory_limit)
        note = f"rows go to all ranks that share an expert: r cannot be chosen: {error.what}"
        return whole, replace(again, notes=(*decision.notes, note))

    def _with_room(self, whole: Attempt, decision: Decision) -> tuple[Attempt, Decision]:
        """With as much room for copies of experts as pays, where the placement is open and a limit of memory makes room
        cost time: what fits with more of it keeps less for the backward, or runs in other chunks."""
        limit, spare, mesh = self.options.memory_limit, self.options.placement.copies, whole.ctx.mesh
        if self.options.placement.policy != "auto" or limit is None or not spare:
            return whole, decision
        free = decide(whole.graphs, whole.ctx, self.machine, caches=self.caches)
        if decision.memory <= limit and self._seconds(whole, decision) <= self._seconds(whole, free):
            return whole, decision
        costs, slots = costs_of(whole.graphs, whole.ctx), whole.ctx.decisions.slots
        found: dict[int, tuple[Attempt, Decision]] = {spare: (whole, decision)}
        while spare:
            spare //= 2
            found[spare] = self._look(mesh, rows=whole.ctx.decisions.rows, spare=spare)
        fit = {spare: each for spare, each in found.items() if each[1].memory <= limit}
        if not fit:
            spare = min(found, key=lambda spare: found[spare][1].memory)
            note = f"{_room_for(spare)}: no room for more or fewer fits into memory_limit"
        else:
            seconds = {}
            for spare, (attempt, plan) in fit.items():
                chunked = {number: replace(each, chunks=plan.choices[number].chunks) for number, each in costs.items()}
                seconds[spare] = self._seconds(attempt, plan) + skewed_seconds(chunked, slots, spare, mesh)
            spare = min(seconds, key=lambda spare: (seconds[spare], spare))
            note = (f"{_room_for(spare)}: within memory_limit a step with loads by Zipf's law is predicted to take "
                    + ", ".join(f"{1e3 * each:.3f} ms with {spare}" for spare, each in seconds.items()))  # fmt: skip
            note += "".join(f"; {spare} do not fit" for spare in found if spare not in fit)
        whole, best = found[spare]
        return whole, replace(best, notes=(*decision.notes, note))

    @staticmethod
    def _seconds(found: Attempt, decision: Decision) -> float:
        return step_seconds(found.graphs, found.ctx, decision)

    def _look(self, mesh: MeshSpec, *, rows: bool = False, spare: int | None = None) -> tuple[Attempt, Decision]:
        """A program with whole regions, and what should become of them."""
        whole = self.run(mesh, Decisions(whole=True, rows=rows, spare=spare))
        limit = self.options.memory_limit
        return whole, decide(whole.graphs, whole.ctx, self.machine, caches=self.caches, limit=limit)

    def _spread(self, whole: Attempt, decision: Decision) -> tuple[Attempt, Decision]:
        """With experts over the ranks, if that is predicted to be faster; as they are where it cannot be."""
        ctx = whole.ctx
        if not self.may_fold or ctx.report.left or ctx.report.kept_whole:
            return whole, decision
        fold = best_fold(decision.folds, self.options.memory_limit)
        if fold is None:
            return whole, decision
        mesh = MeshSpec.folded(ctx.mesh.root, fold.ep, fold.esp, ctx.mesh.ranks_per_node).divided("esp")
        try:
            folded, other = self._look(mesh)
        except (MeshError, RaiseError, UnsupportedUse) as error:
            log.info("experts stay whole, as ep=%d and esp=%d cannot be: %s", fold.ep, fold.esp, error)
            note = f"experts are whole on every rank: ep={fold.ep}, esp={fold.esp} cannot be: {error.what}"
            return whole, replace(decision, notes=(*decision.notes, note))
        return folded, replace(other, notes=(*other.notes, fold.reason))

    def _with_rows(self, whole: Attempt, decision: Decision) -> tuple[Attempt, Decision]:
        """With activations that stay cut over `mp`, if every layer allows it and that is predicted to be faster."""
        ctx = whole.ctx
        if self.options.parallel.rows is not None or not ctx.mesh.axis("mp"):
            return whole, decision
        try:
            cut, other = self._look(ctx.mesh, rows=True)
        except UnsupportedUse as error:
            note = f"rows are gathered behind every layer: {error.what}"
            return whole, replace(decision, notes=(*decision.notes, note))
        seconds = [self._seconds(whole, decision), self._seconds(cut, other)]
        is_faster = seconds[1] < seconds[0]
        note = (f"rows {'stay cut' if is_faster else 'are gathered behind every layer'}: a step is predicted to take "
                f"{1e3 * min(seconds):.3f} ms, and {1e3 * max(seconds):.3f} ms the other way")  # fmt: skip
        notes = (*decision.notes, note)
        return (cut, replace(other, notes=notes)) if is_faster else (whole, replace(decision, notes=notes))
