"""order: a reduction is started where it holds up no exchange, with a scheduler (costmodel/filling.py says where) and
without one."""

from __future__ import annotations

import pytest

from moefx.options import Options
from moefx.passes import order
from tests.support.graphs import context, graph

BACKWARD = """
def graph(grad: "f32[s0, 16]", host: "i64[2, 8]", sent: "s0", received: "u0", w: "f32[4, 16, 16]", slots: "i64[4]"):
    out = start(ops.moefx.all_to_all.default, grad, host, received, 2, 'ep', False)
    wgrad = grad.t() @ grad
    reduction = start(ops.moefx.reduce_gradient.default, wgrad, 'dp+ep', 0.5, 5)
    arrived = wait(out)
    dgrad = m.grouped_linear.default(arrived, w, slots, True)
    back = start(ops.moefx.all_to_all.default, dgrad, host, sent, 2, 'ep', True)
    came = wait(back)
    total = came * 2.0
    reduced = wait(reduction)
    return (total, reduced)
"""
SECONDS = {"out": 2.0, "wgrad": 1.0, "dgrad": 3.0, "back": 2.0, "total": 1.0}


def ordered(reduction, scheduler, **seconds):
    """(names of nodes in their order, what users are told)."""
    gm, mode = graph(BACKWARD)
    ctx = context(mode, Options.named(scheduler=scheduler), dp=2, ep=2)
    times = SECONDS | {"reduction": reduction} | seconds
    ctx.decisions.time_of = lambda node: times.get(node.name, 0.0)
    order.run(gm, ctx)
    gm.graph.lint()
    return [node.name for node in gm.graph.nodes if node.op.startswith("call")], ctx.report.reductions.get("order", "")


@pytest.mark.parametrize("scheduler", ["optsche", "heuristic", "optimal", None])
def test_behind_the_exchange_that_it_would_hold_up(scheduler):
    names, said = ordered(1.5, scheduler)
    assert names.index("wgrad") < names.index("arrived") < names.index("reduction") < names.index("dgrad")
    if scheduler is not None:
        assert said == "1 of 1 reductions where no exchange is on their link, as predicted"


def test_behind_the_last_exchange_where_it_does_not_fit_before():
    names, _ = ordered(4.0, "heuristic", total=6.0)
    assert names.index("came") < names.index("reduction") < names.index("total")


def test_at_once_where_that_is_faster():
    """It is longer than everything else: the exchanges hide beside it."""
    names, said = ordered(50.0, "heuristic")
    assert names.index("reduction") < names.index("arrived")
    assert said.startswith("0 of 1 reductions")


def test_sequential_keeps_everything_where_it_is():
    names, said = ordered(1.5, "sequential")
    assert names.index("reduction") < names.index("dgrad")
    assert not said


# What `scaled` reads is gathered behind `out`, which is read later, while `scaled` waits for what the host reads.
GATHERED = """
def graph(grad: "f32[s0, 16]", traffic: "i64[2, 8]", host: "i64[2, 8]", received: "u0", w: "f32[4, 16]"):
    out = start(ops.moefx.all_to_all.default, grad, host, received, 2, 'ep', False)
    sizes = start(ops.moefx.counts_to_host.default, traffic, 'ep')
    gather = start(ops.moefx.gather_shards.default, [w], [16], [0], 1.0, 4, 'dp+ep', None)
    there = wait(gather)
    whole = there[0]
    told = wait(sizes)
    scaled = whole * told.sum()
    arrived = wait(out)
    total = arrived @ scaled
    return (total,)
"""


def test_a_gather_is_there_though_what_it_waits_for_is_read_later():
    gm, mode = graph(GATHERED)
    ctx = context(mode, Options.named(scheduler="optsche"), dp=2, ep=2)
    times = {"out": 2.0, "sizes": 4.0, "gather": 0.5, "scaled": 1.0, "total": 1.0}
    ctx.decisions.time_of = lambda node: times.get(node.name, 0.0)
    order.run(gm, ctx)
    names = [node.name for node in gm.graph.nodes]
    assert names.index("arrived") < names.index("gather") < names.index("scaled")
