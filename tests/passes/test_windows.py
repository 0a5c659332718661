"""order, with copies to and from the host: they run ahead so far and no further, with a scheduler and without."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.errors import VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.ops.order import start, wait
from moefx.ir.rules import Facts, View
from moefx.ir.rules_rings import rings_hold
from moefx.options import Options
from moefx.passes import order, split_waits
from tests.support.graphs import assert_same_meaning, context, graph, short

# What leaves: nobody waits for it. What comes back is read once.
AWAY = """
def graph(x: "f32[8, 16]"):
    a = x * 2.0
    a_host = m.to_host.default(a)
    b = a + 1.0
    b_host = m.to_host.default(b)
    c = b * 3.0
    c_host = m.to_host.default(c)
    d = c + 2.0
    d_host = m.to_host.default(d)
    return (d.sum(0), a_host, b_host, c_host, d_host)
"""
BACK = """
def graph(x: "f32[8, 16]", a: "f32[8, 16]", b: "f32[8, 16]", c: "f32[8, 16]", d: "f32[8, 16]"):
    d_back = m.to_device.default(d, 'cpu')
    y = x * d_back
    c_back = m.to_device.default(c, 'cpu')
    z = y * c_back
    b_back = m.to_device.default(b, 'cpu')
    u = z * b_back
    a_back = m.to_device.default(a, 'cpu')
    v = u * a_back
    return (v,)
"""


def ordered(source, scheduler=None):
    gm, mode = graph(source)
    ctx = context(mode, Options(scheduler=scheduler), ep=2)
    split_waits.run(gm, ctx)
    before = copy_of(gm)
    result = order.run(gm, ctx)
    gm.graph.lint()
    assert_same_meaning(before, gm, exact=True)
    rings_hold.check(View(gm, Level.SCHEDULED, Facts(ctx.mesh)))
    return gm, ctx, result


def most_on_their_way(gm):
    """How many copies, or what they brought, are there at once."""
    alive, most = 0, 0
    for node in gm.graph.nodes:
        alive += (node.target is start) - (node.target is wait)
        most = max(most, alive)
    return most


def lines(gm):
    return "\n".join(line.split("  # ")[0].strip() for line in short(gm).splitlines() if " = " in line)


def test_golden():
    assert_expected_inline(lines(ordered(AWAY)[0]), """\
a = x * (2.0)
a_host_started = start(m.to_host.default, a)
b = a + (1.0)
b_host_started = start(m.to_host.default, b)
c = b * (3.0)
a_host_done = wait(a_host_started)
c_host_started = start(m.to_host.default, c)
d = c + (2.0)
b_host_done = wait(b_host_started)
d_host_started = start(m.to_host.default, d)
sum_1 = d.sum(0)
c_host_done = wait(c_host_started)
d_host_done = wait(d_host_started)""")
    assert_expected_inline(lines(ordered(BACK)[0]), """\
d_back_started = start(m.to_device.default, d, 'cpu')
c_back_started = start(m.to_device.default, c, 'cpu')
d_back_done = wait(d_back_started)
y = x * d_back_done
b_back_started = start(m.to_device.default, b, 'cpu')
c_back_done = wait(c_back_started)
z = y * c_back_done
a_back_started = start(m.to_device.default, a, 'cpu')
b_back_done = wait(b_back_started)
u = z * b_back_done
a_back_done = wait(a_back_started)
v = u * a_back_done""")


@pytest.mark.parametrize("scheduler", [None, "optsche", "heuristic", "sequential"])
@pytest.mark.parametrize("source", [AWAY, BACK])
def test_no_more_than_two_copies_are_on_their_way(source, scheduler):
    gm, _, _ = ordered(source, scheduler)
    assert most_on_their_way(gm) == (1 if scheduler == "sequential" else 2)


def test_a_copy_that_comes_back_too_early_is_named():
    gm, ctx, _ = ordered(BACK)
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["d_back_started"].append(nodes["b_back_started"])
    with pytest.raises(VerifyError, match="d_back_done, b_back_done and c_back_done are alive at once, in a ring of 2"):
        rings_hold.check(View(gm, Level.SCHEDULED, Facts(ctx.mesh)))


EARLY = """
def graph(grad: "f32[s0, 16]", host: "i64[2, 8]", sent: "s0", received: "u0", w: "f32[4, 16, 16]", slots: "i64[4]",
          a: "f32[s0, 16]", b: "f32[s0, 16]", c: "f32[16]"):
    a_back = m.to_device.default(a, 'cpu')
    b_back = m.to_device.default(b, 'cpu')
    c_back = m.to_device.default(c, 'cpu')
    arrived = m.all_to_all.default(grad, host, received, 2, 'ep', False)
    first = m.grouped_linear.default(arrived * c_back, w, slots, True)
    second = m.grouped_linear.default(first, w, slots, True)
    back = m.all_to_all.default(second, host, sent, 2, 'ep', True)
    ratio = a_back / b_back
    return (back, ratio)
"""


def test_who_frees_a_place_comes_behind_what_it_reads():
    """The third copy back is wanted before the reader that makes room for it; that one reads two others."""
    gm, mode = graph(EARLY)
    ctx = context(mode, Options(), ep=2)
    split_waits.run(gm, ctx)
    order.run(gm, ctx)
    gm.graph.lint()
    rings_hold.check(View(gm, Level.SCHEDULED, Facts(ctx.mesh)))
    names = [node.name for node in gm.graph.nodes]
    assert names.index("b_back_done") < names.index("ratio") < names.index("c_back_started")
