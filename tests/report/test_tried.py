"""`python -m moefx try`: what came of a model, without weights and ranks."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from typer.testing import CliRunner

from moefx.__main__ import app
from moefx.analysis.lints.never_moves import CHOICE
from moefx.costmodel.machines import preset
from moefx.errors import MeshError, MoefxError
from moefx.report.described import described
from moefx.report.one_look import nobody, with_batch
from moefx.report.programs import compiled
from moefx.report.tried import MACHINE, try_model
from moefx.report.what_if import asked
from tests.analysis.lints.test_never_moves import D, Model, MoE
from tests.support.families import tiny_config


class Branches(MoE):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def of(*layers: nn.Module):
    return try_model((Model(*layers), (torch.zeros(64, D),)), 4)


def test_a_model_is_tried_by_one_layer_of_each_kind():
    """Of eight that are alike two are compiled, and one is captured for lints."""
    found = of(nn.Linear(D, D), *(MoE("detach") for _ in range(8)))
    assert found.is_recognised
    assert (found.layers, found.looked_at, found.moe_layers) == (9, 2, 8)
    assert set(found.experts.values()) == {4}
    assert [each.name for each in found.lints] == [CHOICE]
    words = str(found)
    for said in ("recognised; it compiles for 4 ranks", "MoE layers: 8 of 9 layers, 4 experts in each", "on a rank",
                 "lints: 1", "looked at 2 of 9 layers", "A step of"):
        assert said in words
    assert not dist.is_initialized()


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_program_for_one_size_is_for_that_size_alone(dynamic):
    """Which takes half of the time, and is what `try` asks for."""
    machine, what = preset(MACHINE), described((Model(MoE()), (torch.zeros(64, D),)), 1, 64)
    with nobody(4):
        options = asked(None, machine, ep=2, esp=1, dynamic=dynamic)
        base = compiled(what, {"dp": 4}, options, machine, only_base=True).base
    assert (with_batch(base.attempt, 32) is not None) == dynamic
    assert not of(MoE()).plan.options.debug.dynamic


def test_a_model_that_is_refused_says_why():
    found = of(Branches())
    assert not found.is_recognised
    assert found.lints is None
    assert found.refusal.what in " ".join(str(found).split())
    assert "test_tried.py:" in str(found)
    assert not dist.is_initialized()


def test_a_model_without_experts():
    found = of(nn.Linear(D, D))
    assert not found.is_recognised
    assert "no mixture of experts was found" in str(found)


def test_sizes_that_do_not_divide_are_told():
    with pytest.raises(MeshError, match="do not divide"):
        try_model((Model(MoE()), (torch.zeros(8, D),)), 8, ep=3)


# What a name may be


def test_a_file_of_python_and_its_function(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    path = tmp_path / "factory.py"
    path.write_text("import torch\nfrom beside import WIDTH\ndef make():\n    return torch.nn.Linear(WIDTH, 3)\n")
    assert described(f"{path}:make", 1, 8).module.weight.is_meta
    for name, said in ((f"{path}:mak", "did you mean make"), (str(path), "did|does not say which function"),
                       (f"{tmp_path}/factry.py:make", "factory.py")):  # fmt: skip
        with pytest.raises(MoefxError) as error:
            described(name, 1, 8)
        assert any(part in str(error.value) for part in said.split("|"))
    path.write_text("1 / 0\n")
    with pytest.raises(MoefxError, match="ZeroDivisionError"):
        described(f"{path}:make", 1, 8)


def test_a_folder_with_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mixtral").to_dict()))
    assert type(described(str(tmp_path), 1, 8).module).__name__ == "MixtralForCausalLM"


def test_a_model_of_the_hub_that_is_not_here():
    with pytest.raises(MoefxError, match="local cache") as error:
        described("nobody/has-this-model", 1, 8)
    assert "hf download nobody/has-this-model" in error.value.hint


def test_a_model_of_the_hub_in_the_local_cache(monkeypatch, tmp_path):
    snapshot = tmp_path / "models--some--moe" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    (snapshot / "config.json").write_text(json.dumps(tiny_config("mixtral").to_dict()))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert type(described("some/moe", 1, 8).module).__name__ == "MixtralForCausalLM"


def test_the_command(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(tiny_config("mixtral").to_dict()))
    run = CliRunner().invoke(app, ["try", str(path), "--ranks", "2", "--tokens", "64"])
    assert run.exit_code == 0, run.output
    assert "the balance loss is turned on" in run.output
    assert "lints: none" in run.output
    (after,) = re.findall(r"belong to plan: python -m moefx (plan .*?) *\n", re.sub(r"\s*\n {2}(?! )", " ", run.output))
    assert after.split() == ["plan", str(path), "--gpus", "2", "--machine", MACHINE, "--seq", "64"]
    names = {option for each in typer.main.get_command(app).commands["plan"].params for option in each.opts}
    assert {*re.findall(r"--[\w-]+", run.output)} <= names
    path.write_text(json.dumps({**tiny_config("mixtral").to_dict(), "model_type": "llama"}))
    assert CliRunner().invoke(app, ["try", str(path), "--ranks", "2", "--tokens", "64"]).exit_code == 1
