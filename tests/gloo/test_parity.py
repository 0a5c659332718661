"""The compiled model equals the reference on processes joined by gloo: a few models, in all that training does.

The reference is N eager copies with averaged gradients (see tests/support/parity.py), worked out in this process;
the ranks only compile, run and compare. tests/test_parity.py has all models, on threads.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from tests.support.handmade import OneLayer, loops
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.op_styles import StackedLoop
from tests.support.parity import full, gradients, skew
from tests.support.ranks import run_ranks
from tests.support.scenarios import (
    DP2_EP2,
    EP2,
    EP4,
    check_accumulation,
    check_evaluation,
    check_in_flight,
    check_rounding,
    check_steps,
    check_training,
    compiled_case,
    evaluation_of,
    reference_rounding,
    reference_training,
    steps_of,
)

EVEN, UNEVEN = [(2, 8), (2, 8)], [(1, 6), (3, 10)]
FIXED = partial(moefx.compile, dynamic=False)  # for even ones
FEW = ["loop-setitem", "mixtral-grouped_mm", "gshard-swiglu"]


@pytest.mark.parametrize("name", chosen(["loop-setitem"]))
def test_every_model_on_two_ranks(name):
    # Capacity follows from the length, so that ranks of unequal batches have unequal capacities: a test of its own.
    shapes = [EVEN] if name.startswith("gshard") else [EVEN, UNEVEN]
    run_ranks(2, check_steps, EP2, CASES[name], steps_of(CASES[name], shapes))


@pytest.mark.parametrize("layout", [pytest.param(EP4, id="ep4"), pytest.param(DP2_EP2, id="dp2_ep2")])
@pytest.mark.parametrize("name", chosen([]))
def test_every_model_on_four_ranks(name, layout):
    run_ranks(4, check_steps, layout, CASES[name], steps_of(CASES[name], [EVEN * 2]))


@pytest.mark.full  # on two ranks above
def test_uneven_batches_on_four_ranks():
    case = CASES["mixtral-grouped_mm"]
    steps = steps_of(case, [[(1, 2), (4, 9), (2, 5), (3, 12)], [(3, 12), (1, 2), (1, 3), (2, 4)]])
    run_ranks(4, check_steps, DP2_EP2, case, steps)


def _data_rank(rank, world, layout, case):
    compiled = compiled_case(case, layout)
    size, data_rank = compiled.data_mesh.size(), compiled.data_mesh.get_local_rank()
    compiled.close()
    return size, data_rank


def test_data_mesh_has_every_rank_read_its_own_batch():
    found = run_ranks(4, _data_rank, DP2_EP2, CASES["loop-plain"])
    assert [size for size, _ in found] == [4] * 4
    assert sorted(data_rank for _, data_rank in found) == [0, 1, 2, 3]


def _penalized(rank, world, case, step):
    """A loss of the parameters themselves, added outside of the model."""
    batches, expected = step
    with closing(compiled_case(case, EP2)) as compiled:
        loss = compiled(**batches[rank]).loss
        (loss + 0.1 * sum(p.to_local().square().sum() for p in compiled.parameters())).backward()
        grads = {n: 0 if g is None else g for n, g in expected.grads.items()}
        wanted = {f"grad.{n}": grads[f"grad.{n}"] + 0.2 * full(p.detach()) for n, p in compiled.named_parameters()}
        torch.testing.assert_close(gradients(compiled), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", chosen(["mixtral-grouped_mm"], ["loop-setitem", "mixtral-grouped_mm"]))
def test_a_penalty_on_local_parts_of_parameters(name):
    case = shallow(name)
    run_ranks(2, _penalized, case, *steps_of(case, [UNEVEN]))


def _with_nothing(rank, world):
    """The second rank has no tokens, in the first call or later."""
    for sizes in ([(2, 5), (1, 0)], [(2, 3), (1, 4)]), ([(2, 3), (1, 4)], [(1, 5), (0, 3)]):
        torch.manual_seed(0)
        plain, layer = StackedLoop(), StackedLoop()
        layer.load_state_dict(plain.state_dict())
        with closing(moefx.compile(layer, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))) as compiled:
            for step, each in enumerate(sizes):
                torch.manual_seed(step)
                batches = [torch.randn(*size, 16) for size in each]
                for model in (plain, compiled):
                    model.zero_grad()
                wanted = [plain(x) for x in batches]
                (sum(y.square().sum() for y in wanted) / world).backward()
                found = compiled(batches[rank])
                found.square().sum().backward()
                torch.testing.assert_close(found, wanted[rank])
                torch.testing.assert_close(gradients(compiled), gradients(plain))


def test_a_rank_without_tokens():
    run_ranks(2, _with_nothing)


def _right_or_refused(rank, world, layout, case, steps):
    try:
        check_steps(rank, world, layout, case, steps)
    except MoefxError as error:
        return type(error).__name__
    return "right"


def test_unequal_capacities_are_right_or_refused_by_all():
    case = shallow("gshard-top2")
    verdicts = run_ranks(2, _right_or_refused, EP2, case, steps_of(case, [[(2, 8), (2, 16)]]))
    assert len(set(verdicts)) == 1, verdicts


@pytest.mark.full
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    style=loops(),
    layout=st.sampled_from([EP2, EP4, DP2_EP2]),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=4, max_size=4),
    skewed=st.booleans(),
)
def test_any_loop_with_any_batches(style, layout, sizes, skewed):
    world = layout[0][0] * layout[0][1]
    # One rank has a single token.
    edit = partial(skew, experts=list(range(style.top_k))) if skewed else None
    case = Case(f"{style}", partial(OneLayer, style), edit=edit)
    run_ranks(world, check_steps, layout, case, steps_of(case, [[(1, 1), *sizes[1:world]]]))


@pytest.mark.parametrize("name", chosen([], [*FEW, "deepseek_v3-grouped_mm"]))
def test_training(name):
    run_ranks(2, check_training, EP2, CASES[name], reference_training(CASES[name], 2))


def _with_copies(model, mesh):
    return moefx.compile(model, mesh, placement="balanced", rehome_every=2, dynamic=False)


@pytest.mark.parametrize("compile_fn", [pytest.param(None, marks=pytest.mark.full, id="plain"), _with_copies])
@pytest.mark.parametrize("name", chosen(["mixtral-grouped_mm"], ["mixtral-grouped_mm", "gpt_oss-grouped_mm"]))
def test_training_on_four_ranks(name, compile_fn):
    case = shallow(name)
    run_ranks(4, check_training, DP2_EP2, case, reference_training(case, 4), compile_fn)


@pytest.mark.parametrize("name", chosen(["loop-tied"], [*FEW, "loop-tied", "loop-frozen"]))
def test_accumulation(name):
    case = shallow(name)
    run_ranks(2, check_accumulation, EP2, case, steps_of(case, [EVEN] * 3), FIXED)


@pytest.mark.parametrize("name", chosen(["loop-checkpointed"], [*FEW, "loop-checkpointed"]))
def test_several_forwards_in_flight(name):
    case = shallow(name)
    run_ranks(2, check_in_flight, EP2, case, steps_of(case, [EVEN] * 2), FIXED)


@pytest.mark.parametrize("name", chosen([], FEW))
def test_evaluation(name):
    run_ranks(2, check_evaluation, EP2, CASES[name], evaluation_of(CASES[name], EVEN))


@pytest.mark.parametrize("name", chosen([], FEW))
def test_bf16_autocast(name):
    run_ranks(2, check_rounding, EP2, CASES[name], reference_rounding(CASES[name], 2))
