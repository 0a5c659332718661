"""The planner on real graphs and hand-made machines: what it chooses, and that nothing it looked at is better."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace

import pytest
import torch

from moefx.analysis.tasks import stage_of
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.decisions import Choice
from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.curves import AlphaBeta, GemmModel
from moefx.costmodel.machine import ROUNDS, Machine, Provenance
from moefx.costmodel.machines import PRESETS, preset
from moefx.costmodel.tasks import COMPUTE
from moefx.errors import MoefxError
from moefx.extend import Algorithm, Exchange, register_all_to_all
from moefx.ir.edit import copy_of
from moefx.ir.op import Sent, Stage
from moefx.ir.ops.order import start
from moefx.ir.regions import region_of
from moefx.options import Options
from moefx.passes import expand_transport, order, split_waits, weigh_inside
from moefx.planning import planner
from moefx.planning.memory import Footprint
from moefx.planning.pieces import as_written, in_numbers, scaled, stages_of
from moefx.planning.planner import SIMPLER, check_names, decide
from moefx.planning.pricing import Price, Prices
from moefx.planning.schedules import Sizes
from moefx.transport import algorithms
from tests.support.graphs import context, graph

ASSUMED = Provenance("assumed", "made for a test")
# Two MoE layers of one shape with a dense one before, so that rows have gradients in the backward, too.
LAYER = """
    {y} = F.linear({x}, proj)
    up{i}_e = expert_parameter(up{i}, {i})
    down{i}_e = expert_parameter(down{i}, {i})
    topk{i} = torch.topk(F.softmax(F.linear({y}, gate), dim=-1), 2, dim=-1)
    weights{i} = topk{i}[0]
    idx{i} = topk{i}[1]
    route{i} = m.route.default(idx{i}, 32)
    perm{i} = route{i}[0]
    counts{i} = route{i}[1]
    rows{i} = m.dispatch.default({y}, perm{i}, 2)
    inside{i} = enter(rows{i}, counts{i}, -1, -1, {i})
    hidden{i} = F.silu(m.grouped_linear.default(inside{i}, up{i}_e, counts{i}, False))
    out{i} = m.grouped_linear.default(hidden{i}, down{i}_e, counts{i}, False)
    outside{i} = leave(out{i}, counts{i}, -1, -1, {i})
    z{i} = m.combine.default(outside{i}, perm{i}, 2, weights{i})
