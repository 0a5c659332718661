"""Task graphs, the check of orders, and the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.costmodel.layers import LayerTimes, restoring, schemoe_layer
from moefx.costmodel.schedulers import optsche, schedule, sequential
from moefx.costmodel.simulate import simulate
from moefx.costmodel.tasks import Schedule, Task, TaskGraph, check, preemptive_bound
from moefx.errors import ScheduleError
from tests.costmodel.windows import DenseTimes, schemoe_window

TIMES = LayerTimes(1, 4, 1, 3, 1, 4, 1, w=2, a1_intra=2, a2_intra=2)


def task(name: str, resource: str, duration: float, *after: str) -> Task:
    return Task(name, name, resource, duration, after)


# ---- graphs


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([task("a", "compute", 1), task("a", "comm", 1)], "two tasks have the name a"),
        ([task("a", "compute", 1, "b")], "a needs b, which is not a task"),
        ([task("a", "compute", -1)], "task a has duration -1"),
        ([task("a", "compute", math.nan)], "task a has duration nan"),
        ([task("a", "compute", math.inf)], "task a has duration inf"),
        ([task("a", "compute", 1, "b"), task("b", "compute", 1, "a")], "in a cycle: a needs b needs a"),
        ([task("a", "compute", 1, "a")], "in a cycle: a needs a"),
    ],
)
def test_a_bad_graph_is_refused(tasks, message):
    with pytest.raises(ScheduleError, match=message):
        TaskGraph(tasks)


def test_bounds_of_a_graph():
    graph = TaskGraph([task("a", "compute", 2), task("b", "comm", 3, "a"), task("c", "comm", 4, "a"),
                       task("d", "compute", 5, "c")])
    assert graph.heads == (0, 2, 2, 6)
    assert graph.tails == (9, 0, 5, 0)
    assert graph.lower_bound() == 11


def test_the_bound_of_a_resource_counts_head_and_tail():
    graph = TaskGraph([task("head", "compute", 2), task("x", "comm", 5, "head"), task("y", "comm", 5, "head"),
                       task("tail x", "copy", 3, "x"), task("tail y", "copy", 3, "y")])
    assert graph.lower_bound() == 2 + 10 + 3


def test_preemptive_bound_takes_the_worst_subset():
    assert preemptive_bound([(0, 4, 0), (1, 2, 9)]) == 12  # the second preempts the first
    assert preemptive_bound([(5, 1, 0), (0, 1, 0)]) == 6
    assert preemptive_bound([]) == 0


def test_an_order_that_is_legal_as_given_is_kept():
    graph = schemoe_layer(TIMES, 3, backward=True)
    assert graph.order == tuple(range(len(graph)))
    assert [task.name for task in graph][:4] == ["C1[0]", "A1[0]", "D1[0]", "E[0]"]


def test_all_to_alls_in_two_parts():
    two = schemoe_layer(TIMES, 2, all_to_all="2dh")
    assert two["A1.inter[1]"].after == ("A1.intra[1]",)
    assert two["D1[1]"].after == ("A1.inter[1]",)
    assert two["A2.intra[0]"].after == ("A2.inter[0]",)
    pipe = schemoe_layer(TIMES, 2, all_to_all="pipe")
    assert pipe["A1.inter[1]"].after == ("C1[1]",)
    assert pipe["D1[1]"].after == ("A1.intra[1]", "A1.inter[1]")
    with pytest.raises(ScheduleError, match="one of direct, 2dh, pipe"):
        schemoe_layer(TIMES, 2, all_to_all="3dh")
    with pytest.raises(ScheduleError, match="3 sizes for 2 chunks"):
        schemoe_layer(TIMES, 2, sizes=(1, 1, 1))


# ---- the check of orders


def illegal(graph: TaskGraph, orders: dict[str, tuple[str, ...]]) -> str:
    with pytest.raises(ScheduleError) as error:
        check(graph, Schedule(orders))
    return error.value.what


def test_orders_that_wait_for_one_another_are_named():
    graph = schemoe_layer(TIMES, 2)
    orders = {"compute": ("C1[0]", "C1[1]", "D1[0]", "E[0]", "D1[1]", "C2[0]", "E[1]", "C2[1]", "D2[0]", "D2[1]"),
              "comm": ("A1[0]", "A2[0]", "A1[1]", "A2[1]")}
    text = illegal(graph, orders)
    assert text.startswith("the orders of the resources wait for one another")
    for step in ("D1[1] needs A1[1]", "A1[1] comes on comm after A2[0]", "A2[0] needs C2[0]",
                 "C2[0] comes on compute after D1[1]"):
        assert step in text


def test_a_total_order_against_a_dependency_across_resources_is_named():
    graph = schemoe_layer(TIMES, 2)
    names = [task.name for task in graph]
    i, j = names.index("A1[1]"), names.index("E[1]")
    names[i], names[j] = names[j], names[i]
    with pytest.raises(ScheduleError, match=r"E\[1\] runs before D1\[1\], which it needs"):
        Schedule.from_sequence(graph, names)
    direct = TaskGraph([task("a", "comm", 1), task("b", "compute", 1, "a")])
    with pytest.raises(ScheduleError, match="b runs before a, which it needs"):
        Schedule.from_sequence(direct, ["b", "a"])
    with pytest.raises(ScheduleError, match="lacks b"):
        Schedule.from_sequence(direct, ["a"])
    with pytest.raises(ScheduleError, match="b is twice"):
        Schedule.from_sequence(direct, ["a", "b", "b"])


def windows() -> st.SearchStrategy[TaskGraph]:
    times = st.builds(LayerTimes, *[st.integers(0, 9)] * 8)
    dense = st.builds(DenseTimes, *[st.integers(0, 9)] * 4)
    return st.builds(schemoe_window, times, dense, st.integers(1, 3), layers=st.integers(1, 2),
                     backward=st.none() | times)


@given(windows(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_legal_order_passes_and_every_damage_to_it_is_named(graph, data):
    legal = dict(optsche(graph).orders)
    check(graph, Schedule(legal))
    resource = data.draw(st.sampled_from(sorted(legal)))
    order = list(legal[resource])
    name = data.draw(st.sampled_from(order))
    at = order.index(name)

    assert illegal(graph, {**legal, resource: (*order[:at], *order[at + 1 :])}) == f"the order lacks {name}"
    assert illegal(graph, {**legal, resource: (*order, name)}) == f"{name} is twice in the order of {resource}"
    assert "has nobody, which is not a task" in illegal(graph, {**legal, resource: (*order, "nobody")})
    others = {**legal, resource: (*order[:at], *order[at + 1 :]), "elsewhere": (name,)}
    assert illegal(graph, others) == f"{name} is in the order of elsewhere, but it runs on {resource}"


@given(windows(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_task_moved_before_one_that_it_needs_is_named(graph, data):
    legal = dict(optsche(graph).orders)
    needed: dict[str, set[str]] = {}
    for i in graph.order:
        item = graph.tasks[i]
        needed[item.name] = set(item.after).union(*(needed[name] for name in item.after))
    pairs = [(resource, early, late) for resource, order in legal.items() for late in order for early in order
             if early in needed[late]]
    resource, early, late = data.draw(st.sampled_from(pairs))
    order = [name for name in legal[resource] if name != late]
    order.insert(order.index(early), late)
    text = illegal(graph, {**legal, resource: tuple(order)})
    assert text.startswith(f"{late} runs before ")
    culprit = text.split(" runs before ")[1].split(", which")[0]
    assert culprit in needed[late]
    assert order.index(late) < order.index(culprit)


@given(windows())
@settings(max_examples=60, deadline=None)
def test_the_total_order_keeps_dependencies_and_queues(graph):
    for found in (optsche(graph), sequential(graph)):
        total = found.total_order(graph)
        place = {name: i for i, name in enumerate(total)}
        assert len(place) == len(graph)
        assert all(place[name] < place[item.name] for item in graph for name in item.after)
        assert all(tuple(sorted(order, key=place.get)) == order for order in found.orders.values())


# ---- the simulator


def test_a_small_timeline():
    graph = TaskGraph([task("a", "compute", 2), task("send", "comm", 4, "a"), task("b", "compute", 3),
                       task("c", "compute", 1, "send")])
    timeline = simulate(graph, Schedule({"compute": ("a", "b", "c"), "comm": ("send",)}))
    assert timeline.start == {"a": 0, "send": 2, "b": 2, "c": 6}
    assert timeline.end == {"a": 2, "send": 6, "b": 5, "c": 7}
    assert timeline.makespan == 7
    assert timeline.busy == {"compute": 6, "comm": 4}


def test_queues_are_first_in_first_out():
    graph = TaskGraph([task("a", "compute", 2), task("late", "comm", 1, "a"), task("early", "comm", 1)])
    waits = simulate(graph, Schedule({"compute": ("a",), "comm": ("late", "early")}))
    assert (waits.start["early"], waits.makespan) == (3, 4)
    assert simulate(graph, Schedule({"compute": ("a",), "comm": ("early", "late")})).makespan == 3


def test_without_overlap_times_add_up():
    graph = schemoe_layer(TIMES, 4, backward=True)
    timeline = simulate(graph, sequential(graph))
    assert timeline.makespan == sum(item.duration for item in graph)
    assert sequential(graph).total_order(graph) == [item.name for item in graph]


def test_an_empty_graph():
    empty = TaskGraph([])
    assert simulate(empty, optsche(empty)).makespan == 0


def test_an_incomplete_schedule_is_not_simulated():
    graph = TaskGraph([task("a", "compute", 1), task("b", "comm", 1, "a")])
    with pytest.raises(ScheduleError):
        simulate(graph, Schedule({"compute": ("a",), "comm": ("b", "b")}))


def test_interference_slows_only_what_overlaps():
    graph = TaskGraph([task("a", "compute", 2), task("send", "comm", 2), task("b", "compute", 2)])
    schedule = Schedule({"compute": ("a", "b"), "comm": ("send",)})
    timeline = simulate(graph, schedule, {("compute", "comm"): 0.5, ("comm", "compute"): 0.8})
    assert timeline.end["send"] == pytest.approx(2.5)
    assert timeline.end["a"] == pytest.approx(2.5 + 0.75)  # 1.25 done at half speed
    assert timeline.makespan == pytest.approx(2.5 + 0.75 + 2)


def test_speeds_of_several_disturbers_multiply():
    graph = TaskGraph([task("a", "compute", 1), task("x", "comm", 100), task("y", "copy", 100)])
    schedule = Schedule({"compute": ("a",), "comm": ("x",), "copy": ("y",)})
    timeline = simulate(graph, schedule, {("compute", "comm"): 0.5, ("compute", "copy"): 0.25})
    assert timeline.end["a"] == pytest.approx(8)
    with pytest.raises(ScheduleError, match="rate"):
        simulate(graph, schedule, {("compute", "comm"): 0.0})


def test_what_is_on_a_link_at_once_shares_it():
    """An all-reduce beside an all-to-all never beats the link, and each has all of it when the other is done."""
    tasks = [task("a2a", "comm", 2), task("reduce", "gradient", 3), task("copy", "d2h", 1)]
    graph = TaskGraph([*(replace(each, link="inter") for each in tasks[:2]), replace(tasks[2], link="d2h")])
    schedule = Schedule({each.resource: (each.name,) for each in graph})
    timeline = simulate(graph, schedule)
    assert dict(timeline.end) == pytest.approx({"a2a": 4, "reduce": 5, "copy": 1})
    slowed = simulate(graph, schedule, {("inter", "d2h"): 0.5, ("d2h", "inter"): 0.25})
    assert slowed.end["copy"] == pytest.approx(4), "two on one link are one busy link"
    assert slowed.end["a2a"] == pytest.approx(4 + 2)


@given(windows(), st.data())
@settings(max_examples=25, deadline=None)
def test_no_order_beats_the_bandwidth_of_a_link(graph, data):
    links = {resource: data.draw(st.sampled_from(["", "inter", "intra"])) for resource in graph.resources}
    graph = TaskGraph(replace(each, link="" if each.resource == "compute" else links[each.resource]) for each in graph)
    timeline = simulate(graph, optsche(graph))
    for link in {each.busies for each in graph}:
        assert timeline.makespan >= sum(each.duration for each in graph if each.busies == link) - 1e-6


@given(windows(), st.floats(0.3, 1))
@settings(max_examples=40, deadline=None)
def test_interference_at_rate_one_is_none_and_slower_rates_are_slower(graph, rate):
    schedule = optsche(graph)
    alone = simulate(graph, schedule)
    same = simulate(graph, schedule, {("compute", "comm"): 1.0})
    assert same.makespan == pytest.approx(alone.makespan)
    assert list(same.end.values()) == pytest.approx(list(alone.end.values()))
    slow = simulate(graph, schedule, {("compute", "comm"): rate, ("comm", "compute"): rate})
    assert alone.makespan - 1e-6 <= slow.makespan <= alone.makespan / rate + 1e-6


@given(windows(), st.data())
@settings(max_examples=40, deadline=None)
def test_in_one_order_no_task_ends_earlier_because_one_takes_longer(graph, data):
    i = data.draw(st.integers(0, len(graph) - 1))
    schedule = optsche(graph)
    tasks = list(graph)
    tasks[i] = replace(tasks[i], duration=tasks[i].duration + data.draw(st.integers(1, 5)))
    before, after = simulate(graph, schedule), simulate(TaskGraph(tasks), schedule)
    assert all(after.end[name] >= before.end[name] for name in before.end)


def test_a_layer_that_restores_copies_sends_and_computes_again():
    """Copies hide behind other chunks; a ring of one lets nothing come back before the chunk before is done."""
    forward, backward = schemoe_layer(TIMES, 2), schemoe_layer(TIMES, 2, backward=True)
    assert len(restoring(forward, [{"d2h": 1.0}, {}], 2)) == len(forward) + 1
    weighed = restoring(forward, [{"comm": 0.5, "compute": 0.25}, {}], 2)
    assert {"AGAIN[0]", "REDO[0]"} <= {*weighed["E[0]"].after}
    assert not {"AGAIN[1]", "REDO[1]"} & {*weighed["E[1]"].after}
    extra = [{"h2d": 0.5, "comm": 0.25, "compute": 2.0}] * 2
    found = restoring(backward, extra, 1, backward=True)
    assert found["E[0]"].after == (*backward["E[0]"].after, "PRE[0]", "AGAIN[0]", "REDO[0]")
    assert found["REDO[1]"].after == ("W[0]", "PRE[1]", "AGAIN[1]")
    assert found["PRE[1]"].after == ("W[0]",)
    free, bound = (schedule(restoring(backward, extra, rings, backward=True)).timeline.makespan for rings in (0, 1))
    assert schedule(backward).timeline.makespan + 4.0 <= free <= bound
    parts = schemoe_layer(TIMES, 2, backward=True, all_to_all="2dh")
    assert restoring(parts, extra, 2, backward=True, all_to_all="2dh")["AGAIN[0]"].resource == "inter"
