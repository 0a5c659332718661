"""Orders of parts of whole blocks over two layers: who waits for whom, and how far the heuristic is from the best."""

from __future__ import annotations

import pytest

from moefx.analysis.tasks import Tasks
from moefx.compiler.pipeline import Pipeline
from moefx.costmodel.schedulers import Plan, schedule
from moefx.costmodel.tasks import COMPUTE
from moefx.options import Options
from moefx.passes import order
from tests.features.whole_blocks.test_seeded_faults import TWO
from tests.support.graphs import context, graph

WIDE = TWO.replace("24", "256").replace("16", "256")
DENSE = ("q0", "q1", "gate0", "gate1")
BOUND = 0.03  # over what no order can beat


@pytest.fixture(scope="module")
def ordered() -> dict[str, tuple[Tasks, Plan]]:
    """Tasks and their order, forward and backward: two parts of 2 x 256 tokens on each of two ranks."""
    gm, mode = graph(WIDE, sizes={"s0": 4, "s1": 256})
    ctx = context(mode, Options.named(chunks=2, whole_blocks=True, scheduler="heuristic"), ep=2)
    found, tasks_of = [], order.tasks_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "tasks_of", lambda *args: found.append(tasks_of(*args)) or found[-1])
        Pipeline(ctx).run(gm)
    return dict(zip(("forward", "backward"), zip(found, ctx.decisions.orders, strict=True), strict=True))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_no_exchange_of_a_part_needs_another_part(ordered, name):
    """Not even attention, which draws no random numbers where it drops nothing."""
    graph = ordered[name][0].graph
    exchanges = {i: task for i, task in enumerate(graph) if task.kind in ("A1", "A2")}
    assert sorted(task.chunk for task in exchanges.values()) == [0] * 4 + [1] * 4
    for i, task in exchanges.items():
        needed = [other.chunk for j, other in exchanges.items() if graph.needed[i] >> j & 1]
        assert {*needed} <= {task.chunk}


def weight_gradients(tasks: Tasks) -> dict[str, list[str]]:
    """{parameter outside of the experts: the tasks that multiply its gradient, one per part}"""
    found = {}
    for task in tasks.graph:
        for node in tasks.nodes[task.name]:
            for param in DENSE:
                if node.name.split("_")[:2] == ["grad", param] and ".mm" in str(node.target):
                    found.setdefault(param, []).append(task.name)
    return found


def test_weight_gradients_of_dense_layers_wait_beside_exchanges(ordered):
    """Input gradients, which exchanges wait for, go first."""
    tasks, plan = ordered["backward"]
    graph, start, end = tasks.graph, plan.timeline.start, plan.timeline.end
    found = weight_gradients(tasks)
    assert {param: len(names) for param, names in found.items()} == dict.fromkeys(DENSE, 2)
    exchanges = [task for task in graph if task.kind in ("A1", "A2")]
    apart = [name for names in found.values() for name in names]
    for name in apart:
        assert not any(graph.needed[graph.index[each.name]] >> graph.index[name] & 1 for each in exchanges)
    beside = [name for name in apart if any(start[each.name] <= start[name] < end[each.name] for each in exchanges)]
    waited = [name for name in beside if any(
        max((end[needed] for needed in graph[name].after), default=0.0) <= start[task.name] < start[name]
        for task in graph if task.resource == COMPUTE and task.name not in apart and task.duration > 0)]  # fmt: skip
    assert waited


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_heuristic_is_near_what_no_order_beats(ordered, name):
    """`optimal` proves it of two layers."""
    graph = ordered[name][0].graph
    best = schedule(graph, "optimal")
    assert best.gap < BOUND
    assert schedule(graph, "heuristic").timeline.makespan < (1 + BOUND) * best.lower_bound
