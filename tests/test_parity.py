"""The compiled model equals the reference on two and four ranks, which are threads that share one compile.

The reference is N eager copies with averaged gradients (see tests/support/parity.py). tests/gloo/test_parity.py has
fewer models on processes.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.handmade import with_layer
from tests.support.level_styles import LEVEL_STYLES
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.parity import one_token, routing, skew
from tests.support.scenarios import (
    DP2_EP2,
    EP2,
    EP4,
    check_evaluation,
    check_rounding,
    check_steps,
    evaluation_of,
    reference_rounding,
    steps_of,
)
from tests.support.sharing import run_sharing

EVEN, UNEVEN, ONE_ROW = [(2, 8), (2, 8)], [(2, 6), (3, 10)], [(1, 6), (3, 10)]
FEW = ["loop-setitem", "mixtral-grouped_mm", "gshard-swiglu"]


# One of every family and style; the rest run on processes, or differ in what one rank shows as well, and with --full.
TWO_RANKS = ["qwen3_moe-frozen", "mixtral-tied", "loop-continue", "gshard-grouped"]
FOUR_RANKS = {
    "ep4": ["gpt_oss-grouped_mm"],
    "dp2_ep2": ["loop-before"],
}
# A second layer shows nothing more of these.
ONE_LAYER = [
    "mixtral-router_logits", "mixtral-tied",
    "gpt_oss-grouped_mm", "loop-gated_shared", "loop-continue", "loop-before", "gshard-grouped",
]  # fmt: skip


def _four_ranks() -> list:
    """Some models on each mesh of four; with --full all on both."""
    params = []
    for label, layout in {"ep4": EP4, "dp2_ep2": DP2_EP2}.items():
        for name in CASES:
            marks = [] if name in FOUR_RANKS[label] else [pytest.mark.full]
            params.append(pytest.param(name, layout, id=f"{name}-{label}", marks=marks))
    return params


# Every model


@pytest.mark.parametrize("name", chosen(TWO_RANKS))
def test_every_model_on_two_ranks(name):
    # Capacity follows from the length, so that ranks of unequal batches have unequal capacities: a test of its own.
    shapes = [EVEN] if name.startswith("gshard") else [EVEN, ONE_ROW if name == "loop-continue" else UNEVEN]
    case = shallow(name) if name in ONE_LAYER else CASES[name]
    run_sharing(2, check_steps, EP2, case, steps_of(case, shapes))


@pytest.mark.parametrize(("name", "layout"), _four_ranks())
def test_every_model_on_four_ranks(name, layout):
    case = shallow(name) if name in ONE_LAYER else CASES[name]
    run_sharing(4, check_steps, layout, case, steps_of(case, [EVEN * 2]))


@pytest.mark.parametrize("name", chosen(["loop-setitem"], FEW))
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(((2,), ("ep",)), id="ep", marks=pytest.mark.full),
        pytest.param(((2,), ("dp",)), id="dp"),
        pytest.param(((2, 1), ("dp", "ep")), id="dp2_ep1", marks=pytest.mark.full),
        pytest.param(((2, 2), ("ep", "dp")), id="ep_dp"),
    ],
)
def test_mesh_names_and_order(name, layout):
    world = 4 if len(layout[0]) == 2 and layout[0][1] == 2 else 2
    case = shallow(name)
    run_sharing(world, check_steps, layout, case, steps_of(case, [EVEN * (world // 2)]))


# Routing and shapes


@pytest.mark.parametrize(
    "name", chosen(["gpt_oss-grouped_mm"],
                   ["gpt_oss-grouped_mm", "deepseek_v3-eager", "loop-shared", "loop-counting"])
)
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full), 4])
def test_all_tokens_go_to_one_rank(name, first):
    make = shallow(name).make
    k = routing(make(), CASES[name].batch(0)).chosen[-1].shape[-1]
    experts = list(range(first, first + k))
    case = Case(name, make, edit=partial(skew, experts=experts))
    steps = steps_of(case, [EVEN, UNEVEN])
    last = routing(case.build(), steps[0][0][0]).chosen[-1]
    assert sorted(last.unique().tolist()) == experts
    run_sharing(2, check_steps, EP2, case, steps)


@pytest.mark.parametrize(
    "name", chosen(["loop-sigmoid"],
                   ["qwen3_moe-eager", "mixtral-batched_mm", "loop-sigmoid", "loop-continue"])
)
def test_most_experts_are_idle(name):
    case = shallow(name)
    steps = steps_of(case, [EVEN * 2], change=partial(one_token, token=7))
    assert len(routing(case.build(), steps[0][0][0]).chosen[0].unique()) <= 3
    run_sharing(4, check_steps, EP4, case, steps)


@pytest.mark.parametrize(
    "name", chosen(["deepseek_v3-grouped_mm"],
                   [n for n in CASES if n.endswith(("-grouped_mm", "-router_logits"))])
)
def test_attention_masks(name):
    case = shallow(name)
    run_sharing(2, check_steps, EP2, case, steps_of(case, [EVEN, UNEVEN], padded=True))


# The first way is captured in as many forms as there are groups; tests/test_styles.py has it at level 2.
@pytest.mark.parametrize("style", [pytest.param(LEVEL_STYLES[0], marks=pytest.mark.full), *LEVEL_STYLES[1:]])
def test_groups_of_experts_are_idle_on_one_rank(style):
    """Ranks with one token choose two of three groups; with another batch size each they choose other ones."""
    case = Case(style.__name__, partial(with_layer, style))
    run_sharing(2, check_steps, EP2, case, steps_of(case, [[(1, 1), (3, 10)], EVEN]))


# Use in training


@pytest.mark.parametrize("name", chosen(["mixtral-grouped_mm"], FEW))
def test_evaluation(name):
    case = shallow(name)
    run_sharing(2, check_evaluation, EP2, case, evaluation_of(case, EVEN))


@pytest.mark.parametrize("name", chosen(["loop-setitem"], FEW))
def test_bf16_autocast(name):
    case = shallow(name)
    run_sharing(2, check_rounding, EP2, case, reference_rounding(case, 2))


def test_statistics_of_all_ranks_add_up_over_steps():
    case = shallow("loop-counting")
    run_sharing(4, check_steps, DP2_EP2, case, steps_of(case, [EVEN * 2] * 3))
