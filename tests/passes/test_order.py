"""order: golden, refusal, meaning; tasks of a graph. test_rings.py has it with rings, test_as_written.py without a
scheduler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from torch.utils.checkpoint import CheckpointPolicy

from moefx.analysis.checking.compare import Comparison
from moefx.analysis.tasks import tasks_of
from moefx.compiler.pipeline import place_experts, refresh
from moefx.costmodel.schedulers import register_scheduler
from moefx.costmodel.tasks import COMPUTE, Schedule
from moefx.errors import ScheduleError, UnsupportedUse
from moefx.ir.level import Level
from moefx.ir.ops.order import start, wait
from moefx.ir.regions import region_of
from moefx.ir.rings import RING
from moefx.ir.rules import Facts, View
from moefx.ir.rules_rings import rings_hold
from moefx.options import Options
from moefx.passes import (
    accumulate_wgrads,
    chunk,
    clean_up,
    differentiate,
    expand_transport,
    name_values,
    order,
    partition,
    split_waits,
)
from moefx.planning.pricing import Prices
from tests.support.graphs import context, graph
from tests.support.small import MOE

# The region's tokens want a gradient.
BEHIND_A_LAYER = MOE.replace("graph(x:", "graph(x_in:").replace(
    '24]"):', '24]", first: "f32[16, 16]"):\n    x = F.linear(x_in, first)'
)


def differentiated(gm, ctx, redo):
    """The step graphs; the backward does the ops of these names again, on the way out."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    joint = differentiate.run(gm, ctx)
    clean_up.run(joint, ctx)
    name_values.run(joint, ctx, gm)
    for node in joint.graph.nodes:
        if region_of(node) is not None and any(part in str(node.target) for part in redo) and True not in node.args:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    step = partition.run(joint, ctx, names)
    step.note_sources(gm)
    return step


def ordered(chunks=2, scheduler=None, *, alltoall="direct", ranks_per_node=None, run=True, rings=0, redo=()):
    """(comparison, step graphs, context, results of the pass) behind all passes up to this one."""
    gm, mode = graph(BEHIND_A_LAYER, sizes={"s0": 12})
    ctx = context(mode, Options(chunks=chunks, scheduler=scheduler, alltoall=alltoall), ep=4)
    ctx.decisions.rings = rings
    ctx.mesh = replace(ctx.mesh, ranks_per_node=ranks_per_node)
    check = Comparison(gm, ctx)
    for one in (chunk, place_experts):
        one.run(gm, ctx)
        refresh(gm, ctx)
    check.whole(gm, placed=True, exact=False)
    step = differentiated(gm, ctx, redo)
    ctx.decisions.time_of = Prices(step, ctx)
    results = []
    for one in (expand_transport, split_waits, *([order] if run else [])):
        results = [one.run(part, ctx) for part in step.graphs.values()]
    for part in step.graphs.values():
        accumulate_wgrads.run(part, ctx)
    for part in step.graphs.values():
        part.graph.lint()
    return check, step, ctx, results


def body(gm):
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def labels(gm, ctx):
    """The stages of the graph and their chunks in the order written, computations and starts of exchanges alike."""
    tasks = tasks_of(body(gm), ctx, ctx.decisions.time_of)
    of = {node: tasks.graph[name] for name, nodes in tasks.nodes.items() for node in nodes}
    found = []
    for node in body(gm):
        task = of.get(node)
        if task is not None and task.layer >= 0 and (not found or found[-1] != f"{task.kind}[{task.chunk}]"):
            found.append(f"{task.kind}[{task.chunk}]")
    return " ".join(dict.fromkeys(found)).replace("[", ".").replace("]", "")


def in_rings(gm):
    """{ring: its members}"""
    found = {}
    for node in gm.graph.nodes:
        if RING in node.meta:
            found.setdefault(node.meta[RING], []).append(node.name)
    return found


