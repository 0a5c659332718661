"""What is chosen for all regions together, from programs with whole regions: rows that stay cut, and ep x esp."""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moefx
from moefx.axes import MeshSpec
from moefx.compiler import choosing, pipeline
from moefx.compiler.choosing import Attempt, Chooser, step_seconds
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.region_facts import Slots
from moefx.costmodel.machines import preset
from moefx.errors import UnsupportedUse
from moefx.ir.ways import A2A, SUM
from moefx.options import Options
from moefx.passes import hoist_split, split_tokens, split_waits
from moefx.placement.score import Costs
from moefx.planning import planner
from moefx.planning.folding import Fold, best_fold
from moefx.planning.placing import skewed_seconds
from moefx.planning.plans import Decision
from tests.passes.test_keep_rows_cut import FLAT
from tests.planning.test_planner import SOURCE, machine
from tests.planning.test_schedules import seconds
from tests.support.graphs import context, graph
from tests.support.models import shallow
from tests.support.scenarios import check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

SLOW = preset("emulated-200mbit")


def chooser(source: str, options: Options, cluster=SLOW, *, may_fold: bool = True):
    """(chooser, what it ran)."""
    ran: list[Attempt] = []

    def run(mesh, decisions):
        gm, mode = graph(source, sizes={"s0": 64, "s1": 64} if "s1" in source else {"s0": 4096})
        ctx = replace(context(mode, options), mesh=mesh, machine=cluster, decisions=decisions)
        for each in (split_tokens.run, hoist_split.run, place_experts.run):
            each(gm, ctx)
            refresh(gm, ctx)
        step = pipeline.differentiated(gm, ctx)
        step.note_sources(gm)
        for part in step.graphs.values():
            split_waits.run(part, ctx)
        ran.append(Attempt(None, ctx, None, step))
        return ran[-1]

    return Chooser(run, options, cluster, {}, may_fold), ran


def calls(attempt: Attempt) -> str:
    return str(attempt.graphs.forward.graph)


MP, DP = MeshSpec.named({"mp": 2}, ranks_per_node=1), MeshSpec.named({"dp": 4}, ranks_per_node=4)


def test_rows_stay_cut_where_that_is_faster():
    """Both programs are compiled and priced; what the second one gains is what it gains in the simulator."""
    choose, ran = chooser(FLAT, Options.named(split="s1", chunks=1, scheduler="heuristic"))
    found = choose.choose(MP)
    assert ["sum_own_rows" in calls(each) for each in ran] == [False, True, *[True] * (len(ran) - 2)]
    assert found.ctx.rows
    assert "rows stay cut: a step is predicted" in found.ctx.decisions.plan.notes[-1]
    prices = []
    for each in ran[:2]:
        decision = planner.decide(each.graphs, each.ctx, SLOW)
        prices.append(step_seconds(each.graphs, each.ctx, decision))
    wanted = [sum(seconds(each.graphs, each.ctx, SLOW)) for each in ran[:2]]
    assert prices[0] - prices[1] == pytest.approx(wanted[0] - wanted[1], rel=0.05)
    assert prices[1] < 0.9 * prices[0]


@pytest.mark.parametrize(("source", "rows", "note"), [
    (FLAT, False, None), (FLAT.replace("down1)", "down1).mul_(2.0)"), None, "has all rows"),
    pytest.param(FLAT.replace("n = h *", "n = h.cumsum(1) *"), None, "every layer: a step is predicted",
                 marks=pytest.mark.full),
], ids=["never", "written", "slower"])  # fmt: skip
def test_rows_are_gathered_where_they_have_to_be(source, rows, note):
    choose, ran = chooser(source, Options.named(rows=rows, chunks=1, alltoall="direct"))
    found = choose.choose(MP)
    assert not found.ctx.rows
    assert found is ran[0]  # whole, as it was looked at
    assert len(ran) == (2 if note and "predicted" in note else 1)
    assert note is None or note in found.ctx.decisions.plan.notes[0]


@pytest.mark.parametrize(("limit", "spread"), [(None, True), (1e5, False)])
def test_experts_are_spread_where_that_is_faster(limit, spread):
    """And fits: weights with their gradients and Adam's moments."""
    choose, _ = chooser(SOURCE, Options(chunks=1, memory_limit=limit), machine(ranks_per_node=4))
    one = choose._look(DP)
    fold = best_fold(one[1].folds, limit)
    assert (fold is not None) == spread
    if spread:
        found = choose.choose(DP)
        assert (found.ctx.mesh.size("ep"), found.ctx.mesh.size("esp")) == (fold.ep, fold.esp) != (1, 1)
        assert found.ctx.decisions.plan.notes == (fold.reason,)
        assert found.ctx.mesh.is_folded
        assert not DP.is_folded


