"""split_waits: golden, no-op, an unread result, meaning."""

from __future__ import annotations

from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.ir import world
from moefx.ir.edit import copy_of
from moefx.ir.ops.order import start, wait
from moefx.passes import split_waits
from tests.support.graphs import context, graph, short
from tests.support.small import MOE, differentiated

FORWARD = """
def graph(x: "f32[s0, 16]", counts: "i64[8]", old: "f32[8]", new: "f32[8]"):
    traffic = m.exchange_counts.default(counts, 2, 'ep')
    doubled = x * 2.0
    host = m.counts_to_host.default(traffic, 'ep')
    slots = m.slot_counts.default(traffic, 2, 'ep')
    received = m.received_rows.default(host, 2, 'ep')
    summed = m.sum_statistic.default(old, new, 'ep')
    halved = doubled / 4.0
    arrived = m.all_to_all.default(halved, host, received, 2, 'ep', False)
    return (arrived, slots, summed)
"""


def split(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = split_waits.run(gm, context(mode, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = split(FORWARD)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", counts: "i64[8]", old: "f32[8]", new: "f32[8]"):
    traffic_started = start(m.exchange_counts.default, counts, 2, 'ep')
    doubled = x * (2.0)  # f32[s0, 16]
    traffic_done = wait(traffic_started)  # i64[2, 8]
    host_started = start(m.counts_to_host.default, traffic_done, 'ep')
    slots = m.slot_counts.default(traffic_done, 2, 'ep')  # i64[4]
    host_done = wait(host_started)  # i64[2, 8]
    received = m.received_rows.default(host_done, 2, 'ep')  # u0
    summed_started = start(m.sum_statistic.default, old, new, 'ep')
    halved = doubled / (4.0)  # f32[s0, 16]
    arrived_started = start(m.all_to_all.default, halved, host_done, received, 2, 'ep', False)
    summed_done = wait(summed_started)  # f32[8]
    arrived_done = wait(arrived_started)  # f32[u0, 16]
    return (arrived_done, slots, summed_done)  # (f32[u0, 16], i64[4], f32[8])
""")
    assert result.changes == ["traffic split", "host split", "summed split", "arrived split"]


def test_noop():
    before, gm, result = split("""
        def graph(x: "f32[s0, 16]", perm: "i64[2*s0]"):
            rows = m.dispatch.default(x, perm, 2)
            return (rows,)
    """)
    assert short(gm) == short(before)
    assert result.changes == []


def test_result_that_nobody_reads_is_waited_for_at_the_end():
    _, gm, _ = split("""
        def graph(x: "f32[s0, 16]", counts: "i64[8]"):
            traffic = m.exchange_counts.default(counts, 2, 'ep')
            y = x * 2.0
            return (y,)
    """)
    names = [n.name for n in gm.graph.nodes]
    assert names == ["x", "counts", "traffic_started", "y", "traffic_done", "output"]


def test_places_and_values_are_inherited():
    gm, mode = graph(FORWARD)
    node = next(n for n in gm.graph.nodes if n.name == "traffic")
    node.meta["nn_module_stack"] = {"1": ("layers.0.mlp", "")}
    before = node.meta["val"]
    split_waits.run(gm, context(mode, ep=2))
    found = {n.name: n for n in gm.graph.nodes}
    assert found["traffic_done"].meta["val"] is before
    for name in ("traffic_started", "traffic_done"):
        assert found[name].meta["nn_module_stack"] == {"1": ("layers.0.mlp", "")}


def test_meaning():
    _, step, ctx = differentiated()
    gm, mode = graph(MOE)  # what the placed graph came from
    comparison = Comparison(gm, context(mode, dp=1, ep=2))
    assert comparison.reason is None
    comparison.step(step, exact=False)
    for part in step.graphs.values():
        split_waits.run(part, ctx)
    comparison.step(step, exact=True)  # the same bits on both ranks
    kinds = [n.target for n in step.backward.graph.nodes if n.target in (start, wait)]
    assert kinds.count(start) == kinds.count(wait) == 4
    assert world.current().coordinate("ep") == 0  # nobody's world is left behind