def test_golden():
    _, step, ctx, results = ordered(3)
    shared = "C1.0 A1.0 C1.1 A1.1 C1.2 A1.2 E.0 A2.0 E.1 A2.1 E.2 A2.2"
    assert labels(step.forward, ctx) == f"{shared} D2.0 D2.1 D2.2"
    at_once = shared.replace("A2.0", "A2.0 W.0").replace("A2.1", "A2.1 W.1")
    assert labels(step.backward, ctx) == f"{at_once} W.2 D2.0 D2.1 D2.2"
    assert all("tasks by 'optsche'" in result.changes[0] for result in results)


def test_sequential_waits_for_every_exchange_right_away():
    _, step, _, _ = ordered(2, "sequential")
    for part in step.graphs.values():
        nodes = body(part)
        for node, after in itertools.pairwise(nodes):
            if node.target is start and node.users:
                assert after.target is wait
                assert after.args[0] is node


@pytest.mark.parametrize(("scheduler", "chunks", "alltoall", "rings"), [
    ("sequential", 1, "direct", 0), ("optsche", 3, "direct", 0), ("heuristic", 2, "2dh", 0), ("optimal", 2, "pipe", 0),
    ("sequential", 2, "1dh", 0), ("optsche", 2, "2dh", 1), ("heuristic", 4, "direct", 2), ("optimal", 2, "direct", 1),
    ("sequential", 4, "pipe", 2), ("optsche", 4, "direct", 2), ("optimal", 4, "2dh", 3), ("heuristic", 2, "1dh", 1),
])  # fmt: skip
def test_meaning(scheduler, chunks, alltoall, rings):
    check, step, ctx, _ = ordered(chunks, scheduler, alltoall=alltoall, ranks_per_node=2, rings=rings)
    assert all(bool(in_rings(part)) == bool(rings) for part in step.graphs.values())
    for part in step.graphs.values():
        rings_hold.check(View(part, Level.SCHEDULED, Facts(ctx.mesh)))
    check.step(step, exact=False)
    assert [plan.scheduler for plan in ctx.decisions.orders] == [scheduler] * 2
    assert all(plan.timeline.makespan > 0 for plan in ctx.decisions.orders)


def test_tasks_have_no_cycle_and_hold_every_node_once():
    _, step, ctx, _ = ordered(3, run=False)
    for part in step.graphs.values():
        tasks = tasks_of(body(part), ctx, ctx.decisions.time_of)
        inside = [node for nodes in tasks.nodes.values() for node in nodes]
        assert sorted(inside, key=str) == sorted((n for n in body(part) if n.target is not wait), key=str)
        kinds = [task.kind for task in tasks.graph]
        assert kinds.count("A1") == kinds.count("A2") == 3
        assert {"C1", "E", "D2"} <= set(kinds)
    assert kinds.count("W") == 2 * 3  # two weights, three chunks: input and weight gradients are told apart
    assert kinds.count("AR") == 4


def illegal(graph, budget_s):
    """Computation in the order of the graph, but the experts of chunk 0 after its combine."""
    names = [graph.tasks[i].name for i in graph.order]
    experts = next(t.name for t in graph if t.kind == "E" and t.chunk == 0)
    combine = next(t.name for t in graph if t.kind == "D2" and t.chunk == 0)
    orders = {r: [n for n in names if graph[n].resource == r] for r in graph.resources}
    line = orders[COMPUTE]
    line.insert(line.index(combine), line.pop(line.index(experts)))
    line.remove(experts)
    line.insert(line.index(combine) + 1, experts)
    return Schedule({r: tuple(order) for r, order in orders.items()})


def test_refusal_of_an_illegal_order_names_the_broken_dependency():
    register_scheduler("test-illegal", illegal)
    with pytest.raises(ScheduleError, match=r"result_c0 runs before \w+, which it needs"):
        ordered(2, "test-illegal")


def test_refusal_of_an_unknown_scheduler_names_the_known_ones():
    with pytest.raises(UnsupportedUse, match="optsche"):
        ordered(2, "quickest")