def test_a_fold_must_suit_all_regions_and_gain_something():
    def fold(ep, seconds, weight=1.0):
        return Fold(ep, 1, "s1", seconds, weight)

    both = {0: [fold(4, 1.0), fold(2, 2.0), fold(1, 5.0)], 1: [fold(2, 2.0), fold(1, 5.0)]}
    found = best_fold(both, None)
    assert (found.ep, found.seconds, found.weight_bytes) == (2, 4.0, 2.0)
    assert best_fold(both, 7.9) is None
    assert best_fold({0: [fold(2, 1.0), fold(1, 1.01)]}, None) is None
    assert best_fold({0: [fold(2, 3.0, 1.0), fold(1, 1.0, 2.0)]}, 4.0).ep == 2  # whole ones do not fit
    assert best_fold({}, None) is None


@pytest.mark.parametrize("given", ["may not", "cannot"])
def test_experts_that_may_not_or_cannot_be_spread_stay_whole(given, monkeypatch):
    choose, _ = chooser(SOURCE, Options(chunks=1), machine(ranks_per_node=4), may_fold=given == "cannot")
    plain = choose.run

    def run(mesh, decisions):
        if mesh.dims("ep+esp"):
            raise UnsupportedUse("experts draw random numbers")
        return plain(mesh, decisions)

    found = replace(choose, run=run).choose(DP)
    assert found.ctx.mesh == DP
    notes = found.ctx.decisions.plan.notes
    assert notes == () if given == "may not" else "cannot be: experts draw random numbers" in notes[0]


def _run(rank, world, layout, case, steps, options):
    """An optimizer that was made before the first call updates what was moved."""
    with closing(compiled_case(case, layout, functools.partial(moefx.compile, options=options))) as compiled:
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
        data = compiled.data_mesh
        check_compiled(rank, layout, case, steps, compiled)
        held = dict(compiled.named_parameters())
        before = {name: param.to_local().clone() for name, param in held.items()}
        optimizer.step()
        for name, param in held.items():
            torch.testing.assert_close(param.to_local(), before[name] - 0.5 * param.grad.to_local())
        assert compiled.data_mesh is data
        kinds = {hop.kind for facts in compiled._whole.variants[0].program.regions for hop in facts.way.hops}
        return compiled.mesh.mesh_dim_names, moefx.explain(compiled).programs[0].notes, kinds


def test_parameters_move_before_they_have_their_place(monkeypatch):
    """Ranks of one node have parts of experts, and gather tokens, whatever a price says: what is chosen is what runs.
    """
    monkeypatch.setattr(choosing, "best_fold", lambda *_: Fold(2, 2, "s1", 1.0, 1.0, "spread"))
    monkeypatch.setattr(planner, "allowed", lambda region, ctx: ("baseline",) * 2)  # there is nothing else to choose
    case, layout = shallow("mixtral-grouped_mm"), ((4,), ("dp",))
    options = Options(machine=SLOW, chunks=1, scheduler="optsche")
    found = run_sharing(4, _run, layout, case, steps_of(case, [[(2, 6), (3, 10)] * 2]), options)
    assert found == [(("dp_ep", "dp_esp"), ("spread",), {A2A, SUM})] * 4


@pytest.mark.parametrize(("placement", "late"), [("auto", {1}), ("balanced", set())])
def test_copies_are_planned_after_the_gate_where_that_pays(monkeypatch, placement, late):
    """The program is made once more, though nothing else was chosen."""
    options, ran = Options(placement=placement, machine=SLOW), []

    def run(mesh, decisions):
        ran.append(Attempt(None, replace(context(None, options), mesh=mesh, decisions=decisions), None, None))
        return ran[-1]

    decision = SimpleNamespace(is_whole=True, asks_for=lambda decisions: decisions)
    monkeypatch.setattr(choosing, "decide", lambda *_, **__: decision)
    monkeypatch.setattr(choosing, "planned_late", lambda graphs, ctx: {1})
    monkeypatch.setattr(choosing, "check_memory", lambda *_: None)
    found = Chooser(run, options, SLOW, {}, may_fold=False).choose(MeshSpec.named({"ep": 2}))
    assert [number for number in (0, 1) if found.ctx.plans_in_call(number)] == sorted(late)
    assert len(ran) == 1 + len(late)


