"""What is kept within a limit of memory: what the planner chooses on real graphs, and what comes of it."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import MoefxError
from moefx.options import Options
from moefx.passes import split_waits, weigh_inside
from moefx.planning import restoring
from moefx.planning.limits import check_memory, next_limit
from moefx.planning.memory import peaks
from moefx.planning.planner import check_names, decide
from tests.planning.test_planner import SOURCE, machine, whole
from tests.support.graphs import context, graph
from tests.support.ranks import fake_world

BUSY = machine(message_s=1e-9, bytes_per_s=1e10, flops=1e10)  # computation bounds
SLOW = machine(bytes_per_s=1e7, flops=1e13)  # transfers do


@pytest.fixture(scope="module")
def step():
    return whole(tokens=4096)


def peak_of(step, ctx, sizes):
    return max(peak.bytes for peak in peaks(step, ctx, sizes).values())


def differentiated(gm, ctx):
    """(step graphs, context) of a program of whole regions."""
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    made = pipeline.differentiated(gm, ctx)
    made.note_sources(gm)
    for part in made.graphs.values():
        split_waits.run(part, ctx)
    return made, ctx


def within(step, ctx, limit, cluster=BUSY, **options):
    return decide(step, replace(ctx, options=Options.named(memory_limit=limit, **options)), cluster, limit=limit)


def test_the_less_memory_the_more_time_and_nothing_without_need(step):
    free = decide(*step, BUSY)
    peak = peak_of(*step, free.sizes)
    found = [within(*step, peak * share).restoring for share in (2, 1, 0.9, 0.8, 0.7)]
    assert not found[0].ways
    assert not found[1].ways
    costs = [sum(row.seconds for row in each.rows) for each in found]
    assert costs == sorted(costs)
    for each, share in zip(found, (2, 1, 0.9, 0.8, 0.7)):
        assert each.bytes <= peak * share
        assert each.is_exact
        assert all(row.reason for row in each.rows)
    least = within(*step, 1.0).restoring  # nothing so small: the smallest
    assert least.is_least
    assert least.bytes == least.least < 0.7 * peak


def test_what_bounds_is_not_done_again(step):
    """Products are not repeated while transfers are free, nor rows sent again while computation is."""
    peak = peak_of(*step, decide(*step, BUSY).sizes)
    for cluster, spared in ((BUSY, "T_M"), (SLOW, "T_DI")):
        ways = within(*step, peak * 0.93, replace(cluster, copies={}), chunks=1).restoring.ways
        assert ways
        assert not any(name.endswith(spared) for name in ways)
    ways = within(*step, peak * 0.8, chunks=1).restoring.ways  # copies are as good as free
    assert "offload" in {way for each in ways.values() for way in each}


def test_the_simulator_decides_among_the_best_by_the_equation(step, monkeypatch):
    """Of mixes that need no more bytes: none that was looked at is faster in the simulator than what is chosen."""
    looked, original = {}, restoring.Search._seconds_in

    def noted(self, number, layer, mix):
        looked[repr(mix)] = found = original(self, number, layer, mix)
        return found

    monkeypatch.setattr(restoring.Search, "_seconds_in", noted)
    limit = 0.75 * peak_of(*step, decide(*step, BUSY).sizes)
    chosen = within(*step, limit).restoring
    assert 1 < len(looked) <= 2 * len(restoring.RINGS) * restoring.MOST
    assert len({*looked.values()}) > 1
    assert chosen.bytes <= limit
    monkeypatch.setattr(restoring.Search, "_seconds_in", lambda *given: -noted(*given))  # the slowest
    assert within(*step, limit).restoring.rows != chosen.rows


def seconds(decision):
    return sum(row.seconds for row in decision.restoring.rows) + sum(p.chosen.seconds for p in decision.regions)


def test_scores_go_inside_where_that_is_the_fastest_way_to_stay_within(step):
    """Of rows that return nothing is kept then, and what else would be sent again can stay."""
    other = whole(tokens=4096, weighable=True)
    assert other[1].decisions.weighable == {0, 1}
    cluster, peak, gains = replace(SLOW, copies={}), peak_of(*step, decide(*step, BUSY).sizes), []
    for share in (2, 0.8, 0.75, 0.6):
        limit = share * peak
        without, found = (within(*each, limit, cluster, chunks=4) for each in (step, other))
        inside = {name for name, ways in found.restoring.ways.items() if {*ways} == {"inside"}}
        assert found.restoring.bytes <= limit
        assert {row.name for row in found.restoring.rows if "last product" in row.reason} >= inside
        gains.append((sorted(inside), seconds(without) / seconds(found)))
    assert [inside for inside, _ in gains] == [[], [], ["0.R", "1.R"], ["0.R", "1.R"]]
    assert [gain == 1 for _, gain in gains[:2]] == [True, True]
    assert min(gain for _, gain in gains[2:]) > 1.1
    named = within(*other, 0.6 * peak, cluster, chunks=4, formula="mpipemoe").restoring  # there they are anyway
    assert named.ways["0.R"] == ("inside",)
    assert within(*other, 1.0, keep="lean").restoring.ways == {}


def test_inner_rows_are_kept_twice_where_scores_are_inside():
    """The estimate of a region whose scores are inside and whose inner rows are kept, and the sweep of that program."""
    made, ctx = whole(tokens=4096, weighable=True)
    free = decide(made, ctx, BUSY)
    search = restoring.Search(restoring.template_of(made, ctx, free.sizes), ctx, BUSY, free.sizes,
                               {plan.region: [plan.chosen] for plan in free.regions})  # fmt: skip
    layers = [unit.layers[-1] for unit in search.units]
    assert [layer.name for layer in layers if layer.name != "dense"] == ["0 inside"] * 2
    mixes = [(layer, {each.name: {way: each.number * (number == 0) for number, way in enumerate(each.ways)}
                      for each in layer.classes}) for layer in layers]  # fmt: skip
    estimate = search._peak(replace(search._tried(float("inf"))[0], mixes=tuple(mixes)))
    gm, mode = graph(SOURCE, sizes={"s0": 4096})
    ctx = context(mode, ep=4)
    ctx.decisions.restoring = {"0.R": ("inside",), "1.R": ("inside",)}
    assert weigh_inside.run(gm, ctx).changes
    real = peak_of(*differentiated(gm, ctx), dict(zip(free.sizes, free.sizes.values())))
    assert estimate == pytest.approx(real, rel=0.02)


def test_named_ways_leave_only_chunks_to_choose(step):
    found = within(*step, 1.0, keep="lean").restoring
    assert not found.rows
    assert not found.ways


def test_the_estimate_is_near_the_program(step):
    """The plan of the program with everything kept, and the sweep of the program that is made by it."""
    free = decide(*step, BUSY)
    peak = peak_of(*step, free.sizes)
    for share in (0.85, 0.7):
        plan = within(*step, peak * share, replace(BUSY, copies={}), chunks=1)
        gm, mode = graph(SOURCE, sizes={"s0": 4096})
        ctx = context(mode, ep=4)
        ctx.decisions.restoring = plan.restoring.ways
        real = peak_of(*differentiated(gm, ctx), dict(zip(plan.sizes, free.sizes.values())))
        assert 0.75 * plan.restoring.bytes < real < 1.05 * plan.restoring.bytes


def test_finished_programs_are_measured(step):
    made, ctx = step
    ctx = replace(ctx, decisions=replace(ctx.decisions))
    peak = peak_of(made, ctx, decide(made, ctx, BUSY).sizes)
    assert check_memory(made, ctx) is None
    ctx.options = Options(memory_limit=peak)
    assert check_memory(made, ctx) is None
    ctx.options = Options(memory_limit=peak / 1.2)
    ctx.decisions.plan = decide(made, ctx, BUSY, limit=peak / 1.2)
    missed = check_memory(made, ctx)
    assert missed.bytes == peak
    assert next_limit(ctx.decisions.plan, [missed], peak / 1.2) == pytest.approx(ctx.decisions.plan.memory / 1.2)
    assert next_limit(ctx.decisions.plan, [missed] * 2, peak / 1.2) == 0  # what needs least
    with pytest.raises(MoefxError, match=r"no choice .* needs less than \d+ bytes \(0.001 MB\)"):
        check_memory(made, ctx, [replace(missed, bytes=1000.0), missed])
    ctx.decisions.plan = decide(made, ctx, BUSY, limit=0)
    with pytest.raises(MoefxError, match=r"no choice that the options leave needs less than \d+ bytes"):
        check_memory(made, ctx)
    ctx.decisions.plan = None  # nobody who could choose anything else
    with pytest.raises(MoefxError, match=r"the peak at|memory_limit"):
        check_memory(made, ctx)


def test_auto_needs_something_to_choose_by():
    for options in ({}, {"machine": BUSY}, {"memory_limit": 1e9}):
        with pytest.raises(MoefxError, match="keep is 'auto', without a machine and a memory_limit"):
            check_names(Options.named(keep="auto", **options))
    check_names(Options(keep="auto", machine=BUSY, memory_limit=1e9))


def test_whole_programs_stay_within_their_limit_or_name_the_least():
    """Two of the random configurations of the benchmark, from the capture on."""
    benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "memory_limits.py"))
    case = benchmark["drawn"](15)._replace(layers=1, tokens=512, chunks=4)
    with fake_world(case.ranks):
        for share, is_met in ((0.8, True), (0.1, False)):
            found = benchmark["judged"](case._replace(share=share))
            assert benchmark["is_right"](found)
            assert (found.peak is not None) == is_met
            assert bool(found.ways) == is_met