"""
EXPERTS = 'up{i}: "f32[32, 96, 64]", down{i}: "f32[32, 64, 96]"'
INPUTS = 'x: "f32[s0, 64]", proj: "f32[64, 64]", gate: "f32[32, 64]", ' + ", ".join(EXPERTS.format(i=i) for i in (0, 1))
LAYERS = [LAYER.format(i=i, x=x, y=f"y{i}") for i, x in enumerate(("x", "z0"))]
SOURCE = f"def graph({INPUTS}):\n" + "".join(line for layer in LAYERS for line in layer[1:].splitlines(True))
SOURCE += "    return (z1,)\n"


def machine(*, message_s=1e-6, bytes_per_s=1e9, intra=10.0, flops=1e12, launch_s=1e-7, ranks_per_node=64, codecs=None):
    """intra: how much faster a link within a node is."""
    links = {"inter": AlphaBeta.of(message_s, 1 / bytes_per_s),
             "intra": AlphaBeta.of(message_s / intra, 1 / bytes_per_s / intra)}
    keys = {(collective, link, kind): curve for link, curve in links.items()
            for collective, kind in (("all_to_all", "direct"), *((c, "ring") for c in ROUNDS))}
    return Machine("hand-made", ASSUMED, {"float32": GemmModel(flops)}, 1e12, launch_s, keys,
                   {way: AlphaBeta.of(1e-6, 1e-10) for way in ("d2h", "h2d")}, ranks_per_node, codecs=codecs or {})


def whole(options=None, **sizes):
    """(step graphs with whole regions, context), as the planner gets them."""
    step, ctx = made(**sizes)
    return step, replace(ctx, options=options or Options())


@functools.cache
def made(*, ep=4, tokens=4096, per_node=None, weighable=False):
    """weighable: the planner may have scores applied inside of experts."""
    gm, mode = graph(SOURCE, sizes={"s0": tokens})
    ctx = context(mode, ep=ep)
    ctx.mesh, ctx.decisions.whole = replace(ctx.mesh, ranks_per_node=per_node), True
    if weighable:
        weigh_inside.run(gm, ctx)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    return step, ctx


def chosen(step, ctx, machine):
    """The choice of the first layer."""
    return decide(step, ctx, machine).choices[0]


@pytest.fixture(scope="module")
def one_node():
    return whole()


@pytest.fixture(scope="module")
def many_nodes():
    """32 ranks, 8 per node, few tokens."""
    return whole(ep=32, tokens=64, per_node=8)


def test_exchanges_as_long_as_computation_are_hidden_in_chunks(one_node):
    found = decide(*one_node, machine(bytes_per_s=4e8, flops=1e11))
    plan = found.regions[0]
    direct = next(c for c in plan.candidates if c.choice == Choice())
    assert plan.chosen.choice.chunks > 1
    assert plan.chosen.seconds < 0.9 * direct.seconds
    assert plan.chosen.exposed_s < direct.exposed_s
    assert "times as fast as the whole region" in plan.reason


def test_computation_alone_or_tiny_messages_stay_whole(one_node):
    step, ctx = one_node
    assert chosen(step, ctx, machine(bytes_per_s=1e12, flops=1e9)) == Choice()
    assert chosen(step, ctx, machine(message_s=1.0)) == Choice()
    assert chosen(step, ctx, machine(launch_s=1.0)) == Choice()
    assert decide(step, ctx, machine(message_s=1.0)).is_whole


def test_many_ranks_and_small_messages_go_in_two_steps(many_nodes):
    assert chosen(*many_nodes, machine(message_s=1e-3, bytes_per_s=1e9, ranks_per_node=8)).alltoall == "2dh"
    assert chosen(*many_nodes, machine(message_s=1e-9, bytes_per_s=1e8, ranks_per_node=8)).alltoall != "2dh"


def test_two_links_that_take_equally_long_are_used_at_once():
    step, ctx = whole(ep=4, tokens=65536, per_node=2)
    equal = machine(message_s=1e-9, bytes_per_s=1e8, intra=0.5, ranks_per_node=2)
    assert chosen(step, ctx, equal).alltoall == "pipe"
    # one that finds no hidden time in it because both parts share a bus has no use for it
    assert chosen(step, ctx, replace(equal, pipe_rho=1.0)).alltoall != "pipe"


def test_what_an_exchange_costs_besides_its_link_counts():
    """Starts, for chunks and hierarchical exchanges; copies of rows, for the latter; links that hinder one another."""
    step, ctx = whole(per_node=2)
    cluster = machine(bytes_per_s=4e8, flops=1e11, ranks_per_node=2)
    free = decide(step, ctx, cluster).regions[0]
    plain = decide(step, ctx, replace(cluster, start_s=1e-3)).regions[0]
    assert free.chosen.choice.chunks > plain.chosen.choice.chunks

    def of(found, choice):
        return next(c.seconds for c in found.candidates if c.choice == choice)

    for choice, starts in ((Choice(2), 8), (Choice(2, "2dh"), 16)):
        options = Options(chunks=2, alltoall=choice.alltoall, scheduler="sequential")
        times = [decide(*whole(options, per_node=2), replace(cluster, start_s=start_s)).regions[0].candidates[0].seconds
                 for start_s in (0.0, 1e-3)]  # fmt: skip
        assert times[1] - times[0] == pytest.approx(starts * 1e-3)
    slow_rows = decide(step, ctx, replace(cluster, rows_bytes_per_s=1e8)).regions[0]
    assert of(slow_rows, Choice(1, "2dh")) - of(slow_rows, Choice()) > of(free, Choice(1, "2dh")) - of(free, Choice())
    pairs = {("intra", "inter"): 0.5, ("inter", "intra"): 0.5}
    shared = decide(step, ctx, replace(cluster, interference=pairs)).regions[0]
    assert of(shared, Choice(1, "pipe")) > of(free, Choice(1, "pipe"))
    assert of(shared, Choice()) == of(free, Choice())


def test_predicted_orders_know_what_hinders_what():
    """Of a step whose weight gradients run beside exchanges: as long as the slower of both makes it."""
    step, ctx = whole(Options(scheduler="optsche"))
    times = []
    for pairs in ({}, {(COMPUTE, "intra"): 0.5, ("intra", COMPUTE): 0.5}, {(COMPUTE, "inter"): 0.5}):
        prices = Prices(step, replace(ctx, machine=replace(machine(bytes_per_s=4e8, flops=1e11), interference=pairs)))
        known = replace(ctx.decisions, time_of=prices, rates=prices.rates, orders=[])
        order.run(copy_of(step.backward), replace(ctx, decisions=known))
        times.append(known.orders[0].timeline.makespan)
    assert times[1] > 1.05 * times[0]
    assert times[2] == times[0]  # all ranks are on one node


def test_nodes_that_are_not_there_are_not_considered(one_node):
    for plan in decide(*one_node, machine()).regions:
        assert {c.choice.alltoall for c in plan.candidates} == {"direct"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_regret_against_brute_force(many_nodes, name):
    """Every point of the space priced one by one; the choice is as fast as the best but for the tie rule."""
    step, ctx = many_nodes
    cluster = replace(preset(name), collectives={**machine().collectives, **preset(name).collectives},
                      gemm={**machine().gemm, **preset(name).gemm}, copies=machine().copies, ranks_per_node=8)
    found = decide(step, ctx, cluster)
    stages = {part: stages_of(gm.graph.nodes, ctx)[0].pieces for part, gm in step.graphs.items()}
    numbers = {part: {kind: [in_numbers(p, found.sizes) for p in pieces] for kind, pieces in mine.items()}
               for part, mine in stages.items()}
    space = itertools.product(planner.DEGREES, planner.FORMULAS, ("identity",), planner.SCHEDULERS)
    price = Price(ctx, cluster, ctx.decisions.regions[0].way)
    whole = as_written(numbers)
    best = min(price.candidate(whole if point[0] == 1 else numbers, Choice(*point)).seconds for point in space)
    assert found.regions[0].candidates[0].seconds == pytest.approx(best)
    assert found.regions[0].chosen.seconds <= best * (1 + SIMPLER)


def test_weight_gradients_hide_what_they_do_as_written():
    """The planner takes those to be late that the pass puts behind the start of an exchange, in each of two regions."""
    step, ctx = made.__wrapped__()
    by_region = stages_of(step.backward.graph.nodes, ctx)
    order.run(step.backward, replace(ctx, options=Options(scheduler=None)))
    nodes = [*step.backward.graph.nodes]
    for region, found in by_region.items():
        sent = [i for i, n in enumerate(nodes)
                if n.target is start and stage_of(n) is Stage.BACK and region_of(n) == region]
        late = [nodes.index(n) > sent[0] for n in nodes if found.kinds.get(n.name) == "W"]
        assert sorted(late) == [False, True]
        assert sorted(piece.early for piece in found.pieces["W"]) == [False, True]
        written = as_written({"backward": found.pieces})["backward"]
        assert len(written["W"]) == 1
        assert len(written["E"]) == len(found.pieces["E"]) + 1


def test_a_chunk_sends_its_share_of_what_a_node_says_it_sends():
    whole = Amounts(Kind.COLLECTIVE, collective="all_to_all", sent=(Sent("inter", 3, 6000.0),))
    assert scaled(whole, 1 / 4).sent == (Sent("inter", 3, 1500.0),)


def test_every_rank_chooses_the_same():
    cluster = preset("emulated-200mbit")
    first, second = (decide(*made.__wrapped__(ep=4, per_node=2), cluster) for _ in range(2))
    assert first == second


def test_equal_layers_are_priced_once_and_quickly(many_nodes, monkeypatch):
    step, ctx = many_nodes
    start = time.process_time()
    found = decide(step, ctx, machine(ranks_per_node=8))
    assert time.process_time() - start < 2  # about 0.2 s
    assert [plan.region for plan in found.regions] == [0, 1]
    calls = []
    plain = Price.candidate
    monkeypatch.setattr(Price, "candidate", lambda *args: calls.append(args[-1]) or plain(*args))
    stages = {name: stages_of(gm.graph.nodes, ctx)[0] for name, gm in step.graphs.items()}
    asked = planner._Planner(ctx, machine(ranks_per_node=8), Sizes(found.sizes, found.sizes), {}, None)
    first = asked.plan(0, stages, {True: [Footprint(1.0, 2.0)]})
    assert len(calls) == len(set(calls)) > 20
    asked.caches.clear()
    second = asked.plan(1, stages, {True: [Footprint(1.0, 4.0)]})  # the same work, other memory
    assert len(calls) == len(set(calls))  # none again
    assert [c.seconds for c in second.candidates] == [c.seconds for c in first.candidates]
    assert second.chosen.memory > first.chosen.memory


def test_options_force_what_they_name():
    options = Options.named(chunks=3, alltoall="2dh", codec="int8", scheduler="sequential")
    found = decide(*whole(options, per_node=2), machine(ranks_per_node=2))
    assert [plan.chosen.choice for plan in found.regions] == [Choice(3, "2dh", "int8", "sequential")] * 2
    assert found.regions[0].reason == "the options, and what was learned of other batch sizes, leave no other choice"
    assert not found.is_whole


def test_codecs_only_when_allowed():
    slow = machine(bytes_per_s=1e6)
    assert chosen(*whole(), slow).codec == "identity"
    assert chosen(*whole(Options.named(lossy=True)), slow).codec == "int8"
    assert chosen(*whole(Options.named(lossy=True)), machine(bytes_per_s=1e12, flops=1e9)).codec == "identity"


def test_codecs_cost_what_was_measured():
    """In the choice, and in the prices of the program's nodes; without figures, a pass over memory."""
    names = [f"{stage}/{name}" for stage in ("compress", "decompress") for name in ("bf16", "int8")]
    second = dict.fromkeys(names, AlphaBeta.of(1.0, 0.0))
    for rate, codec in ((1e6, "identity"), (1e3, "int8")):
        assert chosen(*whole(Options.named(lossy=True)), machine(bytes_per_s=rate, codecs=second)).codec == codec
    step, ctx = uneven()
    coding = [node for op in (torch.ops.moefx.encode, torch.ops.moefx.decode)
              for node in step.forward.graph.find_nodes(op="call_function", target=op.default)]  # fmt: skip
    assert len(coding) == 8
    for codecs, low, high in ((second, 1.0, 1.0), ({}, 1e-7, 1e-4)):
        prices = Prices(step, replace(ctx, machine=machine(codecs=codecs)))
        assert all(low <= prices(node) <= high for node in coding)


