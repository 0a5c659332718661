"""To how many ranks a token's rows go: priced from one program as the program that has it, and chosen with the rest."""

from __future__ import annotations

import functools
import itertools
from contextlib import closing
from dataclasses import replace

import pytest

import moefx
from moefx import _torch_compat as compat
from moefx import rooms
from moefx.context.decisions import Choice
from moefx.costmodel.amounts import amounts_of, at
from moefx.features.adaptive.prices import allowed, numbers_with, way_with
from moefx.features.adaptive.ranks import weights_over
from moefx.features.tuning import arms
from moefx.ir.op import Stage
from moefx.ir.ops.order import start, unsplit
from moefx.options import Options
from moefx.planning import planner, pricing
from moefx.planning.memory import peaks
from moefx.planning.pieces import GATHERED, SCATTERED
from moefx.planning.planner import SIMPLER, decide
from moefx.planning.pricing import Price
from moefx.planning.restoring import restore
from moefx.planning.schedules import Sizes
from tests.planning.test_planner import machine
from tests.planning.test_schedules import MACHINES, numbers, of
from tests.support.models import shallow
from tests.support.scenarios import check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

PARTS = {"ep": 2, "esp": 4}
FREE = replace(machine(message_s=1e-12, bytes_per_s=2e4, flops=1e18, launch_s=0.0, intra=1.0, ranks_per_node=4096),
               memory_bytes_per_s=1e18)  # where nothing but bytes takes time
ROOM = 1e15  # bytes: whatever is gathered fits
TUTEL = {"ep": 32, "esp": 4}  # one expert on each place


def on_one_node(step, ctx, tokens: int):
    """The same program for so many tokens of a rank; all links are one."""
    sizes = dict.fromkeys(map(str, compat.size_hints(ctx.fake_mode)), tokens)
    return step, replace(ctx, sizes=sizes, mesh=replace(ctx.mesh, ranks_per_node=None))


def best_of(plan) -> dict[int, float]:
    """Seconds of the fastest candidate, by r."""
    found = {}
    for each in reversed(plan.candidates):
        found[plan.adaptive and (4 if each.choice.r is None else each.choice.r)] = each.seconds
    return found


@pytest.mark.parametrize("r", [2, pytest.param(1, marks=pytest.mark.full)])
def test_it_is_priced_as_the_program_that_has_it(r):
    """Every stage within a thousandth, and to the byte what weights are gathered and summed."""
    (step, ctx), (other, other_ctx) = of(PARTS), of(PARTS, r=r)
    facts = ctx.decisions.regions[0]
    ours, theirs = numbers_with(r, numbers(step, ctx, "s1", 0), ctx), numbers(other, other_ctx, "s1", 0)
    way = way_with(r, facts.way, ctx)
    assert way == other_ctx.decisions.regions[0].way
    over = weights_over(ctx.mesh, r)
    assert over == other_ctx.weights_over(0)
    for cluster in MACHINES.values():
        prices = Price(ctx, cluster, way, 1, over), Price(other_ctx, cluster, way)
        for choice, graph in itertools.product((Choice(), Choice(4), Choice(2, "2dh")), ours):
            a, b = (price.seconds_of_stages(found[graph], choice) for price, found in zip(prices, (ours, theirs)))
            moved = {kind: a.pop(kind) for kind in (GATHERED, SCATTERED, "G")}
            assert a == pytest.approx({kind: b[kind] for kind in a}, rel=5e-3, abs=2e-7)
            assert (moved[SCATTERED] > 0) == (graph == "backward")
            assert moved[GATHERED] > 0
    sizes = Sizes.of(other, other_ctx).split
    for graph, gm in other.graphs.items():
        starts = [node for node in gm.graph.find_nodes(op="call_function", target=start)
                  if unsplit(node)[0].name in ("gather_weights", "scatter_weights")]  # fmt: skip
        sent = sum(at(amounts_of(node).payload, sizes) for node in starts)
        assert sent == 2 * sum(p.amounts.payload for kind in (GATHERED, SCATTERED) for p in ours[graph][kind])
        assert {unsplit(node)[0].stage for node in starts} <= {Stage.WEIGHTS, Stage.COPIES}


