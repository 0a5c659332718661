"""Strategies for what the backward reads: the numbers of the eager model, and what they send. The classes themselves:
tests/analysis/test_restorables.py; more chunks and schedulers: test_pipelining.py; at random: test_fuzz.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import moefx
from moefx.costmodel.curves import AlphaBeta
from tests.planning.test_planner import machine
from tests.support.handmade import D
from tests.support.models import shallow
from tests.support.scenarios import EP2, check_accumulation, check_compiled, check_in_flight, compiled_case, steps_of
from tests.support.sharing import run_sharing

UNEVEN = [(2, 2), (3, 10)]
FULL = pytest.mark.full


def compiled(options, model, mesh):
    return moefx.compile(model, mesh, **options)


def test_what_arrived_is_sent_once_more():
    case = shallow("loop-plain")
    wanted = steps_of(case, [UNEVEN])
    there, back = map(sum, zip(*run_sharing(2, _sent, EP2, case, wanted)))
    # Rows go out and back, and the score of each goes out; then the same as gradients, and rows out again.
    assert there * (3 * D + 1) == back * (2 * D + 1) > 0


def _sent(rank, world, layout, case, steps):
    """Bytes of rows and scores that a rank sends in forward and backward."""
    options = {"keep": "mpipemoe-s4", "chunks": 2}
    model = compiled_case(case, layout, partial(compiled, options))
    check_compiled(rank, layout, case, steps, model)
    out = model(**steps[0][0][rank])
    trace = model._session.trace
    forward = len(trace)
    out.loss.backward()
    model.close()
    return [sum(t.num_bytes for t in part if t.kind == "all_to_all") for part in (trace[:forward], trace[forward:])]


SLOW = replace(machine(bytes_per_s=1e6, flops=1e13), copies=dict.fromkeys(("d2h", "h2d"), AlphaBeta.of(1.0, 1.0)))


@pytest.mark.parametrize(("options", "share", "way"), [
    ({"machine": "emulated-200mbit"}, 0.8, ""),
    ({"machine": SLOW, "chunks": 4, "keep": "auto", "verify": 2}, 0.7, "inside"),
])  # fmt: skip
def test_what_the_planner_takes_to_stay_within_a_limit(options, share, way):
    case = shallow("loop-plain")
    ways, other = run_sharing(2, _within, EP2, case, steps_of(case, [[(4, 40), (6, 20)]]), options, share)
    assert ways == other
    assert {each for mine in ways.values() for each in mine} - {"keep"} >= {way} - {""}
    assert ways


def _within(rank, world, layout, case, steps, options, share):
    """The ways of a program that may need a share of what one without a limit does."""
    free = compiled_case(case, layout, partial(compiled, options | {"keep": None}))
    free(**steps[0][0][rank])
    (program,) = moefx.explain(free).programs
    free.close()
    limit = share * max(peak.bytes for peak in program.peaks.values())
    model = compiled_case(case, layout, partial(compiled, options | {"memory_limit": limit}))
    check_compiled(rank, layout, case, steps, model)
    (variant,) = model._whole.variants
    found, said = dict(variant.context.decisions.restoring), str(moefx.explain(model))
    model.close()
    for name, ways in found.items():
        assert {*ways} != {"inside"} or "before the last product" in said, name
    return found


@pytest.mark.parametrize(("check", "options"), [
    (check_in_flight, {"keep": "mpipemoe-s3", "chunks": 3}),
    pytest.param(check_accumulation, {"keep": "mpipemoe-s2", "chunks": 3}, marks=FULL),
    pytest.param(check_in_flight, {"keep": "mpipemoe-s4", "chunks": 2, "verify": 2}, marks=FULL),
])  # fmt: skip
def test_several_forwards(check, options):
    case = shallow("loop-plain")
    run_sharing(2, check, EP2, case, steps_of(case, [UNEVEN] * 2), partial(compiled, options))
