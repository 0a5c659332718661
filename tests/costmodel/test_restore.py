"""What is kept, done again and offloaded under one budget: the choice is the best of all, and says so."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from moefx.costmodel import budget
from moefx.costmodel.restore import PASSES, QUEUES, Layer, Space, ValueClass, as_array, seconds_of


def values(name, nbytes, number, slots=0, redo=None, offload=None):
    ways = {"redo": redo and {("backward", "compute"): redo},
            "offload": offload and {("forward", "d2h"): offload, ("backward", "h2d"): offload}}  # fmt: skip
    return ValueClass.of(name, nbytes, number, slots=slots, **{way: loads for way, loads in ways.items() if loads})


def drawn(draw, count):
    """A layer of small whole numbers, so that sums are exact."""
    chunks, classes = draw.choice([1, 2, 3, 4]), []
    for number in range(draw.choice([1, 2])):
        queue = draw.choice(QUEUES[:2])
        ways = {"redo": {("backward", queue): draw.randint(0, 9)}} if draw.random() < 0.8 else {}
        if draw.random() < 0.5:
            ways["offload"] = {("forward", "d2h"): draw.randint(0, 9), ("backward", "h2d"): draw.randint(0, 9)}
        one = ValueClass.of(f"c{number}", draw.randint(4, 12), chunks if draw.random() < 0.8 else 1,
                            slots=draw.choice([0, 1, 2]), **ways)  # fmt: skip
        if "redo" in ways and draw.random() < 0.3:
            again = replace(one.ways["redo"], held=draw.randint(0, 3), passing=draw.randint(0, 3))
            one = replace(one, ways={**one.ways, "redo": again})
        classes.append(one)
    loads = {(name, queue): draw.randint(0, 20) for name in PASSES for queue in QUEUES[:2]}
    seconds = draw.choice([None, draw.randint(0, 99)])
    return Layer("layer", chunks, loads, tuple(classes), draw.randint(0, 5), count, seconds)


def points(layer):
    """(held, transient, seconds) of every assignment of ways to single values, by the formula as it is written."""

    def took(loads):
        rows = [[loads.get((name, queue), 0) for queue in QUEUES] for name in PASSES]
        return sum(max(row) + (sum(row) - max(row)) / layer.chunks for row in rows)

    found = set()
    offset = 0 if layer.seconds is None else layer.seconds - took(layer.loads)
    members = [(values, tuple(values.ways.values())) for values in layer.classes for _ in range(values.number)]
    for picked in itertools.product(*(ways for _, ways in members)):
        loads, absent = dict(layer.loads), {values.name: [] for values in layer.classes}
        for (one, _), way in zip(members, picked):
            absent[one.name].append(one.nbytes - way.held)
            for key, seconds in way.loads.items():
                loads[key] = loads.get(key, 0) + seconds
        back = sum(sum(sorted(absent[one.name], reverse=True)[: one.slots or None]) for one in layer.classes)
        back += sum(max(way.passing for (each, _), way in zip(members, picked) if each is one) for one in layer.classes)
        found.add((sum(way.held for way in picked), layer.fixed + back, offset + took(loads)))
    return found


def test_no_regret_against_enumeration():
    """Every limit between the least and the most, at random: as fast as the best of all, or refused with the least."""
    refused = tried = 0
    for seed in range(120):
        draw = random.Random(seed)
        layers = []
        for _ in range(draw.choice([1, 2, 2])):
            count = draw.choice([1, 1, 2])
            layers.append([drawn(draw, count) for _ in range(draw.choice([1, 1, 2]))])
        each = [set().union(*map(points, some)) for some in layers for _ in range(some[0].count)]
        if math.prod(map(len, each)) > 3000:
            continue
        every = [(sum(p[0] for p in picked) + max(p[1] for p in picked), sum(p[2] for p in picked))
                 for picked in itertools.product(*each)]  # fmt: skip
        low, high = min(every)[0], max(every)[0]
        space = Space(layers)
        assert space.least == low
        for share in (-0.1, 0.0, draw.random(), draw.random()):
            limit = low + share * max(high - low, 1)
            best = min((seconds for size, seconds in every if size <= limit), default=None)
            found = space.choose(limit)
            tried, refused = tried + 1, refused + (found is None)
            assert (found is None) == (best is None)
            if found is not None:
                assert found.is_exact
                assert found.bytes <= limit
                assert found.seconds == pytest.approx(best, rel=1e-12)
    assert tried > 300
    assert refused >= tried / 4


def test_what_the_multiplier_misses_is_found_by_search():
    """The steepest step first leaves 4 of 10 that nothing fits into; two others fit exactly."""

    def choice(size, cost):
        return np.array([0.0, size]), np.array([float(cost), 0.0])

    found = budget.Problem([choice(6, 7), choice(5, 5), choice(5, 5)]).solve(10)
    assert found == (7, (0, 1, 1), True)


def test_copies_hide_behind_computation_and_redoing_does_not():
    busy = {("forward", "compute"): 100, ("backward", "compute"): 200}
    layer = Layer("moe", 8, busy, (values("rows", 10, 8, slots=2, redo=5, offload=5),))
    assert Space([[layer]]).choose(80).mixes[0][1]["rows"]["keep"] == 8
    # three go, and two are back at once: with less than three nothing would be gained
    assert Space([[layer]]).choose(79).mixes[0][1]["rows"] == {"keep": 5, "redo": 0, "offload": 3}
    found = Space([[layer]]).choose(30)
    assert found.mixes[0][1]["rows"] == {"keep": 1, "redo": 0, "offload": 7}
    slow = Layer("moe", 8, busy, (values("rows", 10, 8, slots=2, redo=5, offload=500),))
    assert Space([[slow]]).choose(30).mixes[0][1]["rows"] == {"keep": 1, "redo": 7, "offload": 0}
    assert Space([[slow]]).choose(19) is None
    assert Space([[slow]]).least == 20  # a ring of two


def test_queues_that_hinder_one_another():
    loads = as_array({("forward", "comm"): 6.0, ("forward", "d2h"): 2.0, ("backward", "comm"): 1.0,
                      ("backward", "h2d"): 9.0})  # fmt: skip
    assert seconds_of(loads, 2) == 6 + 1 + 9 + 0.5
    # a transfer at half of its speed while copies run: 1 s lost of the 2 s of copies; all of the short one
    assert seconds_of(loads, 2, {("comm", "d2h"): 0.5, ("comm", "h2d"): 0.5}) == 7 + 1 + 9 + 1


def test_many_equal_layers_fill_the_budget():
    """48 layers of 8 chunks: what is left of the budget is less than one value."""
    parts = tuple(ValueClass.of(name, nbytes, 8, slots=2, redo={("backward", queue): redo},
                                offload={("forward", "d2h"): nbytes / 25, ("backward", "h2d"): nbytes / 25})
                  for name, nbytes, queue, redo in (("in", 8, "comm", 0.4), ("inner", 32, "compute", 0.5),
                                                    ("back", 8, "comm", 0.3)))  # fmt: skip
    busy = {(name, queue): seconds for name in PASSES for queue, seconds in (("compute", 9), ("comm", 6))}
    layers = [[Layer("moe", 8, busy, parts, 10, 48)]]
    space = Space(layers)
    low, high = space.least, 48 * 8 * 48 + 10
    plans = [space.choose(low + share * (high - low)) for share in (0, 0.3, 0.7, 1)]
    assert all(plan.is_exact for plan in plans)
    assert [plan.seconds for plan in plans] == sorted((plan.seconds for plan in plans), reverse=True)
    assert plans[1].bytes > low + 0.3 * (high - low) - 8
    assert np.isclose(plans[-1].held, 48 * 8 * 48)


def test_a_layer_that_stands_for_several_counts_so_often():
    """Layers that must go one way: three of them, in three times the bytes and the time of one."""
    layer = Layer("layer", 8, {("forward", "compute"): 5.0}, (values("rows", 10, 8, slots=2, redo=3, offload=1),), 10)
    three = Space([[replace(layer, times=3)]])
    for limit in (60, 90, 150, 250):
        found = three.choose(limit)
        fastest = min(3 * seconds for held, transient, seconds in points(layer) if 3 * held + transient <= limit)
        assert found.seconds == pytest.approx(fastest)
        assert found.held == 3 * layer.held(found.mixes[0][1])
        assert found.bytes <= limit
        assert three.near(0, layer.held(found.mixes[0][1]), found.transient, 1)[0][1] == found.mixes[0][1]
    assert three.choose(three.least - 1) is None