@pytest.mark.parametrize("r", [2, 1, 0])
def test_memory_is_that_of_the_program_that_has_it(r):
    """Within 17 %, where rows need most of it."""
    (step, ctx), (other, other_ctx) = (on_one_node(*of(PARTS, r=n), 4096) for n in (None, r))
    sizes, options = Sizes.of(other, other_ctx).split, ctx.options.changed(chunks=1, alltoall="direct", split="s1")
    true = max(each.bytes for each in peaks(other, other_ctx, sizes).values())
    found = decide(step, replace(ctx, options=options.changed(r=r)), MACHINES["slow"], limit=ROOM)
    assert all(plan.chosen.more.rows < 1 for plan in found.regions)
    estimates = max(plan.chosen.memory for plan in found.regions), found.memory
    assert estimates == pytest.approx((true, true), rel=0.17)


def test_without_an_exchange_all_weights_are_gathered():
    (step, ctx), (other, other_ctx) = of(PARTS), of(PARTS, r=0)
    assert other_ctx.decisions.regions[0].way == way_with(0, ctx.decisions.regions[0].way, ctx)
    ours = numbers_with(0, numbers(step, ctx, "s1", 0), ctx)
    assert all(ours[graph][kind] == [] for graph in ours for kind in ("A1", "A2"))
    products = [p.amounts.gemm for p in ours["forward"]["E"] if p.amounts.gemm]
    sizes, found = Sizes.of(other, other_ctx).split, []
    for node in other.forward.graph.nodes:
        gemm = amounts_of(node).gemm
        if gemm is not None and "grouped" in str(node.target):
            found.append(tuple(at(getattr(gemm, dim), sizes) for dim in ("m", "n", "k", "batch")))
    assert found[: len(products)] == [(gemm.m, gemm.n, gemm.k, gemm.batch) for gemm in products]


def test_the_planner_finds_the_example_of_the_paper():
    """Bytes of rows and weights as in Tutel's example with a quarter of the tokens, where r = 2 is fastest; with more
    r falls to 1, with fewer it is that of all ranks. f* says where, within one divisor."""
    step, ctx = of(TUTEL, tokens=12)
    plan = decide(*on_one_node(step, ctx, 12), FREE, limit=ROOM).regions[0]
    assert plan.adaptive.weights * 4 / plan.adaptive.rows == pytest.approx(8)  # 67 MB to a quarter of 33.5
    assert plan.chosen.choice.r == plan.adaptive.fastest == 2
    assert plan.adaptive.optimum == pytest.approx(6**0.5, rel=0.02)
    best = best_of(plan)
    assert best[2] == min(best.values()) < best[4] < best[1]
    assert best[2] == pytest.approx(plan.adaptive.seconds[2], rel=0.02)
    degrees, found = [4, 2, 1, 0], []
    ctx = replace(ctx, options=Options(chunks=1, scheduler="optsche"))
    for tokens in (2, 6, 12, 18, 36, 500):
        plan = decide(*on_one_node(step, ctx, tokens), FREE, limit=ROOM).regions[0]
        chosen = 4 if plan.chosen.choice.r is None else plan.chosen.choice.r
        found.append(chosen)
        assert plan.chosen.seconds <= min(best_of(plan).values()) * (1 + SIMPLER)
        by_formula = degrees.index(plan.adaptive.fastest)
        assert abs(degrees.index(chosen) - by_formula) <= 1
        faster_one = best_of(plan)[1] < best_of(plan)[4]
        assert faster_one == (plan.adaptive.crossover < 1)
    assert found == sorted(found, reverse=True)
    assert {4, 2, 1} <= {*found}


def test_experts_of_one_rank_each_leave_zero_and_one():
    """All experts are gathered only where somebody says that there is room."""
    plan = decide(*of({"ep": 4}), FREE).regions[0]
    assert {each.choice.r for each in plan.candidates} == {None}
    assert plan.adaptive is None
    plan = decide(*of({"ep": 4}), FREE, limit=ROOM).regions[0]
    assert {each.choice.r for each in plan.candidates} == {None, 0}
    assert {*plan.adaptive.seconds} == {0, 1}


def test_schedules_that_gather_rows_or_tokens_go_to_all():
    step, ctx = of(PARTS)
    plan = decide(step, ctx, MACHINES["slow"], limit=ROOM).regions[0]
    by = {}
    for each in plan.candidates:
        by.setdefault(each.choice.split, set()).add(each.choice.r)
    assert by == {"s1": {None, 2, 1, 0}, "s3": {None}, "baseline": {None}}


