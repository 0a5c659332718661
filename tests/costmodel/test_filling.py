"""Reductions, and gathers that are read later, lie where exchanges leave their link idle."""

from __future__ import annotations

import random

import pytest

from moefx.costmodel.filling import filled
from moefx.costmodel.schedulers import Plan
from moefx.costmodel.simulate import simulate
from moefx.costmodel.tasks import COMPUTE, Schedule, Task, TaskGraph, check


def compute(name, duration, *after):
    return Task(name, "dense", COMPUTE, duration, after)


def exchange(name, duration, *after, link="inter"):
    return Task(name, "A1", "comm", duration, after, link=link)


def reduction(name, duration, *after, link="inter", resource="gradient"):
    return Task(name, "AR", resource, duration, after, link=link)


def gather(name, duration, *after):
    return Task(name, "gather_shards", "weights", duration, after, link="inter")


def found(*tasks, blocking=False, rates=None):
    """(what was filled, the plan before, in which every resource takes its tasks as they are written)."""
    graph = TaskGraph(tasks)
    order = Schedule.from_sequence(graph, [graph.tasks[i].name for i in graph.order], blocking=blocking)
    timeline = simulate(graph, order, rates)
    plan = Plan("as written", order, timeline, graph.lower_bound(), 0.0)
    result = filled(graph, plan, "weights", rates)
    check(result.graph, result.plan.schedule)
    assert result.plan.timeline == simulate(result.graph, result.plan.schedule, rates)
    assert result.plan.timeline.makespan <= plan.timeline.makespan * (1 + 1e-9)
    return result, plan


# x 0..2 is on its way while a gradient gets ready at 1; b 2..5 computes with x, y leaves at 5
BESIDE = (exchange("x", 2), compute("a", 1), compute("b", 3, "x"), exchange("y", 2, "b"), compute("c", 1, "y"))


def test_a_reduction_comes_behind_the_exchange_that_it_would_hold_up():
    result, plan = found(*BESIDE, reduction("r", 1.5, "a"))
    assert plan.timeline.end["x"] > 2, "it shared the link"
    assert result.behind == {"r": "x"}
    assert (result.plan.timeline.start["r"], result.plan.timeline.end["x"]) == (2, 2)
    assert result.plan.timeline.makespan == 8 < plan.timeline.makespan
    assert (result.fits, result.of) == (1, 1)


def test_what_is_ready_beside_no_exchange_begins_at_once():
    result, plan = found(*BESIDE, compute("d", 0.5, "b"), reduction("r", 1.5, "x"))
    assert (result.behind, result.plan) == ({}, plan)
    result, _ = found(*BESIDE, reduction("r", 1.5, "a", link="intra"))
    assert result.behind == {}
    assert (result.fits, result.of) == (1, 1)


def test_it_begins_where_the_host_is():
    """Where x ends the host is in the middle of a task: the next place is its end."""
    tasks = (exchange("x", 2), compute("a", 1), compute("long", 2, "a"), compute("b", 3, "x", "long"),
             exchange("y", 2, "b"))  # fmt: skip
    result, _ = found(*tasks, reduction("r", 1.5, "a"))
    assert result.behind == {"r": "long"}
    assert result.plan.timeline.start["r"] == 3


def test_what_fits_nowhere_comes_behind_the_last_exchange_if_that_takes_no_longer():
    tasks = (*BESIDE, compute("end", 6, "c"))
    result, _ = found(*tasks, reduction("r", 4, "a"))
    assert result.behind == {"r": "y"}
    assert result.plan.timeline.start["r"] == 7
    assert (result.fits, result.of) == (1, 1)


def test_where_holding_back_takes_longer_nobody_is_held_back():
    """The exchange is hidden anyway."""
    tasks = (exchange("x", 2), compute("a", 1), compute("long", 5, "a"), compute("b", 1, "x", "long"))
    result, plan = found(*tasks, reduction("r", 6, "a"))
    assert (result.behind, result.plan) == ({}, plan)
    assert (result.fits, result.of) == (0, 1)


def test_those_that_fit_are_held_back_though_another_one_would_take_too_long():
    tasks = (*BESIDE, compute("d", 1, "c"), exchange("z", 2, "c"), compute("e", 1, "z"), compute("f", 9, "e"))
    result, plan = found(*tasks, reduction("r", 1.5, "a"), reduction("huge", 16, "b", resource="shards"))
    assert result.behind == {"r": "x"}
    assert (result.fits, result.of) == (1, 2)
    assert result.plan.timeline.end["x"] == 2 < plan.timeline.end["x"]


def test_a_queue_keeps_its_order():
    result, _ = found(*BESIDE, reduction("r1", 2, "a"), reduction("r2", 1, "a"))
    timeline = result.plan.timeline
    assert timeline.start["r1"] == 2
    assert timeline.start["r2"] >= timeline.end["r1"]


def test_a_gather_is_there_before_it_is_read():
    early = (exchange("x", 2), compute("a", 2, "x"), exchange("y", 1, "a"), compute("b", 1, "y", "w"))
    result, plan = found(*early, gather("w", 1))
    assert result.behind == {"w": "x"}
    assert result.plan.timeline.makespan == 6 < plan.timeline.makespan
    at_once = (exchange("x", 2), compute("b", 1, "w"), compute("c", 1, "x", "b"))
    result, plan = found(*at_once, gather("w", 1))
    assert (result.behind, result.plan) == ({}, plan)


def test_blocking_orders_have_no_idle_links():
    result, plan = found(*BESIDE, reduction("r", 1.5, "a"), blocking=True)
    assert (result.behind, result.plan) == ({}, plan)


def test_memory_that_a_reduction_gives_free_is_wanted_in_time():
    """b needs what r takes away; were r held back behind y, which needs b, nobody could begin."""
    tasks = (exchange("x", 2), compute("a", 1), compute("b", 1, "x", "r"), exchange("y", 9, "b"), compute("c", 1, "y"))
    result, _ = found(*tasks, reduction("r", 1, "a"))
    assert result.plan.timeline.start["b"] >= result.plan.timeline.end["r"]


@pytest.mark.parametrize("seed", range(20))
def test_no_program_takes_longer(seed):
    """Random layers; and where all fit, no exchange takes longer than alone."""
    draw = random.Random(seed)
    tasks, before = [], ()
    for layer in range(6):
        for chunk in range(2):
            tasks.append(exchange(f"x{layer}{chunk}", draw.uniform(0.5, 3), *before))
            tasks.append(compute(f"c{layer}{chunk}", draw.uniform(0.5, 3), f"x{layer}{chunk}"))
            tasks.append(reduction(f"r{layer}{chunk}", draw.uniform(0.1, 1.5), f"c{layer}{chunk}"))
        before = (f"c{layer}1",)
    result, _ = found(*tasks, rates={("compute", "inter"): 0.9} if seed % 2 else None)
    assert result.of == 12
    if result.fits == result.of and not seed % 2:
        for task in result.graph:
            taken = result.plan.timeline.end[task.name] - result.plan.timeline.start[task.name]
            assert task.kind != "A1" or taken == pytest.approx(task.duration)
