"""accelerate and transformers' `generate` on two ranks: one compiled model is prepared, trained and saved, generates,
and goes on from what was saved."""

from __future__ import annotations

import os
from contextlib import closing
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import moefx
from moefx.errors import MeshError, UnsupportedUse
from tests.support import trainers
from tests.support.parity import full
from tests.support.ranks import fake_world, one_rank, run_ranks

ROWS = [row["input_ids"] for row in trainers.rows()[:8]]  # two a rank and micro-batch: one optimizer step


def trained(accelerator, model, optimizer, loader, scheduler):
    """An epoch; the losses of this rank."""
    losses = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_weights(steps):
    model = trainers.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.stack(ROWS)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def weights(compiled):
    return {name: full(tensor.detach()).clone() for name, tensor in compiled.state_dict().items()}


PROMPTS = [torch.tensor([[3, 5, 7], [1, 2, 4]]), torch.tensor([[0, 0, 9, 11, 13], [2, 4, 6, 8, 10]])]
MASKS = [None, torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])]
NEW = [2, 6]  # tokens that each rank generates


def generated(model, rank, **given):
    return model.generate(PROMPTS[rank], attention_mask=MASKS[rank], max_new_tokens=NEW[rank], do_sample=False,
                          pad_token_id=0, eos_token_id=63, **given)  # fmt: skip


def stops(ids, scores, **_):
    raise ValueError("stopped by hand")


def check_generation(rank, compiled, folder):
    """The weights have just been saved there. Returns how many tokens a sequence has then."""
    expected = generated(AutoModelForCausalLM.from_pretrained(folder), rank, use_cache=True)
    with pytest.raises(UnsupportedUse, match=r"with a cache[\s\S]*use_cache=False") as caught:
        generated(compiled, rank, use_cache=True)
    assert "from_pretrained(folder).generate" in caught.value.hint
    assert torch.equal(generated(compiled, rank, use_cache=False), expected)
    how = {"stopping_criteria": [stops]} if rank == 1 else {}
    with pytest.raises(ValueError if rank == 1 else UnsupportedUse, match="stopped by hand"):
        generated(compiled, rank, use_cache=False, **how)
    assert torch.equal(generated(compiled, rank, use_cache=False), expected)
    return expected.shape[1]


def _run(rank, world, folder):
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
           "MASTER_PORT": "29500"}  # fmt: skip
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with mock.patch.dict(os.environ, env), closing(moefx.compile(trainers.model(), mesh)) as compiled:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        other = accelerator.prepare_model(torch.nn.Linear(2, 2))  # as ever
        assert type(other) is torch.nn.parallel.DistributedDataParallel
        accelerator._models.clear()
        optimizer = torch.optim.AdamW(compiled.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        prepared = accelerator.prepare(compiled, optimizer, DataLoader(ROWS, batch_size=2), scheduler)
        assert prepared[0] is compiled
        assert accelerator.unwrap_model(prepared[0]) is compiled
        trained(accelerator, *prepared)
        once = weights(compiled)
        accelerator.save_model(compiled, folder / "model", max_shard_size="10KB")
        length = check_generation(rank, compiled, folder / "model")
        for _ in range(2):  # the second in place of the first
            accelerator.save_state(str(folder / "state"))
        twice = trained(accelerator, *prepared), weights(compiled)
        accelerator.load_state(str(folder / "state"))
        assert all(torch.equal(value, once[name]) for name, value in weights(compiled).items())
        again = trained(accelerator, *prepared), weights(compiled)
        assert again[0] == twice[0]
        assert all(torch.equal(value, twice[1][name]) for name, value in again[1].items())
        accelerator.save_model(compiled, folder / "model")
        with pytest.raises(UnsupportedUse, match="safe_serialization=True"):
            accelerator.save_model(compiled, folder / "model", safe_serialization=False)
    return once, again[1], length


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrappers")
    return folder, run_ranks(2, _run, folder)


def test_two_ranks_train_as_one_device_does_and_go_on_from_a_saved_state(ran):
    expected = [plain_weights(steps) for steps in (1, 2)]
    for once, last, _ in ran[1]:
        torch.testing.assert_close([once, last], expected, rtol=1e-3, atol=1e-4)
    assert [path.name for path in (ran[0] / "state" / "moefx").iterdir()] == ["step-000002"]
    assert sorted(path.name for path in (ran[0] / "state").iterdir()) == [
        "moefx", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"
    ]  # fmt: skip


def test_save_model_writes_what_transformers_reads(ran):
    saved = AutoModelForCausalLM.from_pretrained(ran[0] / "model").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in ran[1][0][1].items())
    assert [path.name for path in (ran[0] / "model").glob("*.safetensors")] == ["model.safetensors"]


def test_ranks_generate_different_numbers_of_tokens_and_train_on(ran):
    assert [length for *_, length in ran[1]] == [5, 11]


@pytest.fixture
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_mixed_precision_is_accelerates(fresh):
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(trainers.model(), mesh, dynamic=False)) as compiled:
            model = Accelerator(cpu=True, mixed_precision="bf16").prepare(compiled)
            assert model is compiled
            tokens = torch.stack(ROWS[:2])
            with torch.no_grad():
                found = model(input_ids=tokens).logits
                with torch.autocast("cpu", torch.bfloat16):
                    expected = trainers.model()(input_ids=tokens).logits
            assert (found.dtype, expected.dtype) == (torch.float32, torch.bfloat16)
            torch.testing.assert_close(found, expected.float(), rtol=2e-2, atol=2e-2)


def test_processes_that_accelerate_does_not_know_of(fresh):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with closing(moefx.compile(trainers.model(), mesh)) as compiled, pytest.raises(
            MeshError, match="over 1 processes, but the mesh has 2 ranks"
        ):
            Accelerator(cpu=True).prepare(compiled)