@pytest.mark.parametrize("r", [4, 2, 1, 0])
def test_options_force_it(r):
    step, ctx = of(PARTS)
    plan = decide(step, replace(ctx, options=Options.named(r=r)), MACHINES["slow"]).regions[0]
    assert {each.choice.r for each in plan.candidates} == {None if r == 4 else r}
    assert plan.is_whole == (r == 4 and plan.chosen.choice.chunks == 1 and plan.chosen.choice.split == "s1")


def test_no_time_falls_where_links_are_slower():
    """Of what is chosen, in the latency and in the time per byte."""
    step, ctx = of(PARTS)
    ctx = replace(ctx, options=Options(scheduler="optsche", alltoall="direct"))
    for changes in ([{"message_s": 1e-6 * f} for f in (0.1, 1, 100)],
                    [{"bytes_per_s": 1e9 / f} for f in (0.1, 1, 100)]):  # fmt: skip
        plans = [decide(step, ctx, machine(**each, ranks_per_node=4)).regions[0] for each in changes]
        times = [[plan.candidates[0].seconds for plan in plans], [best_of(plan)[1] for plan in plans]]
        assert all(found == sorted(found) for found in times)


def test_work_ahead_hides_what_is_gathered():
    step, ctx = of(PARTS)
    facts, found = ctx.decisions.regions[0], numbers_with(1, numbers(step, ctx, "s1", 0), ctx)
    way, cluster, seconds = way_with(1, facts.way, ctx), replace(MACHINES["slow"], ranks_per_node=64), []
    for before in (0.0, 1e-3, 1.0):
        price = Price(ctx, cluster, way, 1, "esp0+esp1", {"forward": before, "backward": before})
        seconds.append(price.candidate(found, Choice()))
    moved = [sum(price.seconds_of_stages(pieces, Choice())[kind] for kind in (GATHERED, SCATTERED)
                 for pieces in found.values())]  # fmt: skip
    assert seconds[0].seconds > seconds[1].seconds > seconds[2].seconds
    assert seconds[0].seconds - seconds[2].seconds <= moved[0] * 1.001
    plain = Price(ctx, MACHINES["slow"], facts.way).candidate(numbers(step, ctx, "s1", 0), Choice())
    hidden = Price(ctx, MACHINES["slow"], facts.way, before={"forward": 1.0}).candidate(
        numbers(step, ctx, "s1", 0), Choice())  # fmt: skip
    assert plain == hidden  # nothing is gathered


def test_what_is_gathered_within_a_node_slows_the_work_ahead_down():
    """Though what hides it is no exchange of the region, and the region's own go between nodes."""
    step, ctx = of(PARTS)
    facts, found = ctx.decisions.regions[0], numbers_with(1, numbers(step, ctx, "s1", 0), ctx)
    way, over, cluster = way_with(1, facts.way, ctx), weights_over(ctx.mesh, 1), replace(
        MACHINES["slow"], ranks_per_node=4)  # fmt: skip
    prices = [Price(ctx, each, way, 1, over, {"forward": 1.0}) for each in
              (cluster, replace(cluster, interference={("compute", "intra"): 0.5, ("intra", "compute"): 1.0}))]
    assert (prices[0].weights, prices[0].link) == ("intra", "inter")
    alone, beside = (price.candidate(found, Choice()).forward_s for price in prices)
    gathered = prices[0].seconds_of_stages(found["forward"], Choice())[GATHERED]
    assert beside - alone == pytest.approx(gathered / 2)


@pytest.mark.parametrize("share", [pytest.param(1.1, marks=pytest.mark.full), 0.9, 0.75])
def test_within_a_limit_nothing_is_faster(share, monkeypatch):
    """Chunks, r and what is kept, jointly: as fast as the best of all pairs of candidates, each with the best mix."""
    monkeypatch.setattr(planner, "DEGREES", (1, 4))
    step, ctx = of(PARTS)
    ctx = replace(ctx, options=Options(alltoall="direct", scheduler="optsche"))
    cluster = machine(bytes_per_s=2e8, flops=2e10, ranks_per_node=8)
    free = decide(step, ctx, cluster, limit=1e12)
    limit = share * free.memory
    found = decide(step, ctx, cluster, limit=limit)
    kept = found.restoring
    total = sum(plan.chosen.seconds for plan in found.regions) + sum(row.seconds for row in kept.rows)
    assert kept.bytes <= limit
    every = [[c for c in plan.candidates if c.choice.split != "baseline"] for plan in found.regions]
    best = float("inf")
    for pair in itertools.product(*every):
        if pair[0].choice == pair[1].choice or share > 1:
            alone = {plan.region: [each] for plan, each in zip(found.regions, pair)}
            one = restore(step, ctx, cluster, found.sizes, {n: each[0] for n, each in alone.items()}, alone, limit)
            if one.bytes <= limit:
                best = min(best, sum(each.seconds for each in pair) + sum(row.seconds for row in one.rows))
    assert total <= best * (1 + 1e-9) + SIMPLER * best * (share > 1)


