"""Which arms are near the fastest, and what is predicted for other sizes than a program was made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch

from moefx.analysis.sizes import typical_sizes
from moefx.capture.inputs import tokens_of, with_tokens
from moefx.context.decisions import Choice
from moefx.features.tuning import arms
from moefx.options import Options
from moefx.planning.planner import Decision, RegionPlan, decide
from moefx.planning.pricing import Candidate
from tests.planning.test_planner import machine, whole

ONE, TWO, FOUR = (Choice(chunks=n) for n in (1, 2, 4))


def plan(region, seconds, chosen=None, **memory):
    """seconds: {choice: of the region}."""
    found = [Candidate(choice, s, 0.0, 0.0, memory.get(f"c{choice.chunks}", 0.0), choice.scheduler)
             for choice, s in seconds.items()]  # fmt: skip
    ranked = sorted(found, key=lambda each: each.seconds)
    first = next((each for each in found if each.choice == chosen), ranked[0])
    return RegionPlan(region, "", first, tuple(ranked), "", {}, {}, {})


def near(*plans, options=None):
    found = arms.near([Decision(machine(), {}, plans)], options or Options(alltoall="direct"))
    return {dict(arm)["chunks"]: seconds for arm, seconds in found}


def test_times_of_all_regions_are_added_up():
    assert near(plan(0, {ONE: 1.0, TWO: 1.2}), plan(1, {ONE: 1.5, TWO: 1.1})) == pytest.approx({2: 2.3, 1: 2.5})


def test_arms_that_a_region_cannot_have_are_none():
    assert near(plan(0, {ONE: 1.0, TWO: 0.9}), plan(1, {ONE: 1.5, FOUR: 1.1})) == {1: 2.5}
    assert near(plan(0, {TWO: 0.9, FOUR: 1.0}), plan(1, {ONE: 1.5, TWO: 1.1, FOUR: 1.2})) == {2: 2.0, 4: 2.2}
    assert near(plan(0, {ONE: 1.0, TWO: 1.1}), plan(1, {Choice(chunks=8): 2.0})) == pytest.approx({1: 3.0, 2: 3.1})


def test_few_are_near_and_none_differ_in_their_order_alone():
    order = Choice(chunks=2, scheduler="heuristic")
    assert near(plan(0, {ONE: 1.0, TWO: 1.04, order: 1.03, FOUR: 1.1, Choice(chunks=8): 1.2})) == {
        1: 1.0, 2: 1.03, 4: 1.1}  # fmt: skip
    assert near(plan(0, {ONE: 1.0, TWO: 1.4, FOUR: 1.45})) == {1: 1.0, 2: 1.4}, "there is something to measure"
    assert near(plan(0, {ONE: 1.0, TWO: 1.6})) == {1: 1.0}
    assert near() == {}


def test_the_simplest_comes_first_if_it_is_about_as_fast():
    assert list(near(plan(0, {ONE: 1.01, TWO: 1.0}, chosen=ONE))) == [1, 2]
    assert list(near(plan(0, {ONE: 1.1, TWO: 1.0}, chosen=ONE))) == [2, 1]


def test_what_does_not_fit_is_no_arm():
    limited = Options(alltoall="direct", memory_limit=10.0)
    assert near(plan(0, {ONE: 1.0, TWO: 1.1}, TWO, c1=20.0, c2=5.0), options=limited) == {2: 1.1}


def test_an_arm_has_what_the_options_leave_open():
    (arm, _), *_ = arms.near([Decision(machine(), {}, (plan(0, {replace(TWO, r=1, split="s2"): 1.0}),))], Options())
    assert dict(arm) == {"alltoall": "direct", "chunks": 2, "r": 1, "split": "s2", "scheduler": "optsche"}
    given = Options.named(alltoall="direct", scheduler="optsche", split="s2", r=1)
    (arm, _), *_ = arms.near([Decision(machine(), {}, (plan(0, {replace(TWO, r=1, split="s2"): 1.0}),))], given)
    assert arm == (("chunks", 2),)
    assert arms.without_machine(Options(chunks=2)) == [()]


def test_larger_batches_have_more_chunks_by_the_same_graphs():
    """As `Variant.planned_for` asks for it."""
    step, ctx = whole()
    (symbol,) = [name for name in typical_sizes(step.graphs.values(), ctx) if name.startswith("s")]
    slow = machine(message_s=2e-4, bytes_per_s=4e8, flops=1e11)
    first = {}
    for tokens in (16, 4096, 65536):
        found = decide(step, replace(ctx, sizes={**ctx.sizes, symbol: tokens}), slow)
        first[tokens] = dict(arms.near([found], ctx.options)[0][0])["chunks"]
    assert first[16] == 1
    assert first[16] < first[4096] <= first[65536]


def test_tokens_are_counted_and_set_in_the_first_tensor():
    ids, rows = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, 16)
    assert [tokens_of(each) for each in ([None, ids, rows], [rows, ids], [torch.zeros(5)], [1])] == [24, 24, 5, 0]
    batch, length = sympy.symbols("s0 s1", integer=True)
    shapes, leaves, sizes = (None, (batch, length)), (("NoneType", None), (torch.int64, 2)), {"s0": 4, "s1": 64}
    assert with_tokens(shapes, leaves, sizes, 1024) == {"s0": 4, "s1": 256}
    assert with_tokens(((sympy.Integer(4), sympy.Integer(64)),), leaves[1:], {}, 1024) == {}
    of_rows = ((batch, sympy.Integer(64), sympy.Integer(16)),)
    assert with_tokens(of_rows, ((torch.float32, 3),), {"s0": 4}, 1024) == {"s0": 16}