@pytest.mark.parametrize(("most", "spare"), [(40, 4), (25, 2), (1, 0)])
def test_copies_give_way_where_a_step_does_not_fit(monkeypatch, most, spare):
    """A step needs ten bytes for each copy that a rank has room for, and nothing else."""
    options, ran = Options.named(placement="auto", machine=SLOW, memory_limit=float(most), copies=4), []

    def run(mesh, decisions):
        ctx = replace(context(None, options), mesh=mesh, decisions=decisions)
        ran.append(Attempt(None, ctx, None, None))
        return ran[-1]

    def decide(graphs, ctx, *_, **__):
        kept = SimpleNamespace(bytes=max(2.0, 10.0 * ctx.spare), ways={}, rows=(), rings=0)
        return Decision(SLOW, {}, restoring=kept)

    monkeypatch.setattr(choosing, "decide", decide)
    monkeypatch.setattr(choosing, "planned_late", lambda graphs, ctx: {1})
    monkeypatch.setattr(choosing, "check_memory", lambda *_: None)
    monkeypatch.setattr(choosing, "step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(choosing, "costs_of", lambda *_: {})
    monkeypatch.setattr(choosing, "skewed_seconds", lambda costs, slots, spare, mesh: 1.0 - spare)
    found = Chooser(run, options, SLOW, {}, may_fold=False).choose(MeshSpec.named({"ep": 2}))
    assert found.ctx.spare == spare
    assert len(found.ctx.decisions.plan.notes) == (spare < 4)
    assert {each.ctx.decisions.whole for each in ran[:-1]} == {True}
    assert not ran[-1].ctx.decisions.whole


ROOM = (  # bytes and seconds of a step with room for so many copies, seconds of skewed loads
    ({4: (90, 2.0, 1.0), 2: (80, 1.5, 1.2), 1: (70, 1.4, 1.7), 0: (60, 1.4, 3.0)}, 2, "3000.000 ms with 4, 2700.000"),
    ({4: (120, 2.0, 1.0), 2: (110, 1.5, 1.2), 1: (90, 1.6, 1.7), 0: (60, 1.0, 3.0)}, 1, "4 do not fit; 2 do not fit"),
    ({4: (150, 2.0, 1.0), 2: (140, 1.5, 1.2), 1: (130, 1.4, 1.7), 0: (120, 1.4, 3.0)}, 0, "or fewer fits"),
    ({4: (90, 1.0, 1.0)}, 4, None),
)


@pytest.mark.parametrize(("steps", "wanted", "note"), ROOM, ids=["fastest", "fits", "least", "nothing lost"])
def test_room_for_copies_is_what_pays_within_the_limit(steps, wanted, note, monkeypatch):
    """Without a limit a step takes a second."""
    looked = []

    def look(self, mesh, *, rows, spare):
        looked.append(spare)
        ctx = SimpleNamespace(mesh=DP, decisions=SimpleNamespace(rows=rows, slots={}))
        found = Decision(SLOW, {"spare": spare}, restoring=SimpleNamespace(bytes=steps[spare][0]))
        return Attempt(None, ctx, None, spare), found

    monkeypatch.setattr(Chooser, "_look", look)
    monkeypatch.setattr(choosing, "decide", lambda *_, **__: Decision(SLOW, {}))
    monkeypatch.setattr(choosing, "costs_of", lambda *_: {})
    monkeypatch.setattr(choosing, "skewed_seconds", lambda costs, slots, spare, mesh: steps[spare][2])
    monkeypatch.setattr(choosing, "step_seconds", lambda graphs, ctx, found: (
        steps[found.sizes["spare"]][1] if found.sizes else 1.0))  # fmt: skip
    choose = Chooser(None, Options.named(machine=SLOW, placement="auto", copies=4, memory_limit=100), SLOW, {}, False)
    whole, found = choose._with_room(*choose._look(DP, rows=False, spare=4))
    assert (whole.graphs, found.sizes["spare"]) == (wanted, wanted)
    assert looked == [*steps]
    assert found.notes == () if note is None else note in found.notes[0]
    if note:
        assert found.notes[0].startswith(f"ranks have room for {wanted} cop")


def test_skewed_loads_take_longer_with_less_room():
    costs = Costs(1e-3, 1, 10, 10, (1e-6, 1e-6), rows=100.0, hidden=(1.0, 1.0))
    slots, mesh = {0: Slots(2, 2, (0, 0, 1, 1, 2, 2, 3, 3))}, MeshSpec.named({"ep": 4}, ranks_per_node=2)
    found = [skewed_seconds({0: costs}, slots, spare, mesh) for spare in (2, 1, 0)]
    assert found == sorted(found)
    zipf = [100 / each / sum(1 / e for e in range(1, 9)) for each in range(1, 9)]
    busiest = 4 * (int(zipf[0]) + int(zipf[4]))  # the hottest experts lie on different ranks
    assert found[2] == pytest.approx(1e-3 * busiest, rel=0.01)
    assert found[0] == pytest.approx(1e-3 * 100, rel=0.06)
    wide = replace(costs, byte=(2e-3, 2e-3))
    seconds = [skewed_seconds({0: replace(wide, chunks=chunks)}, slots, 0, mesh) for chunks in (1, 4)]
    assert seconds[1] < seconds[0] < 2 * seconds[1]
    assert skewed_seconds({0: costs, 1: costs}, {0: slots[0], 1: slots[0]}, 0, mesh) == 2 * found[2]