def test_weights_that_are_gathered_need_room():
    step, ctx = of(PARTS)
    plan = decide(step, ctx, machine(ranks_per_node=8), limit=ROOM).regions[0]
    by = {}
    for each in plan.candidates:
        if each.choice.chunks == 1 and each.choice.split == "s1":
            by[each.choice.r] = each.more
    assert by[None].weights == 0
    assert 0 < by[2].weights < by[1].weights < by[0].weights
    assert (by[2].rows, by[1].rows) == (0.5, 0.25)
    # Two parameters, the next one, and the gradients of two.
    assert by[1].weights == 5 / 2 * 4 * plan.adaptive.weights


def test_arms_say_r_where_it_is_open():
    step, ctx = of(PARTS)
    decision = decide(step, ctx, machine(ranks_per_node=8))
    plan = decision.regions[0]
    said = {each.choice.r: dict(arms.arm_of(each, plan, Options())).get("r") for each in plan.candidates}
    assert said == {None: 4, 2: 2, 1: 1}
    given = decide(step, replace(ctx, options=Options.named(r=4)), machine(ranks_per_node=8)).regions[0]
    assert "r" not in dict(arms.arm_of(given.chosen, given, Options.named(r=4)))
    one = decide(*of({"ep": 4}), machine()).regions[0]
    assert "r" not in dict(arms.arm_of(one.chosen, one, Options()))


@pytest.mark.parametrize("limit", [None, 1e6])
def test_every_candidate_is_scheduled_once_a_pass(limit, monkeypatch):
    """All schedules, r, all-to-alls, chunks and orders, on nodes of two ranks; within a limit with what is kept."""
    scheduled = []
    plain = pricing.schedule
    monkeypatch.setattr(pricing, "schedule", lambda *args, **more: scheduled.append(args) or plain(*args, **more))
    step, ctx = of(PARTS)
    ctx = replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2))
    found = decide(step, ctx, replace(MACHINES["slow"], ranks_per_node=2), limit=limit)
    candidates = [len(plan.candidates) for plan in found.regions]
    assert len({repr(plan.candidates) for plan in found.regions}) == 2
    assert all(number > 80 for number in candidates)
    assert 2 * sum(candidates) == len(scheduled)


def _run(rank, world, layout, case, steps, cluster):
    """Compares with the eager model; the r that was chosen, and how many programs there are."""
    compile_fn = functools.partial(moefx.compile, options=Options(machine=cluster, chunks=2, alltoall="direct"))
    with closing(compiled_case(case, layout, compile_fn)) as compiled:
        check_compiled(rank, layout, case, steps, compiled)
        found = moefx.explain(compiled)
        return [region.choice.r for region in found.regions], [*found.regions[0].plan.adaptive.seconds]


@pytest.mark.full
def test_what_was_chosen_is_what_runs(monkeypatch):
    feature = rooms.FEATURES["adaptive"]
    changed = replace(feature.degrees, allowed=lambda number, split, ctx, *more: (
        (1,) if split == "s1" and ctx.options.parallel.r is None else allowed(number, split, ctx, *more)))  # fmt: skip
    monkeypatch.setitem(rooms.FEATURES, "adaptive", replace(feature, degrees=changed))
    monkeypatch.setattr(planner, "allowed", lambda region, ctx: ("s1",))
    case, layout = shallow("mixtral-grouped_mm"), ((2, 2), ("ep", "esp"))
    found = run_sharing(4, _run, layout, case, steps_of(case, [[(2, 6), (3, 10), (2, 4), (1, 8)]]), MACHINES["slow"])
    assert {tuple(rs) for rs, _ in found} == {(1,)}
    assert all(table == [1, 2, 0] for _, table in found)
