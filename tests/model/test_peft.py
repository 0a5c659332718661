"""Models that PEFT has put LoRA into: into linear layers, and into the stacked experts themselves."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import moefx
from moefx.errors import UnsupportedUse
from tests.support.families import tiny_config
from tests.support.models import Case
from tests.support.parity import TOLERANCE, full
from tests.support.ranks import one_rank
from tests.test_any_layer import compiled_as

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(family: str, parameters: list[str], adapters: int = 1) -> nn.Module:
    config = tiny_config(family)
    config.num_hidden_layers = 1
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    if adapters == 2:
        model.add_adapter("second", lora)
        model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        if "lora" in name:  # B is zero at first
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(("family", "parameters", "adapters"), [
    ("mixtral", EXPERTS, 1), ("qwen3_moe", EXPERTS[:1], 2), ("mixtral", [], 1),
], ids=["experts", "two adapters", "attention alone"])  # fmt: skip
def test_outputs_and_gradients_are_those_of_eager(family, parameters, adapters):
    plain, tokens = adapted(family, parameters, adapters), torch.arange(16).view(2, 8)
    expected = plain(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        model = adapted(family, parameters, adapters)
        with closing(moefx.compile(model, mesh, dynamic=False)) as compiled:
            found = compiled(input_ids=tokens, labels=tokens)
            found.loss.backward()
            torch.testing.assert_close(found.logits, expected.logits)
            eager = dict(plain.named_parameters())
            assert eager.keys() == dict(compiled.named_parameters()).keys()
            for name, mine in compiled.named_parameters():
                theirs = eager[name]
                assert (mine.grad is None) == (theirs.grad is None) == ("lora" not in name)
                if theirs.grad is not None:
                    torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-4, atol=TOLERANCE)
            assert compiled.moe_stats()
            assert not any(hasattr(module, "parametrizations") for module in compiled.modules())


def test_every_rank_has_its_own_experts_of_what_is_adapted():
    with pytest.warns(UserWarning, match=r"every rank keeps whole(?s:.*)lora_B") as warned:
        found = compiled_as(Case("peft", lambda: adapted("mixtral", EXPERTS)), {"ep": 2}, dynamic=False)
    said = [each for each in warned if "keeps whole" in str(each.message)]
    assert {Path(each.filename).parts[-2:] for each in said} == {("tests", "test_any_layer.py")}
    kept = "".join(str(each.message) for each in said)
    assert "lora_A" not in kept
    assert not re.search(r"(gate_up|down)_proj", kept)
    assert "all_to_all" in found.code["forward"]


@pytest.mark.parametrize("adapters", [1, 2], ids=["one", "two"])
def test_adapters_are_saved_as_peft_saves_them(adapters: int, tmp_path: Path):
    plain = adapted("mixtral", EXPERTS, adapters)
    plain.save_pretrained(tmp_path / "plain")
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(adapted("mixtral", EXPERTS, adapters), mesh, dynamic=False)) as compiled:
            compiled(input_ids=torch.arange(16).view(2, 8))
            compiled.save_pretrained(tmp_path / "compiled")
            with pytest.raises(UnsupportedUse, match="state_dict out"):
                compiled.save_pretrained(tmp_path / "other", state_dict=plain.state_dict())
    files = {each.relative_to(tmp_path / "plain") for each in (tmp_path / "plain").rglob("*") if each.is_file()}
    assert files == {each.relative_to(tmp_path / "compiled") for each in (tmp_path / "compiled").rglob("*")
                     if each.is_file()}  # fmt: skip
    weights = [each for each in files if each.suffix == ".safetensors"]
    assert len(weights) == adapters
    for each in weights:
        mine, theirs = (load_file(tmp_path / of / each) for of in ("compiled", "plain"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_a_module_that_is_trained_whole_is_saved_beside_the_adapters(tmp_path: Path):
    def model() -> nn.Module:
        config = tiny_config("mixtral")
        config.num_hidden_layers = 1
        lora = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
        torch.manual_seed(0)
        return get_peft_model(AutoModelForCausalLM.from_config(config), lora)

    plain = model()
    plain.save_pretrained(tmp_path / "plain")
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(model(), mesh, dynamic=False)) as compiled:
            compiled(input_ids=torch.arange(16).view(2, 8))
            compiled.save_pretrained(tmp_path / "compiled")
    mine, theirs = (load_file(tmp_path / of / "adapter_model.safetensors") for of in ("compiled", "plain"))
    assert any("lm_head" in name for name in theirs)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
