"""The closed form against the simulator."""

from __future__ import annotations

import random

import sympy

from moefx.costmodel.closed_form import CHUNKS, DURATIONS, optsche_formula
from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.schedulers import optsche
from moefx.costmodel.simulate import simulate
from moefx.costmodel.tasks import end_times

optsche_makespan = sympy.lambdify((*DURATIONS, CHUNKS), optsche_formula(), modules=[{"Max": max}])


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


def test_one_chunk_has_no_overlap():
    assert optsche_makespan(1, 2, 3, 4, 5, 6, 7, 1) == 28
