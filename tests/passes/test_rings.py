"""order, with rings: golden, what holds them, what breaks them."""

from __future__ import annotations

import pytest

from moefx.analysis.rings import bounded
from moefx.analysis.tasks import tasks_of
from moefx.context.decisions import Chunk
from moefx.costmodel.memory import live_memory
from moefx.costmodel.schedulers import register_scheduler
from moefx.costmodel.tasks import Schedule
from moefx.errors import ScheduleError, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.regions import tag
from moefx.ir.rules import Facts, View
from moefx.ir.rules_rings import rings_hold
from tests.passes.test_order import body, in_rings, labels, ordered
from tests.support.graphs import context, graph

REDO = ("dispatch", "all_to_all", "regroup", "grouped_linear", "silu")  # what MPipeMoE's S4 does again


@pytest.fixture(scope="module")
def kept():
    return ordered(4, rings=2)


def test_golden(kept):
    _, step, ctx, results = kept
    assert labels(step.forward, ctx) == ("C1.0 A1.0 C1.1 A1.1 E.0 A2.0 C1.2 A1.2 E.1 A2.1 C1.3 A1.3 E.2 A2.2 E.3 A2.3 "
                                         "D2.0 D2.1 D2.2 D2.3")  # fmt: skip
    assert labels(step.backward, ctx) == ("C1.0 A1.0 C1.1 A1.1 E.0 A2.0 W.0 C1.2 A1.2 E.1 A2.1 W.1 D2.0 "
                                          "C1.3 A1.3 E.2 A2.2 W.2 D2.1 E.3 A2.3 W.3 D2.2 D2.3")  # fmt: skip
    chunks = [[f"{name}{i}{rest}" for i in range(4)] for name, rest in (
        ("rows_c", ""), ("r0_enter_a2a_c", "_done"), ("r0_leave_regroup_c", ""))]  # fmt: skip
    assert [*in_rings(step.forward).values()] == chunks, "the rest is saved, or made and read by one task"
    assert {ring.slots for ring in in_rings(step.forward)} == {2}, "these travel"
    assert {ring.slots for ring in in_rings(step.backward)} == {1, 2}
    assert all(result.changes[0].endswith("tasks by 'optsche'") for result in results)


def test_less_memory_where_the_backward_does_things_again(kept):
    def peak(step, graph="backward"):
        nodes = step.graphs[graph]
        free = {s.name for _, alive in live_memory(nodes).points for s in alive.free_symbols}
        return live_memory(nodes).peak({s: 2400 if s.startswith("s") else 1200 for s in free}).bytes

    def again(rings):
        return ordered(4, rings=rings, redo=REDO)

    whole, (check, step, ctx, _) = again(0)[1], again(1)
    assert peak(kept[1], "forward") < 0.99 * peak(ordered(4)[1], "forward")
    assert peak(step) < 0.85 * peak(whole)
    check.step(step, exact=False)
    for gm in step.graphs.values():
        rings_hold.check(View(gm, Level.SCHEDULED, Facts(ctx.mesh)))
    assert {"r0_enter_a2a_c0_done", "grouped_linear_default_c0", "hidden_c0"} <= {
        ring.name for ring in in_rings(step.backward)}  # fmt: skip


def nodes_of(gm):
    return {node.name: node for node in gm.graph.nodes}


def release_dropped(nodes):
    nodes["result_c0"].prepend(nodes["r0_leave_a2a_c0_done"])


def two_exchanged(nodes):
    ahead = [nodes[name] for name in ("x_2of4", "rows_c2", "r0_enter_a2a_c2_started")]
    for node in ahead:
        nodes["r0_enter_regroup_c0"].prepend(node)


def read_again(nodes):
    nodes["r0_enter_regroup_c2"].replace_input_with(nodes["r0_enter_a2a_c2_done"], nodes["r0_enter_a2a_c0_done"])


def returned(nodes):
    output = nodes["output"]
    output.args = ((*output.args[0], nodes["rows_c1"]),)


@pytest.mark.parametrize(("fault", "message"), [
    (release_dropped, "r0_leave_regroup_c1 and r0_leave_regroup_c2 are alive at once, in a ring of 2"),
    (two_exchanged, "rows_c0, rows_c1 and rows_c2 are alive at once|r0_enter_a2a_c2_done are alive at once"),
    (read_again, "r0_enter_a2a_c0_done, r0_enter_a2a_c1_done and r0_enter_a2a_c2_done are alive at once"),
    (returned, "rows_c1 is in a ring, and outlives the graph"),
])  # fmt: skip
def test_what_breaks_a_ring_is_named(kept, fault, message):
    _, step, ctx, _ = kept
    gm = copy_of(step.forward)
    fault(nodes_of(gm))
    with pytest.raises(VerifyError, match=message):
        rings_hold.check(View(gm, Level.SCHEDULED, Facts(ctx.mesh)))


def swapped(graph, budget_s):
    """Rows of the third chunk leave before those of the first."""
    names = [graph.tasks[i].name for i in graph.order]
    first, third = (next(t.name for t in graph if t.kind == "A1" and t.chunk == i) for i in (0, 2))
    names.remove(third)
    names.insert(names.index(first), third)
    return Schedule({r: tuple(n for n in names if graph[n].resource == r) for r in graph.resources})


def test_an_order_of_a_user_that_breaks_a_ring_is_refused_by_the_names_of_two_tasks():
    register_scheduler("test-swapped", swapped)
    with pytest.raises(ScheduleError, match="enter_a2a_c2_started runs before r0_enter_a2a_c0_started, which it needs"):
        ordered(4, "test-swapped", rings=2)


CROSSED = """
def graph(x0: "f32[4, 8]", x1: "f32[4, 8]", x2: "f32[4, 6]", x3: "f32[4, 6]", host: "i64[2, 4]"):
    h0 = start(ops.moefx.all_to_all.default, x0, host, 4, 2, 'ep', False)
    h1 = start(ops.moefx.all_to_all.default, x1, host, 4, 2, 'ep', False)
    h2 = start(ops.moefx.all_to_all.default, x2, host, 4, 2, 'ep', False)
    h3 = start(ops.moefx.all_to_all.default, x3, host, 4, 2, 'ep', False)
    a0 = wait(h0)
    b1 = wait(h3)
    y0 = torch.cat((a0, b1), 1)
    b0 = wait(h2)
    a1 = wait(h1)
    z0 = torch.cat((b0, a1), 1)
    y1 = a1 * 2.0
    z1 = b1 * 2.0
    return (y0, z0, y1, z1)
"""


def test_more_chunks_are_alive_where_they_need_one_another():
    gm, mode = graph(CROSSED)
    nodes, ctx = nodes_of(gm), context(mode, dp=1, ep=2)
    for chunk, names in enumerate((("h0", "a0", "h2", "b0"), ("h1", "a1", "h3", "b1"))):
        tag([nodes[name] for name in names], chunk)
    ctx.decisions.chunks = {i: Chunk(0, i, 2) for i in range(2)}
    tasks, notes = bounded(tasks_of(body(gm), ctx, lambda node: 1.0), 1, ctx.decisions.chunks)
    assert "h0" not in tasks.graph["h1"].after
    assert tasks.graph["h1"].after == ("y0",)
    assert notes == ["2 values like b0 are alive at once, not 1: they need one another"]