@functools.cache
def uneven():
    """Three ranks, in a program with codecs."""
    gm, mode = graph(SOURCE.replace("32, ", "33, ").replace(", 32)", ", 33)"), sizes={"s0": 64})
    ctx = context(mode, Options.named(codec="int8"), ep=3)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    expand_transport.run(step.forward, ctx)
    return step, ctx


def test_forced_choices_are_kept_where_nothing_is_exchanged():
    found = decide(*whole(Options(chunks=2), ep=1), machine())
    assert found.regions == ()
    assert found.choices == {0: Choice(2), 1: Choice(2)}
    assert not found.is_whole


def test_an_algorithm_without_formula_is_priced_as_direct_and_says_so(monkeypatch):
    monkeypatch.setattr(algorithms, "_ALGORITHMS", dict(algorithms._ALGORITHMS))
    register_all_to_all("mine", Algorithm((Exchange("one", "all", to=lambda b: b.target),)))
    mine, direct = (decide(*whole(Options(alltoall=name)), machine()).regions[0] for name in ("mine", "direct"))
    assert mine.chosen.seconds == direct.chosen.seconds
    assert mine.notes == ("there is no formula for the all-to-all 'mine': it is priced as 'direct'",)
    assert direct.notes == ()


def test_a_larger_batch_never_gets_fewer_chunks():
    """The cache of the first program bounds the search for the others, whatever their times are."""
    cluster, caches, answers = machine(bytes_per_s=4e8, flops=1e11, message_s=1e-4), {}, {}
    for tokens in (64, 65536, 4096):
        found = decide(*whole(tokens=tokens), cluster, caches=caches)
        caches, answers[tokens] = found.caches, found.choices[0].chunks
    assert answers[64] <= answers[4096] <= answers[65536]
    assert answers[64] < answers[65536]
    again = decide(*whole(tokens=65536), cluster, caches=caches)
    fresh = decide(*whole(tokens=65536), cluster)
    assert len(again.regions[0].candidates) < len(fresh.regions[0].candidates)
    assert again.choices == fresh.choices


def test_uneven_ranks_have_prices_without_a_machine():
    """Three ranks do not fill nodes of two; the default machine may not fail over it."""
    step, ctx = uneven()
    nodes = [n for n in step.forward.graph.nodes if n.op == "call_function"]
    for per_node in (None, 2):
        prices = Prices(step, replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=per_node)))
        assert sum(map(prices, nodes)) > 0


@pytest.mark.parametrize(("options", "message", "hint"), [
    ({"alltoall": "3dh"}, "no all-to-all '3dh'", "direct, 1dh, 2dh, pipe"),
    ({"scheduler": "fifo"}, "no scheduler 'fifo'", "sequential, optsche, heuristic, optimal"),
    ({"codec": "zip"}, "no codec 'zip'", "identity, bf16, int8, fp8-e4m3, fp8-e5m2, zfp"),
])  # fmt: skip
def test_unknown_names_are_refused_with_the_known_ones(options, message, hint):
    with pytest.raises(MoefxError, match=message) as caught:
        check_names(Options.named(**options))
    assert hint in caught.value.hint
    check_names(Options.named(alltoall="pipe", scheduler="optimal", codec="bf16"))
