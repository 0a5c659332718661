"""The fuzzer of benchmarks/fuzz.py: a few samples, and that it would find a fault and shrink it."""

from __future__ import annotations

import functools
import logging
import runpy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings

from moefx.errors import MeshError
from moefx.runtime import grouped
from tests.support import fuzz
from tests.support.fuzz import Sample, Step, judge, samples, script, shrunk
from tests.support.handmade import Capacity, Loop


@pytest.fixture(autouse=True)
def quiet():
    """Threads that fail are told by their verdict."""
    log = logging.getLogger("torch.testing._internal.common_distributed")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.full)])
def test_random_samples_are_right(count):
    kinds = []

    @settings(max_examples=count, deadline=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(samples())
    def check(sample):
        verdict = judge(sample)
        assert verdict.ok, f"{sample}: {verdict.kind} {verdict.error} {verdict.text}"
        assume(verdict.kind == "equal")  # what is refused makes room for another
        kinds.append(verdict.kind)

    check()
    assert len(kinds) == count


def test_a_refusal_is_told_from_a_failure():
    verdict = judge(Sample(Capacity(num_experts=3)))
    assert (verdict.kind, verdict.error) == ("refused", MeshError.__name__)


RIGHT = grouped.grouped_linear


@functools.wraps(RIGHT)  # so that emitted code finds it under the same name
def forgetful(*args, bias=None, **kwargs):
    """The last row goes without its bias. The graphs are right, so that no check of a pass sees it."""
    out = RIGHT(*args, bias=bias, **kwargs)
    if bias is not None:
        out[-1:] -= bias[-1:]
    return out


def test_a_seeded_fault_is_found_and_shrunk_to_what_it_needs(tmp_path):
    biased = Loop(num_experts=2, bias=True)
    sample = Sample(replace(biased, shared="plain"), steps=(Step(((2, 5), (3, 3))),))
    path = tmp_path / "failure.py"
    with mock.patch.object(grouped, "grouped_linear", forgetful):
        verdict, right = judge(sample), judge(Sample(replace(biased, bias=False), steps=sample.steps))
        with mock.patch.object(fuzz, "judge", lambda s, **_: verdict if s.style.bias else right):  # without compiling
            small, verdict = shrunk(sample, verdict)
        path.write_text(script(small, verdict, str(path)))
        with pytest.raises(SystemExit) as shown:
            runpy.run_path(str(path), run_name="__main__")
    assert shown.value.code
    assert (verdict.kind, right.ok) == ("wrong", True)
    assert small == Sample(biased, steps=(Step(((1, 2),)),))


@functools.wraps(RIGHT)
def rough(*args, **kwargs):
    """A little off, in fp32 alone."""
    out = RIGHT(*args, **kwargs)
    return out * (1 + 1e-5) if out.dtype == torch.float32 else out


def test_rounding_is_what_double_precision_does_not_show():
    sample = Sample(Loop(num_experts=2), steps=(Step(((2, 5), (3, 3))),))
    with mock.patch.object(grouped, "grouped_linear", rough):
        verdict = judge(sample)
    assert (verdict.kind, 1 < verdict.worst < 10, verdict.text != "") == ("rounding", True, True)


@pytest.mark.parametrize(("name", "off", "kind"), [
    ("grad.mlp.router.weight", 3e-6, "rounding"),
    pytest.param("grad.head.weight", 3e-4, "wrong", marks=pytest.mark.full),
    pytest.param("grad.mlp.router.weight", 3e-5, "wrong", marks=pytest.mark.full),
])  # fmt: skip
def test_rounding_of_what_is_zero_is_no_error(name, off, kind):
    """Divided by itself, the weight of the only choice has no gradient but for rounding."""

    def gradients(model):
        found = fuzz.parity.gradients(model)
        return found | {name: found[name] + off * (found[name].dtype == torch.float32)}

    sample = Sample(Loop(num_experts=4, top_k=1, renormalise=True), steps=(Step(((2, 5), (3, 3))),))
    with mock.patch.object(fuzz, "gradients", gradients):
        assert judge(sample).kind == kind


def test_experts_that_are_left_out_have_no_gradient_where_ranks_share_a_program():
    sample = Sample(Loop(num_experts=4, top_k=1, gather="continue"), steps=(Step(((1, 1), (1, 1))),))
    assert judge(sample).kind == "equal"


def test_a_gate_inside_of_an_expert_is_not_skewed():
    plain = Sample(Loop(num_experts=4, top_k=4, bias=True, gated=True, router_bias=True), inner=3)
    before, after = (dict(s.build().named_parameters()) for s in (plain, replace(plain, skewed=True)))
    assert [name for name in before if not before[name].equal(after[name])] == ["mlp.router.bias"]


def test_experts_that_are_called_twice_get_the_gradients_of_both_calls() -> None:
    style = Loop(num_experts=4, top_k=2, gather="mask", scatter="index_add", twice=True)
    verdict = judge(Sample(style, axes=(("dp", 2), ("ep", 2)), steps=(Step(((1, 5), (2, 4), (1, 3), (2, 2))),)))
    assert verdict.kind == "equal", verdict.text
