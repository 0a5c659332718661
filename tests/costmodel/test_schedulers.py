"""Orders: literal, best, never worse, the same everywhere."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moefx.costmodel import schedulers
from moefx.costmodel.exact import HAVE_CP_SAT, chunk_edges, cp_sat_search, pareto_search
from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.portfolio import by_levels
from moefx.costmodel.schedulers import Plan, optsche, register_scheduler, schedule, scheduler_names
from moefx.costmodel.tasks import Schedule, Task, TaskGraph, check, end_times, topological
from moefx.errors import ScheduleError
from tests.costmodel.test_closed_form import optsche_makespan
from tests.costmodel.windows import DenseTimes, schemoe_window

BUILT_IN = ("sequential", "optsche", "heuristic", "optimal")


def makespan(graph: TaskGraph, name: str, budget_s: float = 1.0) -> float:
    return schedule(graph, name, budget_s).timeline.makespan


def layer(chunks: int, *times: float, **options: object) -> TaskGraph:
    return schemoe_layer(LayerTimes(*times), chunks, **options)


def window(chunks: int, layers: int, seed: int) -> TaskGraph:
    """Forward and backward of some layers where communication and computation are about equal."""
    source = random.Random(seed)
    e, a = source.uniform(2, 8), source.uniform(2, 8)
    codec = [e * source.uniform(0.02, 0.3) for _ in range(4)]
    times = (codec[0], a, codec[1], e, codec[2], a, codec[3])
    dense = DenseTimes(e * chunks, 2 * e * chunks, a * chunks / 2, a * chunks / 3)
    return schemoe_window(LayerTimes(*times), dense, chunks, layers=layers, backward=LayerTimes(*times, w=e))


def best_by_enumeration(graph: TaskGraph) -> float:
    """The least makespan over all total orders of the tasks, one by one."""
    least = math.inf

    def extend(done: dict[str, float], free: dict[str, float]) -> None:
        nonlocal least
        if len(done) == len(graph):
            least = min(least, max(done.values()))
        for task in graph:
            if task.name not in done and all(name in done for name in task.after):
                end = max([free.get(task.resource, 0.0), *(done[name] for name in task.after)]) + task.duration
                extend({**done, task.name: end}, {**free, task.resource: end})

    extend({}, {})
    return least


def best_by_sets(graph: TaskGraph) -> float:
    """The same, with orders told apart only by what is done, when resources are free and when what is waited for is
    there."""
    level = {(frozenset(), frozenset(), frozenset())}
    for _ in graph:
        following = set()
        for done, free, there in level:
            until, ends = dict(free), dict(there)
            for task in graph:
                if task.name not in done and done.issuperset(task.after):
                    end = max([until.get(task.resource, 0.0), *(ends[name] for name in task.after)]) + task.duration
                    now, later = done | {task.name}, {**ends, task.name: end}
                    wanted = {name for other in graph if other.name not in now for name in other.after}
                    following.add((now, frozenset({**until, task.resource: end}.items()),
                                   frozenset((name, end) for name, end in later.items() if name in wanted)))
        level = following
    return min(max(end for _, end in free) for _, free, _ in level)


def best_by_clock(times: tuple[int, ...], chunks: int) -> int:
    """The least makespan of equal chunks with whole durations >= 1: all that may be running, second by second.

    A chunk is (stage, seconds left; 0 for not started). At every second each resource starts any one task that may
    start, or none. Only the set of chunks' states matters, since chunks are equal.
    """
    states, now = {((0, 0),) * chunks}, 0
    while True:
        following = set()
        for state in states:
            if all(stage == 7 for stage, _ in state):
                return now
            for choice in starts(state, times, comm=True):
                following.update(tuple(sorted(advance(chunk) for chunk in both))
                                 for both in starts(choice, times, comm=False))
        states, now = following, now + 1


def starts(state: tuple, times: tuple[int, ...], comm: bool) -> list[tuple]:
    mine = [i for i, (stage, _) in enumerate(state) if stage < 7 and (stage in (1, 5)) == comm]
    if any(state[i][1] for i in mine):
        return [state]
    return [state, *((*state[:i], (state[i][0], times[state[i][0]]), *state[i + 1 :]) for i in mine)]


def advance(chunk: tuple[int, int]) -> tuple[int, int]:
    stage, left = chunk
    return (stage + 1, 0) if left == 1 else (stage, max(0, left - 1))


# ---- the named orders


def test_optsche_is_equation_12():
    graph = layer(3, 1, 5, 1, 2, 1, 5, 1)
    orders = optsche(graph).orders
    assert " ".join(orders["compute"]) == (
        "C1[0] C1[1] C1[2] D1[0] E[0] C2[0] D1[1] E[1] C2[1] D1[2] E[2] C2[2] D2[0] D2[1] D2[2]"
    )
    assert " ".join(orders["comm"]) == "A1[0] A1[1] A1[2] A2[0] A2[1] A2[2]"


def test_optsche_of_a_window_is_equation_12_per_layer_with_wgrads_at_once():
    orders = optsche(window(2, 2, seed=0)).orders
    assert " ".join(orders["compute"][:11]) == (
        "f0.attention f0.C1[0] f0.C1[1] f0.D1[0] f0.E[0] f0.C2[0] f0.D1[1] f0.E[1] f0.C2[1] f0.D2[0] f0.D2[1]"
    )
    backward = [name for name in orders["compute"] if name.startswith("b1.")]
    assert " ".join(backward[2:6]) == "b1.D1[0] b1.E[0] b1.W[0] b1.C2[0]"
    assert " ".join(name for name in orders["comm"] if name.startswith("b1.")) == (
        "b1.A1[0] b1.A1[1] b1.A2[0] b1.A2[1] b1.reduce_experts b1.reduce"
    )


def test_a_dense_task_does_not_hold_up_chunks_that_do_not_need_it():
    tasks = []
    for chunk in range(2):
        tasks.append(Task(f"attention[{chunk}]", "attention", "compute", 5, chunk=chunk))
        tasks += [Task(f"C1[{chunk}]", "C1", "compute", 1, (f"attention[{chunk}]",), chunk),
                  Task(f"A1[{chunk}]", "A1", "comm", 5, (f"C1[{chunk}]",), chunk),
                  Task(f"E[{chunk}]", "E", "compute", 5, (f"A1[{chunk}]",), chunk)]
    assert optsche(TaskGraph(tasks)).orders["compute"] == (
        "attention[0]", "C1[0]", "attention[1]", "C1[1]", "E[0]", "E[1]"
    )


# ---- best


COUNTEREXAMPLES = [  # chunks, durations, sizes, ScheMoE's order, optimum
    (2, (0, 2, 0, 0, 0, 0, 2), (), 8, 6),
    (2, (0, 4, 0, 1, 0, 1, 4), (), 17, 16),
    (2, (0, 1, 0, 0, 0, 0, 1), (), 4, 3),
    (3, (0, 2, 0, 1, 0, 1, 2), (), 13, 12),
    (3, (0, 3, 0, 1, 0, 1, 3), (), 19, 17),
    (8, (0, 10, 0, 1, 0, 1, 12), (), 177, 122),
    (2, (0, 2, 4, 2, 0, 2, 4), (1, 0.5), 17, 16),
]


@pytest.mark.parametrize(("chunks", "times", "sizes", "of_optsche", "optimum"), COUNTEREXAMPLES)
def test_where_schemoe_is_not_optimal(chunks, times, sizes, of_optsche, optimum):
    graph = layer(chunks, *times, sizes=sizes)
    assert makespan(graph, "optsche") == of_optsche
    plan = schedule(graph, "optimal")
    assert (plan.timeline.makespan, plan.gap) == (optimum, 0)
    assert makespan(graph, "heuristic") == optimum


@pytest.mark.parametrize("sizes", [(), (1, 2)])
def test_optimal_is_the_best_of_all_orders_of_two_chunks(sizes):
    source = random.Random(1)
    for _ in range(4):
        graph = layer(2, *[source.randint(0, 4) for _ in range(7)], sizes=sizes)
        for each in (graph, ringed(graph, 1)):
            plan = schedule(each, "optimal")
            assert plan.timeline.makespan == best_by_enumeration(each)
            assert plan.gap == 0


def test_optimal_is_the_best_of_all_orders_of_three_chunks_in_a_ring():
    source = random.Random(2)
    for slots in (1, 2):
        graph = ringed(layer(3, *[source.randint(1, 4) for _ in range(7)]), slots)
        plan = schedule(graph, "optimal")
        assert (plan.timeline.makespan, plan.gap) == (best_by_sets(graph), 0)
        assert makespan(graph, "heuristic") >= makespan(graph, "optimal")


@pytest.mark.parametrize(("chunks", "count"), [(1, 5), (2, 30), (3, 12)])
def test_optimal_is_the_best_of_all_that_can_happen(chunks, count):
    source = random.Random(chunks)
    for _ in range(count):
        times = tuple(source.choice((1, 1, 1, 2, 3)) for _ in range(7))
        plan = schedule(layer(chunks, *times), "optimal")
        assert (plan.timeline.makespan, plan.gap) == (best_by_clock(times, chunks), 0), times


def test_the_two_yardsticks_agree():
    assert best_by_clock((1, 4, 1, 1, 1, 1, 4), 2) == best_by_enumeration(layer(2, 1, 4, 1, 1, 1, 1, 4))


def hard(source: random.Random, chunks: int, **options: object) -> TaskGraph:
    """Durations from 1 to 100, small ones as often as large ones, and some of no time at all."""
    times = [source.choice((0, 1, 1, 1)) * round(math.exp(source.uniform(0, math.log(100)))) for _ in range(10)]
    return layer(chunks, *times, **options)


def ringed(graph: TaskGraph, slots: int) -> TaskGraph:
    """Of what a stage makes no more than `slots` chunks wait to be read by the next stage."""
    readers = {"C1": "A1", "A1": "E", "E": "A2", "A2": "D2"}
    return TaskGraph(replace(task, after=(*task.after, *(other.name for other in graph if other.kind == readers.get(
        task.kind) and other.chunk == task.chunk - slots))) for task in graph)


KINDS: list[tuple[str, Callable[[random.Random, int], TaskGraph]]] = [
    ("direct", hard),
    ("backward", lambda source, chunks: hard(source, chunks, backward=True)),
    ("2dh", lambda source, chunks: hard(source, chunks, all_to_all="2dh")),
    ("pipe", lambda source, chunks: hard(source, chunks, all_to_all="pipe")),
    ("unequal", lambda source, chunks: hard(source, chunks, sizes=source.sample((1, 2, 3, 4), chunks))),
    ("ring of 1", lambda source, chunks: ringed(hard(source, chunks), 1)),
    ("ring of 2", lambda source, chunks: ringed(hard(source, chunks, backward=True), 2)),
]


@pytest.mark.skipif(not HAVE_CP_SAT, reason="needs OR-tools")
@pytest.mark.parametrize(("name", "make"), KINDS, ids=[name for name, _ in KINDS])
def test_both_exact_searches_agree(name, make):
    source = random.Random(3)
    for _ in range(15):
        graph = make(source, 3)
        start = [graph.index[task] for task in optsche(graph).total_order(graph)]
        upper, edges = max(end_times(graph, start)), chunk_edges(graph)
        assert bool(edges) == (name != "unequal")
        pareto = pareto_search(graph, upper, edges, 50_000)
        solver = cp_sat_search(graph, start, edges, 1.0)
        found = [max(end_times(graph, result.sequence or start)) for result in (pareto, solver)]
        assert found == [pareto.bound, solver.bound]
        assert found[0] == found[1]
        for result in (pareto, solver):
            Schedule.from_sequence(graph, [graph.tasks[i].name for i in result.sequence or start])


def test_order_of_chunks_is_only_assumed_where_chunks_are_alike():
    assert chunk_edges(layer(2, 1, 1, 1, 1, 1, 1, 1))
    assert chunk_edges(window(2, 2, seed=0))
    assert not chunk_edges(layer(2, 1, 1, 1, 1, 1, 1, 1, sizes=(1, 1.5)))
    tasks = [Task(f"x[{i}]", "x", "compute", 1, chunk=i) for i in range(3)]
    assert not chunk_edges(TaskGraph([*tasks, Task("y[0]", "y", "comm", 1, ("x[1]",), 0)]))
    assert not chunk_edges(TaskGraph([*tasks, Task("y[0]", "y", "comm", 1, ("x[0]",), 0),
                                      Task("y[1]", "y", "comm", 1, (), 1)]))


def test_a_search_without_room_proves_nothing_wrong():
    """Whatever the number of labels: what it finds is legal, and what it proves is true."""
    source = random.Random(11)
    for _ in range(6):
        graph = hard(source, 3, sizes=(1, 2, 3))
        start = [graph.index[task] for task in optsche(graph).total_order(graph)]
        upper = max(end_times(graph, start))
        best = makespan(graph, "optimal", 4.0)
        for labels in (1, 30, 300):
            found = pareto_search(graph, upper, (), labels)
            assert found.bound <= best * (1 + 1e-9)
            if found.sequence:
                check(graph, Schedule.from_sequence(graph, [graph.tasks[i].name for i in found.sequence]))
                assert best * (1 - 1e-9) <= max(end_times(graph, found.sequence)) < upper


# ---- never worse


def never_worse(count: int, order: Callable[[TaskGraph], list[int]]) -> int:
    """How often strictly better than OptSche, in `count` random layers of 2 to 4 chunks; fails where worse."""
    source, better = random.Random(5), 0
    for number in range(count):
        chunks = 2 + number % 3
        times = [math.exp(source.uniform(0, math.log(100))) for _ in range(7)]
        reference = optsche_makespan(*times, chunks)
        graph = layer(chunks, *times)
        length = max(end_times(graph, order(graph)))
        assert length <= reference * (1 + 1e-12), (times, chunks)
        better += length < reference * (1 - 1e-9)
    return better


@pytest.mark.parametrize("layers", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_never_worse_than_optsche(layers):
    """With a hundredth of the default budget, and without making a checked Schedule of every order."""
    assert never_worse(layers, lambda graph: schedulers._heuristic(graph, 0.01)[0]) > layers // 20


@pytest.mark.full
def test_optimal_is_never_worse_than_optsche_in_10_000_layers():
    def order(graph: TaskGraph) -> list[int]:
        return [graph.index[name] for name in schedule(graph, "optimal").schedule.total_order(graph)]

    assert never_worse(10_000, order) > 500


@pytest.mark.parametrize(("name", "make"), KINDS, ids=[name for name, _ in KINDS])
def test_optimal_is_never_worse_than_any_other(name, make):
    source = random.Random(7)
    for chunks in (2, 3, 4):
        graph = make(source, chunks)
        best = schedule(graph, "optimal")
        assert best.gap < 1e-9
        for other in BUILT_IN:
            assert best.timeline.makespan <= makespan(graph, other) * (1 + 1e-9)


def test_without_or_tools_it_works_too(monkeypatch):
    monkeypatch.setattr(schedulers, "HAVE_CP_SAT", False)
    graph = window(4, 2, seed=1)
    plan = schedule(graph, "optimal", 0.3)
    assert plan.timeline.makespan <= makespan(graph, "heuristic", 0.3) < makespan(graph, "optsche")
    assert plan.lower_bound <= plan.timeline.makespan


def test_windows_gain_from_what_lies_between_layers():
    for seed in range(3):
        graph = window(2, 2, seed)
        assert makespan(graph, "heuristic") < 0.95 * makespan(graph, "optsche")


@pytest.mark.parametrize("name", ["heuristic", "optimal"])
def test_a_weight_gradient_waits_lest_its_reduction_holds_an_exchange_up(name):
    """Both send over one link. At once, beside the exchange, the reduction would make the step 12 seconds long."""
    graph = TaskGraph([
        Task("dW", "dense", "compute", 1), Task("reduction", "AR", "gradient", 4, ("dW",), link="inter"),
        Task("dI", "dense", "compute", 1), Task("exchange", "A1", "comm", 4, ("dI",), link="inter"),
        Task("other dW", "dense", "compute", 4), Task("experts", "E", "compute", 4, ("exchange",)),
    ])  # fmt: skip
    plan = schedule(graph, name)
    assert (plan.timeline.makespan, plan.gap) == (10, 0)
    assert plan.timeline.start["dW"] == plan.timeline.end["exchange"] == 5


def test_parts_take_turns_from_exchange_to_exchange():
    """Two layers of two parts: the second layer's attention of a part runs before the first layer's end of the next."""

    def part(i: int) -> list[Task]:
        tasks, last = [], ()
        for layer in range(2):
            for kind, seconds in (("C1", 2), ("A1", 4), ("E", 4), ("A2", 4), ("D2", 2)):
                resource = "comm" if kind in ("A1", "A2") else "compute"
                tasks.append(Task(f"{kind}{layer}[{i}]", kind, resource, seconds, last, i, layer))
                last = (tasks[-1].name,)
        return tasks

    graph = TaskGraph([*part(0), *part(1)])
    order = topological(graph.preds, graph.succs, by_levels(graph, 0))
    computed = [graph.tasks[i].name for i in order if graph.tasks[i].resource == "compute"]
    assert " ".join(computed) == "C10[0] C10[1] E0[0] E0[1] D20[0] C11[0] D20[1] C11[1] E1[0] E1[1] D21[0] D21[1]"
    assert makespan(graph, "heuristic") == max(end_times(graph, order)) < makespan(graph, "optsche")


@pytest.mark.parametrize("name", BUILT_IN)
def test_tasks_that_take_no_time(name):
    for chunks in (1, 3):
        plan = schedule(layer(chunks, *[0] * 8, backward=True), name)
        assert (plan.timeline.makespan, plan.gap) == (0, 0)
    for i in range(7):
        times = [float(j == i) for j in range(7)]
        assert makespan(layer(3, *times), name) == 3
    assert makespan(TaskGraph([]), name) == 0


# ---- the same everywhere, in bounded time


def digest() -> str:
    graphs = [window(4, 1, seed=2), hard(random.Random(2), 3, all_to_all="2dh"), hard(random.Random(3), 4,
                                                                                      sizes=(1, 2, 3, 4))]
    return repr([schedule(graph, name, 0.3).schedule.total_order(graph) for graph in graphs for name in BUILT_IN])


def test_the_same_twice_and_in_other_processes():
    mine = digest()
    assert mine == digest()
    # The package's face imports torch, which takes seconds and is not needed here.
    code = ("import sys, types; face = types.ModuleType('moefx'); face.__path__ = ['moefx']; "
            "sys.modules['moefx'] = face; from tests.costmodel.test_schedulers import digest; print(digest())")
    for seed in ("1", "2"):
        other = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                               cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True)
        assert other.stdout.strip() == mine


def test_the_budget_bounds_the_work():
    """Work is counted, so the time is only about the budget: the limit leaves room for a slow and busy machine."""
    graph = window(8, 2, seed=4)
    spent = []
    for budget_s in (0.0, 0.2, 1.0):  # the first two may end alike
        start = time.process_time()
        plan = schedule(graph, "optimal", budget_s)
        spent.append(time.process_time() - start)
        assert plan.timeline.makespan <= makespan(graph, "optsche")
    assert spent[0] < spent[2], spent
    assert spent[2] < 10


def test_more_budget_than_needed_changes_nothing():
    graph = hard(random.Random(8), 3, backward=True)
    assert schedule(graph, "heuristic", 2.0).schedule == schedule(graph, "heuristic", 50.0).schedule


# ---- the registry


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(schedulers, "_schedulers", dict(schedulers._schedulers))


@pytest.mark.usefixtures("registry")
def test_a_user_adds_a_scheduler():
    register_scheduler("as given", lambda graph, budget_s: Schedule.from_sequence(graph, [t.name for t in graph]))
    assert scheduler_names()[: len(BUILT_IN)] == BUILT_IN
    assert "as given" in scheduler_names()
    plan = schedule(layer(2, 1, 2, 1, 3, 1, 2, 1), "as given")
    assert isinstance(plan, Plan)
    assert plan.timeline.makespan >= plan.lower_bound
    assert plan.gap == plan.timeline.makespan / plan.lower_bound - 1


@pytest.mark.usefixtures("registry")
def test_an_illegal_order_of_a_user_is_refused_with_the_broken_dependency():
    def bad(graph: TaskGraph, budget_s: float) -> Schedule:
        orders = dict(optsche(graph).orders)
        compute = [name for name in orders["compute"] if name != "E[1]"]
        compute.insert(compute.index("D1[1]"), "E[1]")
        return Schedule({**orders, "compute": tuple(compute)})

    register_scheduler("bad", bad)
    with pytest.raises(ScheduleError, match=r"E\[1\] runs before D1\[1\], which it needs\n.*scheduler 'bad'"):
        schedule(layer(2, 1, 2, 1, 3, 1, 2, 1), "bad")


@pytest.mark.usefixtures("registry")
def test_names_are_unique_and_known():
    with pytest.raises(ScheduleError, match="there is a scheduler 'optsche' already"):
        register_scheduler("optsche", lambda graph, budget_s: optsche(graph))
    register_scheduler("optsche", optsche)  # the same again is no clash
    with pytest.raises(ScheduleError, match="one of sequential, optsche, heuristic, optimal"):
        schedule(layer(1, 1, 1, 1, 1, 1, 1, 1), "best")


def test_interference_is_passed_on():
    graph = layer(3, 1, 4, 1, 4, 1, 4, 1)
    rates = {("compute", "comm"): 0.9, ("comm", "compute"): 0.8}
    plan = schedule(graph, "optsche", rates=rates)
    assert plan.timeline.makespan > makespan(graph, "optsche")
    assert plan.lower_bound == graph.lower_bound()
