"""The closed forms against the simulator."""

from __future__ import annotations

import random

import pytest
import sympy

from moefx.costmodel.closed_form import (
    CHUNKS,
    DURATIONS,
    PER_NODE,
    RANKS,
    RHO,
    T1,
    T2,
    optsche_formula,
    optsche_makespan,
    pipe_formulas,
    pipe_speedup,
    pipe_times,
)
from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.schedulers import optsche
from moefx.costmodel.simulate import simulate
from moefx.costmodel.tasks import Schedule, Task, TaskGraph, end_times


def cases(count: int, chunks: int) -> list[tuple[tuple[int, ...], int]]:
    """(seven durations, chunks): small ones, so that ties and zeros are frequent, and wide ones."""
    source = random.Random(count)
    return [(tuple(source.randint(0, source.choice((3, 10, 1000))) for _ in range(7)), source.randint(1, chunks))
            for _ in range(count)]


def test_optsche_is_the_simulated_makespan():
    """4000 cases. Orders do not depend on durations, so each number of chunks is ordered once."""
    orders = {}
    for times, chunks in cases(4000, 8):
        graph = schemoe_layer(LayerTimes(*times), chunks)
        if chunks not in orders:
            orders[chunks] = [graph.index[name] for name in optsche(graph).total_order(graph)]
        assert optsche_makespan(*times, chunks) == max(end_times(graph, orders[chunks]))
    graph = schemoe_layer(LayerTimes(*times), chunks)
    assert optsche_makespan(*times, chunks) == simulate(graph, optsche(graph)).makespan


def test_the_formula_says_the_same():
    fast = sympy.lambdify((*DURATIONS, CHUNKS), optsche_formula(), modules=[{"Max": max}])
    assert all(fast(*times, chunks) == optsche_makespan(*times, chunks) for times, chunks in cases(500, 8))
    assert optsche_formula().free_symbols == {*DURATIONS, CHUNKS}


def test_one_chunk_has_no_overlap():
    assert optsche_makespan(1, 2, 3, 4, 5, 6, 7, 1) == 28


def simulated_pipe(ranks: int, per_node: int, t1: float, t2: float) -> tuple[float, float]:
    """(both links at once, one transfer after the other), transfer by transfer."""
    def total(intra: str, inter: str) -> float:
        graph = TaskGraph([Task(f"to {i}", "SR", intra if i < per_node - 1 else inter, t1 if i < per_node - 1 else t2)
                           for i in range(ranks - 1)])
        return simulate(graph, Schedule.from_sequence(graph, [task.name for task in graph])).makespan
    return total("intra", "inter"), total("comm", "comm")


@pytest.mark.parametrize(("ranks", "per_node", "t1", "t2"), [(32, 4, 1, 1), (32, 4, 7, 1), (8, 8, 1, 5), (9, 3, 9, 2)])
def test_pipe_is_the_simulated_all_to_all(ranks, per_node, t1, t2):
    assert pipe_times(ranks, per_node, t1, t2) == pytest.approx(simulated_pipe(ranks, per_node, t1, t2))
    at = {RANKS: ranks, PER_NODE: per_node, T1: t1, T2: t2, RHO: sympy.Rational(1, 4)}
    pipe, sequential, speedup = (formula.subs(at).doit() for formula in pipe_formulas())
    assert (pipe, sequential) == pytest.approx(pipe_times(ranks, per_node, t1, t2, rho=0.25))
    assert speedup == pytest.approx(pipe_speedup(ranks, per_node, t1, t2, rho=0.25))


def test_limits_of_the_speedup():
    assert pipe_speedup(32, 4, 28, 3) == 2  # equal parts: the most, against the paper's remark
    assert pipe_speedup(32, 4, 28, 3, rho=1) == 1  # one shared link
    assert pipe_speedup(4, 4, 1, 1) == 1  # one node
    assert pipe_speedup(4, 1, 1, 1) == 1  # nobody else on the node
    assert pipe_speedup(1, 1, 1, 1) == 1  # nothing is sent
    assert pipe_speedup(32, 4, 7, 1, self_copy=True) == 2  # the paper's own count
