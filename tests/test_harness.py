"""The test support itself: launchers fail loudly, and the comparison tells a right compiler from wrong ones."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import standin
from tests.support.handmade import CapacityMoE
from tests.support.models import CASES, chosen, shallow
from tests.support.parity import compare, distance, draw, one_token, reference_step, routing, skew
from tests.support.ranks import RanksError, fake_world, one_rank, run_ranks, run_threads
from tests.support.scenarios import (
    EP2,
    check_accumulation,
    check_evaluation,
    check_in_flight,
    check_rounding,
    check_steps,
    check_training,
    evaluation_of,
    reference_rounding,
    reference_training,
    steps_of,
)

# Launchers


def _sum_of_ranks(rank, world, start):
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return rank, total, torch.get_num_threads()


def _fails_on_one(rank, world):
    if rank == 1:
        raise KeyError("rank one is unhappy")
    dist.barrier()


def _waits_for_nobody(rank, world):
    if rank == 0:
        dist.barrier()
    time.sleep(60)


def _dies(rank, world):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_run_ranks_returns_every_result():
    assert run_ranks(3, _sum_of_ranks, 10) == [(rank, torch.tensor(33), 1) for rank in range(3)]
    assert not dist.is_initialized()


def test_exception_of_a_rank_reaches_the_caller():
    with pytest.raises(RanksError, match="rank one is unhappy") as caught:
        run_ranks(2, _fails_on_one)
    assert "_fails_on_one" in caught.value.failures[1]


def test_hang_is_killed_and_every_stack_shown():
    start = time.monotonic()
    with pytest.raises(RanksError, match="hung: killed after 8 s") as caught:
        run_ranks(2, _waits_for_nobody, timeout=8)
    assert time.monotonic() - start < 45
    assert sorted(caught.value.failures) == [0, 1]
    assert all("_waits_for_nobody" in text for text in caught.value.failures.values())


def test_death_of_a_rank_is_told_and_poisons_nothing():
    with pytest.raises(RanksError, match="exit code 3"):
        run_ranks(2, _dies)
    assert [r for r, _, _ in run_ranks(2, _sum_of_ranks, 0)] == [0, 1]


def test_threads_share_collectives():
    assert [int(t) for _, t, _ in run_threads(4, _sum_of_ranks, 0)] == [6] * 4
    with pytest.raises(RuntimeError, match="rank one is unhappy"):
        run_threads(2, _fails_on_one)
    assert not dist.is_initialized()


def test_worlds_of_this_process():
    with fake_world(64, rank=63):
        assert (dist.get_rank(), dist.get_world_size()) == (63, 64)
    with one_rank():
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


# Models


@pytest.mark.parametrize("name", CASES)
def test_model_is_fit_for_parity(name):
    case = CASES[name]
    model, twin = case.build(), case.build()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values()))
    batch = draw(case, model, seed=0)
    record = routing(model, batch)
    ks = {choice.shape[-1] for choice in record.chosen}
    assert len(record.chosen) >= 2
    assert max(ks) >= (1 if "top1" in name else 2)
    expected = reference_step(model, [batch, draw(case, model, seed=1)])
    assert expected.outputs[0].keys() >= {"out.loss", "out.logits"}
    trained = {f"grad.{n}" for n, p in model.named_parameters() if p.requires_grad}
    moved = {n for n, g in expected.grads.items() if g is not None and g.abs().max() > 1e-6}
    assert len(moved) > 0.7 * len(trained), f"too many idle parameters: {sorted(trained - moved)}"
    assert {n for n, g in expected.grads.items() if g is not None} <= trained


@pytest.mark.parametrize("name", ["loop-setitem", "gshard-grouped", "mixtral-grouped_mm", "deepseek_v3-eager"])
def test_shallow_models_have_one_layer_of_experts(name):
    one, two = ([ids.shape for ids in routing(case.build(), case.batch(0)).chosen]
                for case in (shallow(name), CASES[name]))  # fmt: skip
    assert one * 2 == two


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("gshard")])
def test_capacity_really_drops(name):
    model = CASES[name].build()
    kept = []
    for moe in (m for m in model.modules() if isinstance(m, CapacityMoE)):
        masks = moe.masks
        moe.masks = lambda x, masks=masks, k=moe.style.top_k: kept.append((masks(x) > 0).sum() / (16 * k)) or masks(x)
    model(**CASES[name].batch(0))
    assert len(kept) == 2
    assert all(0.3 < share < 1 for share in kept)


def test_routing_control():
    case = CASES["gpt_oss-eager"]
    model = case.build()
    assert skew(model, [6, 7]) == 2
    assert all(set(chosen.unique().tolist()) == {6, 7} for chosen in routing(model, case.batch(0)).chosen)
    assert routing(model, case.batch(0)).gap > 1e-5
    case = CASES["mixtral-eager"]
    chosen = routing(case.build(), one_token(case.batch(0), 5)).chosen
    assert all(len(c.unique()) == 2 for c in chosen)


# Comparison


def test_distance_by_hand():
    a = torch.tensor([1.0, -2.0])
    assert distance(a, a) == (0.0, 0.0)
    assert distance(a + torch.tensor([0.0, 0.02]), a)[0] == pytest.approx(0.01, rel=1e-4)
    assert distance(2 * a, a)[1] == pytest.approx(1.0)
    tiny = torch.tensor([3e-8])
    assert max(distance(tiny, torch.zeros(1))) < 1e-5 < max(distance(10 * tiny, torch.zeros(1)))


def test_compare_skips_nothing():
    one = torch.ones(2)
    good = {"a": one, "b": None}
    compare(good, good).check()
    for bad in ({"a": one}, {**good, "c": one}, {"a": None, "b": None}, {"a": one, "b": one},
                {"a": one.double(), "b": None}, {"a": one[:1], "b": None}, {"a": one * float("nan"), "b": None},
                {"a": one * 1.0001, "b": None}):
        with pytest.raises(AssertionError, match="differ"):
            compare(bad, good).check()
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare({}, {}).check()


def test_reference_averages_by_hand():
    case = CASES["loop-counting"]
    model = case.build()
    batches = [case.batch(0), case.batch(1)]
    name, before = "layers.0.mlp.tokens_per_expert", model.layers[0].mlp.tokens_per_expert.clone()
    expected = reference_step(model, batches)
    assert torch.allclose(expected.buffers[f"buffer.{name}"].sum(), before.sum() + 2 * 2 * 16)
    losses = [model(**batch).loss for batch in batches]
    (grad,) = torch.autograd.grad(sum(losses) / 2, [model.head.weight])
    compare({"head": grad}, {"head": expected.grads["grad.head.weight"]}).check()


SCENARIOS = {
    "steps": (check_steps, lambda case: steps_of(case, [[(2, 8), (2, 8)], [(1, 5), (3, 9)]])),
    "accumulation": (check_accumulation, lambda case: steps_of(case, [[(2, 8), (2, 8)]] * 3)),
    "in_flight": (check_in_flight, lambda case: steps_of(case, [[(2, 8), (2, 8)]] * 2)),
    "evaluation": (check_evaluation, lambda case: evaluation_of(case, [(2, 8), (1, 4)])),
    "rounding": (check_rounding, lambda case: reference_rounding(case, 2)),
    "training": (check_training, lambda case: reference_training(case, 2)),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", chosen(["loop-setitem", "gshard-top2"],
                                        ["loop-setitem", "mixtral-eager", "gpt_oss-grouped_mm", "gshard-top2"]))
def test_right_stand_in_passes(scenario, name):
    check, expect = SCENARIOS[scenario]
    case = shallow(name)
    run_ranks(2, check, EP2, case, expect(case), standin.Replicated)


@pytest.mark.parametrize(
    ("wrong", "name", "scenario", "symptom"),
    [
        (standin.Doubled, "mixtral-eager", "steps", "tensors differ, outputs and worst first\n  grad."),
        (standin.Doubled, "mixtral-eager", "evaluation", "training between evaluations"),
        (standin.NotAveraged, "mixtral-eager", "steps", "grad.model.layers.0.mlp.experts.down_proj: max error"),
        (standin.NotAveraged, "mixtral-eager", "in_flight", "order 1"),
        (standin.NotAveraged, "mixtral-eager", "training", "step 1, rank"),
        (standin.NotAveraged, "loop-setitem", "rounding", "AssertionError: gradients "),
        (standin.LastBatchOnly, "mixtral-eager", "accumulation", "no_sync, time 0"),
        (standin.BuffersApart, "loop-counting", "steps", "buffer.mlp.tokens_per_expert: max error"),
        (standin.NoExpertBias, "loop-setitem", "steps", "grad.mlp.experts.0.down.bias: None, expected one"),
        (standin.WrongExpert, "loop-setitem", "steps", "out.loss: max error"),
        (standin.WrongExpert, "loop-setitem", "evaluation", "out.logits: max error"),
        (standin.Frozen, "loop-setitem", "training", "step 1, rank"),
    ],
)
def test_wrong_stand_in_fails(wrong, name, scenario, symptom):
    check, expect = SCENARIOS[scenario]
    case = shallow(name)
    with pytest.raises(RanksError) as caught:
        run_ranks(2, check, EP2, case, expect(case), wrong)
    assert symptom in str(caught.value)
