"""order, where no scheduler was chosen: golden, no-op, what must stay in order, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.ir.ops.order import start, wait
from moefx.passes import order, split_waits
from tests.support.graphs import context, graph, short
from tests.support.small import MOE, differentiated

# The backward of two linears of experts on one rank's rows.
BACKWARD = """
def graph(x: "f32[u0, 16]", grad: "f32[s0, 16]", host: "i64[2, 8]", sent: "s0", received: "u0", w: "f32[4, 16, 16]",
          slots: "i64[4]"):
    h1 = start(ops.moefx.all_to_all.default, grad, host, received, 2, 'ep', False)
    arrived = wait(h1)
    wgrad = m.grouped_wgrad.default(x, arrived, slots, False)
    h2 = start(ops.moefx.reduce_gradient.default, wgrad, 'dp', 0.5, 5)
    dgrad = m.grouped_linear.default(arrived, w, slots, True)
    unrelated = grad * 2.0
    h3 = start(ops.moefx.all_to_all.default, dgrad, host, sent, 2, 'ep', True)
    back = wait(h3)
    total = back + unrelated
    reduced = wait(h2)
    return (total, reduced)
"""


def ordered(source):
    gm, mode = graph(source)
    before = short(gm)
    result = order.run(gm, context(mode, dp=2, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = ordered(BACKWARD)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[u0, 16]",
    grad: "f32[s0, 16]",
    host: "i64[2, 8]",
    sent: "s0",
    received: "u0",
    w: "f32[4, 16, 16]",
    slots: "i64[4]",
):
    h1 = start(m.all_to_all.default, grad, host, received, 2, 'ep', False)
    unrelated = grad * (2.0)  # f32[s0, 16]
    arrived = wait(h1)  # f32[u0, 16]
    dgrad = m.grouped_linear.default(arrived, w, slots, True)  # f32[u0, 16]
    h3 = start(m.all_to_all.default, dgrad, host, sent, 2, 'ep', True)
    wgrad = m.grouped_wgrad.default(x, arrived, slots, False)  # f32[4, 16, 16]
    back = wait(h3)  # f32[s0, 16]
    h2 = start(m.reduce_gradient.default, wgrad, 'dp', 0.5, 5)
    total = back + unrelated  # f32[s0, 16]
    reduced = wait(h2)  # f32[4, 16, 16]
    return (total, reduced)  # (f32[s0, 16], f32[4, 16, 16])
""")
    assert result.changes


def test_noop():
    before, gm, result = ordered("""
        def graph(x: "f32[s0, 16]", w: "f32[16, 16]"):
            y = x @ w
            h = start(ops.moefx.reduce_gradient.default, y, 'dp', 0.5, 1)
            z = y * 2.0
            done = wait(h)
            return (z, done)
    """)
    assert short(gm) == before
    assert result.changes == []


def test_twice_is_once():
    _, gm, _ = ordered(BACKWARD)
    once = short(gm)
    order.run(gm, context(None, dp=2, ep=2))
    assert short(gm) == once


def urgent(gm):
    return [n.name for n in gm.graph.nodes if n.target is start and "reduce_gradient" not in str(n.args[0])]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_never_reorders_starts_that_the_program_waits_for(part):
    _, step, ctx = differentiated()
    gm = step.graphs[part]
    split_waits.run(gm, ctx)
    before = urgent(gm)
    order.run(gm, ctx)
    assert urgent(gm) == before
    assert len(before) == (4 if part == "forward" else 1)


def test_reductions_are_waited_for_at_the_end():
    _, step, ctx = differentiated()
    for part in step.graphs.values():
        split_waits.run(part, ctx)
        order.run(part, ctx)
    names = [n for n in step.backward.graph.nodes if n.op == "call_function"]
    assert all(n.target is wait and "reduce_gradient" in str(n.args[0].args[0]) for n in names[-3:])


def test_meaning():
    _, step, ctx = differentiated()
    gm, mode = graph(MOE)  # what the placed graph came from
    comparison = Comparison(gm, context(mode, dp=1, ep=2))
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    comparison.step(step, exact=False)
    for part in step.graphs.values():
        order.run(part, ctx)
    comparison.step(step, exact=True)
