"""Ways: rows take every hop once, in order, over its axis; every fault of a hop is named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.costmodel.machines import preset
from moefx.errors import VerifyError
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import lookup, value
from moefx.ir.ops.order import start
from moefx.ir.regions import per_token, region_of, tag
from moefx.ir.rules import BACKWARD, FORWARD, WHOLE, Facts, View
from moefx.ir.rules_ways import experts_are_cut_as_rows_travel, rows_take_their_way
from moefx.ir.ways import A2A, BLOCKS, Hop, Way, there_and_back
from moefx.options import Options
from moefx.passes import chunk, expand_transport, split_waits
from moefx.planning.pricing import Price
from tests.support.breadth import places
from tests.support.graphs import context, graph
from tests.support.small import MOE

CAPACITY = """
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 16]", up: "f32[16, 16, 12]"):
    up_e = expert_parameter(up, 0)
    inside = enter(torch.einsum('te,td->etd', x_gate.softmax(-1), x), None, 0, 1, 0)
    outside = leave(torch.bmm(inside, up_e).tanh(), None, 0, 1, 0)
    y = outside.sum(0)
    return (y,)
"""

# A number of every expert scales its rows, behind the way back: its rows are made where the experts are.
MADE_THERE = MOE.replace('down: "f32[8, 16, 24]"', 'down: "f32[8, 16, 24]", own: "f32[8, 16]"').replace(
    "    result =", """    own_e = expert_parameter(own, 0)
    pairs = ops.aten.sym_size.int(perm, 0)
    made = m.expert_rows.default(own_e, counts, pairs)
    sent = leave(made, counts, -1, -1, 0)
    result =""").replace("combine.default(outside", "combine.default(outside * sent")


def program(source, *, chunks=1, **options):
    """({graph: its nodes at PLACED}, facts of each) of a small model on a mesh dp=2, ep=2."""
    gm, mode = graph(source)
    ctx = context(mode, Options.named(chunks=chunks, **options), dp=2, ep=2 if options.get("alltoall") is None else 4)
    ctx = replace(ctx, mesh=replace(ctx.mesh, ranks_per_node=2))
    outputs = tuple(value(n) for n in gm.graph.output_node().args[0])
    for one in (chunk, place_experts):
        one.run(gm, ctx)
        refresh(gm, ctx)
    ways = {number: region.way for number, region in ctx.decisions.regions.items()}
    whole = edit.copy_of(gm)
    step = pipeline.differentiated(gm, ctx)
    facts = {name: Facts(ctx.mesh, name, outputs=outputs, ways=ways) for name in (WHOLE, FORWARD, BACKWARD)}
    for part in step.graphs.values():
        expand_transport.run(part, ctx)
    return {WHOLE: whole, **step.graphs}, facts, ctx


def check(graphs, facts, name, level=Level.PLACED):
    rows_take_their_way.check(View(graphs[name], level, facts[name]))


def _name(each) -> str:
    return {MOE: "rows", MADE_THERE: "made there", CAPACITY: "blocks"}.get(each, each) if isinstance(each, str) else (
        "-".join(map(str, each.values())) or "direct")


WAYS = [{}, {"alltoall": "2dh"}, {"alltoall": "pipe", "codec": "bf16"}, {"chunks": 2}]


@pytest.mark.parametrize(("source", "options"), places(
    itertools.product([MOE, MADE_THERE, CAPACITY], WAYS), 0, 1, 2, 3, 7, 10), ids=_name)
def test_good_graphs_take_their_ways(source, options):
    graphs, facts, ctx = program(source, **options)
    kind = BLOCKS if source is CAPACITY else A2A
    assert set(facts[WHOLE].ways.values()) == {Way(out=(Hop(kind, "ep"),), back=(Hop(kind, "ep"),))}
    for name in graphs:
        check(graphs, facts, name)
    for name in (FORWARD, BACKWARD):
        split_waits.run(graphs[name], ctx)
        check(graphs, facts, name, Level.SCHEDULED)


def exchanges(gm, *, reverse):
    names = ("all_to_all", "all_to_all_capacity")
    found = [n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name in names]
    return [n for n in found if n.args[-1] is reverse]


def dropped(gm, reverse):
    node = exchanges(gm, reverse=reverse)[0]
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)


def doubled(gm, reverse):
    node = exchanges(gm, reverse=reverse)[0]
    with edit.at(node, after=True):
        again = edit.call(gm.graph, node.target, node, *node.args[1:])
    again.meta["val"] = value(node)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def over_another_axis(gm, reverse):
    node = exchanges(gm, reverse=reverse)[0]
    node.args = tuple("dp" if a == "ep" else a for a in node.args)


def of_another_region(gm, reverse):
    other = next(r for r in map(region_of, gm.graph.nodes) if r not in (None, 0))
    tag(exchanges(gm, reverse=reverse)[:1], other)


def untagged(gm, reverse):
    exchanges(gm, reverse=reverse)[0].meta.pop("custom")


FAULTS = {
    "dropped out": (dropped, False, "takes the rows of region 0 back by {kind} over 'ep' after 0 hops"),
    "dropped back": (dropped, True, "rows of region 0 leave the model on their way, after 1 hops"),
    "doubled out": (doubled, False, "takes the rows of region 0 out by {kind} over 'ep' after 1 hops"),
    "doubled back": (doubled, True, "takes the rows of region 0 back by {kind} over 'ep' after 0 hops"),
    "over another axis": (over_another_axis, False, "takes the rows of region 0 over 'dp'"),
    "back over another axis": (over_another_axis, True, "takes the rows of region 0 over 'dp'"),
    "of no region": (untagged, False, "belongs to no region whose rows travel"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "kind", "fault"), places(
    [(*of, fault) for of in ((MOE, A2A), (MADE_THERE, A2A), (CAPACITY, BLOCKS)) for fault in FAULTS],
    *range(len(FAULTS) + 1), 2 * len(FAULTS)), ids=_name)
def test_faults_of_a_hop_are_named(source, kind, fault):
    damage, reverse, message = FAULTS[fault]
    graphs, facts, _ = program(source)
    for name in (WHOLE, FORWARD):
        damage(graphs[name], reverse)
        with pytest.raises(VerifyError) as caught:
            check(graphs, facts, name)
        assert message.format(kind=kind) in str(caught.value)
        assert fault == "of no region" or f"their way: out by {kind} over 'ep', back by {kind}" in str(caught.value)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda gm, node: node.replace_all_uses_with(node.args[0]), "leave the model on their way, after 1 hops"),
    (lambda gm, node: setattr(node, "args", (*node.args[:-1], False)), "out by a2a over 'ep' after 1 hops"),
], ids=["they stay there", "they go out"])  # fmt: skip
def test_rows_that_are_made_where_the_experts_are_go_back(damage, message):
    graphs, facts, _ = program(MADE_THERE)
    for name in (WHOLE, FORWARD):
        damage(graphs[name], exchanges(graphs[name], reverse=True)[1])
        with pytest.raises(VerifyError, match=message):
            check(graphs, facts, name)


@pytest.mark.parametrize("source", [MOE, CAPACITY], ids=["rows", "blocks"])
def test_rows_that_take_the_hop_of_another_region_are_named(source):
    graphs, facts, _ = program(source, chunks=2)
    of_another_region(graphs[FORWARD], True)
    with pytest.raises(VerifyError, match="rows of region 0 on their way take a hop of region 1"):
        check(graphs, facts, FORWARD)


def test_a_hop_that_nobody_takes_is_named():
    graphs, facts, _ = program(MOE)
    facts[WHOLE] = replace(facts[WHOLE], ways={**facts[WHOLE].ways, 7: there_and_back(A2A, "ep")})
    with pytest.raises(VerifyError, match="no rows of region 7 go out over 'ep'"):
        check(graphs, facts, WHOLE)


@pytest.mark.parametrize("source", [MOE, CAPACITY], ids=["rows", "blocks"])
def test_gradients_travel_over_the_axes_of_the_way(source):
    graphs, facts, _ = program(source)
    over_another_axis(graphs[BACKWARD], False)  # x wants no gradient: none comes back
    with pytest.raises(VerifyError, match="takes the rows of region 0 over 'dp'"):
        check(graphs, facts, BACKWARD)


def test_a_step_of_an_exchange_in_steps_over_another_axis_is_named():
    graphs, facts, ctx = program(CAPACITY, alltoall="2dh")
    for name in (FORWARD, BACKWARD):
        split_waits.run(graphs[name], ctx)
        node = next(n for n in graphs[name].graph.nodes if n.target is start and "exchange_phase" in str(n.args[0]))
        node.args = tuple("dp" if a == "ep" else a for a in node.args)
        with pytest.raises(VerifyError, match="exchange_phase takes the rows of region 0 over 'dp'"):
            check(graphs, facts, name, Level.SCHEDULED)


def test_one_rank_has_no_hops():
    assert there_and_back(A2A, "") == Way()
    assert (Way().axis, there_and_back(BLOCKS, "a+b").axis) == ("", "a+b")


def test_a_price_knows_the_links_of_all_hops():
    """Of hops within a node and between nodes, the slower link stands for both; nodes matter where one hop crosses."""
    ctx = context(None, dp=2, ep=4)
    here = replace(preset("emulated-200mbit"), ranks_per_node=2)
    near, far = Way(out=(Hop(A2A, "ep"),), back=(Hop(A2A, "ep"),)), Way(out=(Hop(A2A, "dp"), Hop(A2A, "ep")))
    assert Price(ctx, replace(here, ranks_per_node=4), near).link == "intra"
    assert (Price(ctx, here, far).link, Price(ctx, here, far).has_nodes) == ("inter", True)
    assert (Price(ctx, here, Way()).link, Price(ctx, here, Way()).has_nodes) == ("intra", False)


def test_arguments_per_token_are_those_of_the_tokens():
    gm, _ = graph(MOE)
    named = {lookup(n).name: [a.name for a in per_token(n)] for n in gm.graph.nodes if lookup(n) is not None}
    assert {name: found for name, found in named.items() if found} == {
        "route": ["idx"], "dispatch": ["x"], "combine": ["weights"]}  # fmt: skip
    combine = next(n for n in gm.graph.nodes if lookup(n) is not None and lookup(n).name == "combine")
    combine.args = combine.args[:3]
    assert per_token(combine) == ()
    assert per_token(gm.graph.call_function(torch.add, (combine, combine))) == ()


def test_experts_that_are_whole_where_rows_go_to_parts():
    gm, mode = graph(MOE)
    ctx = context(mode, ep=2, esp=2)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    ways = {number: region.way for number, region in ctx.decisions.regions.items()}
    view = View(gm, Level.PLACED, Facts(ctx.mesh, WHOLE, ways=ways))
    experts_are_cut_as_rows_travel.check(view)
    facts = replace(view.facts, ways={0: there_and_back(A2A, "ep")})
    with pytest.raises(VerifyError, match="experts of region 0 are cut over 'esp', and their rows go to parts over ''"):
        experts_are_cut_as_rows_travel.check(replace(view, facts=facts))
