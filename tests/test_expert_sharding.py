"""Every expert cut over `esp`: outputs and gradients of the whole model, on meshes of `dp`, `ep` and `esp`."""

from __future__ import annotations

from functools import partial

import pytest

import moefx
from tests.support.models import CASES, Case, chosen
from tests.support.parity import one_token, routing, skew
from tests.support.scenarios import check_steps, steps_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN = [(2, 8), (2, 8)], [(1, 6), (3, 10)]
EP_ESP = ((2, 2), ("ep", "esp"))
ESP = ((2,), ("esp",))
# Fused halves, interleaved halves with both biases, separate experts with biases, static blocks with biases; a loss of
# the router.
STYLES = ["mixtral-router_logits", "gpt_oss-grouped_mm", "loop-ungated", "gshard-grouped", "deepseek_v3-eager"]


@pytest.mark.parametrize("name", chosen(STYLES))
def test_every_style(name):
    shapes = [EVEN * 2] if name.startswith("gshard") else [UNEVEN * 2]
    run_sharing(4, check_steps, EP_ESP, CASES[name], steps_of(CASES[name], shapes))


@pytest.mark.parametrize("layout", [
    ESP, ((2, 2), ("dp", "esp")), ((2, 2), ("esp", "dp")), ((4,), ("etp",)),
    pytest.param(((2, 2, 2), ("dp", "ep", "esp")), marks=pytest.mark.full),
], ids=lambda layout: "-".join(f"{name}{size}" for size, name in zip(*layout)))  # fmt: skip
@pytest.mark.parametrize("name", chosen(["gpt_oss-grouped_mm"], ["gpt_oss-grouped_mm", "loop-plain", "gshard-swiglu"]))
def test_meshes(name, layout):
    world = 8 if len(layout[0]) == 3 else sum(layout[0]) if len(layout[0]) == 2 else layout[0][0]
    shapes = (EVEN if name.startswith("gshard") else UNEVEN) * 4
    run_sharing(world, check_steps, layout, CASES[name], steps_of(CASES[name], [shapes[:world]]))


def test_all_tokens_go_to_the_ranks_of_two_experts():
    name = "gpt_oss-grouped_mm"
    case = Case(name, CASES[name].make, edit=partial(skew, experts=[0, 1]))
    steps = steps_of(case, [UNEVEN * 2])
    assert sorted(routing(case.build(), steps[0][0][0]).chosen[-1].unique().tolist()) == [0, 1]
    run_sharing(4, check_steps, EP_ESP, case, steps)


def test_most_experts_are_idle():
    case = CASES["loop-sigmoid"]
    run_sharing(4, check_steps, EP_ESP, case, steps_of(case, [EVEN * 2], change=partial(one_token, token=7)))


@pytest.mark.parametrize("options", [
    {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"}, {"chunks": 3, "alltoall": "2dh", "ranks_per_node": 2},
], ids=["optsche pipe", "2dh"])  # fmt: skip
def test_pipelines(options):
    name = "mixtral-grouped_mm"
    compile_fn = partial(moefx.compile, options=moefx.Options(**options))
    run_sharing(4, check_steps, EP_ESP, CASES[name], steps_of(CASES[name], [UNEVEN * 2]), compile_fn)
