"""The compiled model on one rank: everything but communication, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.models import CASES, chosen, shallow
from tests.support.parity import outputs_of, parameters
from tests.support.ranks import one_rank
from tests.support.scenarios import (
    EP1,
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

pytestmark = pytest.mark.usefixtures("cached")
FEW = ["loop-setitem", "mixtral-eager", "gshard-grouped"]
ONE, OTHER = [(2, 8)], [(4, 6)]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize(
    "name", chosen(["loop-checkpointed", "mixtral-eager", "gpt_oss-batched_mm"])
)
def test_every_model(name):
    case = CASES[name] if name == "loop-checkpointed" else shallow(name)
    check_steps(0, 1, EP1, case, steps_of(case, [ONE, OTHER]))


@pytest.mark.parametrize("name", chosen(["loop-setitem"], FEW))
def test_training(name):
    case = shallow(name)
    check_training(0, 1, EP1, case, reference_training(case, 1))


@pytest.mark.parametrize("name", chosen(["mixtral-eager"], FEW))
def test_several_forwards(name):
    case = shallow(name)
    steps = steps_of(case, [ONE] * 3)
    check_accumulation(0, 1, EP1, case, steps)
    check_in_flight(0, 1, EP1, case, steps)


@pytest.mark.parametrize("name", chosen([], FEW))  # tests/test_parity.py runs some on two ranks
def test_evaluation_and_bf16(name):
    check_evaluation(0, 1, EP1, CASES[name], evaluation_of(CASES[name], ONE))
    check_rounding(0, 1, EP1, CASES[name], reference_rounding(CASES[name], 1))


@pytest.mark.parametrize("name", [*FEW, "loop-tied", "qwen3_moe-frozen", "loop-counting"])
def test_names_and_values_stay_the_users(name):
    model = CASES[name].build()
    eager = {n: p.detach().clone() for n, p in model.named_parameters()}
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    compiled = compiled_case(CASES[name], EP1)
    assert list(compiled.state_dict()) == keys
    assert {n: p.requires_grad for n, p in compiled.named_parameters()} == trains
    assert all(isinstance(p, DTensor) for p in compiled.parameters())
    found = parameters(compiled)
    assert found.keys() == {f"param.{n}" for n in eager}
    assert all(torch.equal(found[f"param.{n}"], p) for n, p in eager.items())
    compiled.close()


@pytest.mark.parametrize("name", FEW)
def test_output_is_of_the_models_own_type(name):
    case = shallow(name)
    batch = case.batch(0)
    compiled = compiled_case(case, EP1)
    assert type(compiled(**batch)) is type(case.build()(**batch))
    compiled.close()


@pytest.mark.parametrize("name", chosen(["loop-setitem"], FEW))
def test_two_runs_are_bit_identical(name):
    runs = []
    for _ in range(2):
        compiled = compiled_case(shallow(name), EP1)
        optimizer = torch.optim.AdamW(compiled.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            out = compiled(**CASES[name].batch(seed))
            out.loss.backward()
            optimizer.step()
        runs.append({**outputs_of(out), **parameters(compiled)})
        compiled.close()
    assert all(torch.equal(runs[0][n], t) for n, t in runs[1].items())
