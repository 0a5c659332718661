"""What transformers.Trainer asks of a compiled model, on one rank."""

from __future__ import annotations

import inspect
import shutil
from contextlib import closing, contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import moefx
from examples.train_with_trainer import Resumable
from moefx.errors import CheckpointError, MeshError, UnsupportedUse
from tests.support import trainers
from tests.support.parity import full
from tests.support.ranks import fake_world, one_rank


@contextmanager
def compiled_alone():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(trainers.model(), mesh, dynamic=False)) as compiled:
            yield compiled


def test_it_looks_like_the_model():
    plain = trainers.model()
    with compiled_alone() as compiled:
        assert inspect.signature(compiled.forward) == inspect.signature(plain.forward)
        assert isinstance(compiled, PreTrainedModel)
        assert isinstance(compiled, moefx.CompiledModule)
        assert type(compiled) is moefx.CompiledModule
        assert inspect.signature(type(compiled).forward) != inspect.signature(plain.forward)


@pytest.mark.parametrize("same", [
    lambda m: m.to("cpu"), lambda m: m.to(torch.float32), lambda m: m.to("cpu", torch.float32), lambda m: m.float(),
    lambda m: m.cpu(), lambda m: m.to(torch.empty(0)),
])  # fmt: skip
def test_what_would_move_nothing_passes(same):
    with compiled_alone() as compiled:
        held = list(compiled.parameters())
        assert same(compiled) is compiled
        assert all(now is before for now, before in zip(compiled.parameters(), held, strict=True))


@pytest.mark.parametrize("other", [
    lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta"), lambda m: m.double(),
    lambda m: m.to_empty(device="cpu"),
])  # fmt: skip
def test_what_would_convert_or_move_is_refused(other):
    with compiled_alone() as compiled:
        with pytest.raises(UnsupportedUse, match="would be converted or moved"):
            other(compiled)
        assert {p.dtype for p in compiled.parameters()} == {torch.float32}


def test_a_buffer_alone_is_no_exception():
    class WithHalf(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trainers.model()
            self.register_buffer("scale", torch.ones(1, dtype=torch.bfloat16))

        def forward(self, ids):
            return self.inner(ids).logits * self.scale

    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(WithHalf(), mesh)) as compiled, pytest.raises(UnsupportedUse, match="`scale`"):
            compiled.float()


def test_one_rank_trains_as_the_plain_loop_does_and_loads_its_best(tmp_path):
    expected = trainers.plain_run()
    with compiled_alone() as compiled:
        # The loss of the first evaluation is called the best one, so that the weights must go back.
        run = trainers.trainer(compiled, tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps",
                               save_steps=1, save_only_model=True, load_best_model_at_end=True,
                               metric_for_best_model="eval_loss", greater_is_better=True)  # fmt: skip
        run.train()
        assert trainers.logged(run, "loss") == pytest.approx(expected["loss"], rel=1e-4)
        assert trainers.logged(run, "grad_norm") == pytest.approx(expected["grad_norm"], rel=1e-4)
        first, last = trainers.logged(run, "eval_loss")
        assert last == pytest.approx(expected["eval_loss"], rel=1e-4)
        assert first > last
        assert run.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)
        moved = [name for name, tensor in compiled.state_dict().items()
                 if not torch.allclose(full(tensor), expected["weights"][name], rtol=1e-3)]  # fmt: skip
        assert any("experts" in name for name in moved)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_only_model": True,
             "optim": "adamw_torch", "lr_scheduler_type": "linear", "train_sampling_strategy": "random",
             "learning_rate": 1e-2}  # fmt: skip
    found = []
    for resume in (False, True):
        with compiled_alone() as compiled:
            run = trainers.trainer(compiled, tmp_path, **given)
            run.add_callback(Resumable(keep_last=None))
            run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
            found.append({name: full(tensor.detach()).clone() for name, tensor in compiled.state_dict().items()})
            assert run.state.global_step == 4
        shutil.rmtree(tmp_path / "exact" / "step-000004")
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())
    assert any(not torch.equal(tensor, found[0][name]) for name, tensor in trainers.model().state_dict().items())


def test_names_of_checkpoints_are_understood_and_an_expert_that_is_missing_is_named(tmp_path):
    trainers.model().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    with compiled_alone() as compiled:
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.zero_()
        assert compiled.load_state_dict(saved) == ([], [])
        for name, tensor in trainers.model().state_dict().items():
            assert torch.equal(full(compiled.state_dict()[name]), tensor)
        part = {name: tensor for name, tensor in saved.items() if ".experts.3." not in name}
        with pytest.raises(CheckpointError, match=r"cannot be put together: there is no 3 among the experts"):
            compiled.load_state_dict(part, strict=False)


def test_other_arguments_of_save_pretrained_are_refused(tmp_path):
    with compiled_alone() as compiled, pytest.raises(UnsupportedUse, match="with variant"):
        compiled.save_pretrained(tmp_path, variant="fp16")


def test_processes_that_the_trainer_does_not_know_of_are_named(tmp_path):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with closing(moefx.compile(trainers.model(), mesh)) as compiled, pytest.raises(
            MeshError, match=r"over 1 processes, but the mesh has 2 ranks(?s:.*)torchrun"
        ):
            trainers.trainer(compiled, tmp_path)
