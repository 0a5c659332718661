"""transformers.Trainer on two ranks: every rank has its own rows, and the numbers are those of a plain loop."""

from __future__ import annotations

import os
from contextlib import closing
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import moefx
from tests.support import trainers
from tests.support.parity import full
from tests.support.ranks import run_ranks


def _train(rank, world, folder):
    as_torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # fmt: skip
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with mock.patch.dict(os.environ, as_torchrun), closing(
        moefx.compile(trainers.model(), mesh, dynamic=False)
    ) as compiled:
        trainer = trainers.trainer(
            compiled, folder, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            gradient_accumulation_steps=2, save_strategy="steps", save_steps=1, save_only_model=True,
        )  # fmt: skip
        trainer.train()
        predicted = trainer.predict(trainers.rows())
        trainer.save_model(folder / "saved")
        trainer.save_model(folder / "saved")  # gives way to itself
        weights = {name: full(tensor.detach()) for name, tensor in compiled.state_dict().items()}
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.zero_()
        trainer._load_from_checkpoint(str(folder / f"checkpoint-{trainers.STEPS}"))
        again = {name: full(tensor.detach()) for name, tensor in compiled.state_dict().items()}
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    return {"loss": trainers.logged(trainer, "loss"), "grad_norm": trainers.logged(trainer, "grad_norm"),
            "eval_loss": predicted.metrics["test_loss"], "logits": torch.from_numpy(predicted.predictions),
            "weights": weights}  # fmt: skip


def test_two_ranks_train_as_one_device_does(tmp_path):
    expected = trainers.plain_run()
    for found in run_ranks(2, _train, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert saved.keys() == found["weights"].keys()
    assert all(torch.equal(saved[name], found["weights"][name]) for name in saved)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert not list(tmp_path.rglob(".part-*"))

