"""Choices that change from call to call: programs of their own, made once, on parameters that stay where they are."""

from __future__ import annotations

import pytest

import moefx
from moefx.errors import DivergenceError, MoefxError, UnsupportedUse
from tests.support.models import shallow
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

ARMS = ({}, {"chunks": 2}, {"chunks": 2, "scheduler": "heuristic"})


def check_arms(rank, world, layout, case, steps, arms):
    """An arm of its own in every step, round and round: right numbers, and no program is made twice."""
    compiled = compiled_case(case, layout)
    addresses = None
    for turn in range(2):
        for arm in arms:
            compiled.use(**arm)
            check_compiled(rank, layout, case, steps, compiled)
            found = {name: param.to_local().data_ptr() for name, param in compiled.named_parameters()}
            assert addresses in (None, found)
            addresses = found
        assert len(compiled._variants) == len(arms), turn


def test_every_arm_has_a_program_of_its_own():
    case = shallow("loop-setitem")
    run_sharing(2, check_arms, EP2, case, steps_of(case, [[(2, 8), (2, 8)]]), ARMS)


def _refuses(rank, world, case, steps):
    compiled = compiled_case(case, EP2)
    check_compiled(rank, EP2, case, steps, compiled)
    with pytest.raises(UnsupportedUse, match="'ep' is not chosen from call to call"):
        compiled.use(ep=2)
    with pytest.raises(MoefxError, match="chunks is 0"):
        compiled.use(chunks=0)
    with pytest.raises(MoefxError, match="there is no scheduler 'none'"):
        compiled.use(scheduler="none")
    check_compiled(rank, EP2, case, steps, compiled)
    assert len(compiled._variants) == 1


def test_what_is_no_arm_is_refused_and_changes_nothing():
    case = shallow("loop-setitem")
    run_sharing(2, _refuses, case, steps_of(case, [[(2, 8), (2, 8)]]))


def _differs(rank, world, case, steps):
    compiled = compiled_case(case, EP2)
    check_compiled(rank, EP2, case, steps, compiled)
    compiled.use(chunks=1 + rank)
    with pytest.raises(DivergenceError, match=r"rank 0 of the mesh \{'chunks': 1\}, rank 1 \{'chunks': 2\}"):
        check_compiled(rank, EP2, case, steps, compiled)
    compiled.use()
    check_compiled(rank, EP2, case, steps, compiled)


def test_ranks_with_different_choices_are_told_before_they_exchange_anything():
    case = shallow("loop-setitem")
    run_sharing(2, _differs, case, steps_of(case, [[(2, 8), (2, 8)]]))


def test_an_arm_is_options():
    assert moefx.Options(chunks=4).changed(chunks=2, r=1) == moefx.Options.named(chunks=2, r=1)
