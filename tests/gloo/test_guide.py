"""The programs of docs/guide run as pasted, on two CPU ranks, with a small model in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.scripts import run_script

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A model's files, as the hub has them."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=16,
                            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                            num_experts=4, num_experts_per_tok=2)  # fmt: skip
    folder = tmp_path_factory.mktemp("hub")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (GUIDE / page).read_text(), re.DOTALL | re.MULTILINE)


def on_cpu(code: str, folder: Path) -> str:
    code = re.sub(r"snapshot_download\(.*\)", repr(str(folder)), code)
    code = re.sub(r"^torch\.cuda\.set_device.*\n", "", code, flags=re.MULTILINE)
    return code.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')


def run(code: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    return run_script(script, folder=folder)


def test_fine_tune_a_model_from_the_hub(hub, tmp_path):
    (code,) = (block for block in blocks("fine-tune.md") if "init_process_group" in block)
    losses = re.findall(r"loss ([\d.]+)", run(on_cpu(code, hub), tmp_path))
    assert len(losses) == 5
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "trained")


def test_adapters_on_experts_move(hub, tmp_path):
    make, check, save = blocks("lora.md")
    run(_AROUND_LORA.format(hub=str(hub), make=make, check=check, save=save), tmp_path)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


_AROUND_LORA = """
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import moefx

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
model = AutoModelForCausalLM.from_pretrained({hub!r})
{make}
torch.manual_seed(1 + rank)
tokens = torch.randint(64, (4, 32))


def train_step():
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


compiled(input_ids=tokens, labels=tokens)  # the first call puts parameters in their places
{check}
{save}
saved = load_file("adapter/adapter_model.safetensors")
adapters = {{name.replace(".default", ""): p for name, p in compiled.named_parameters() if p.requires_grad}}
assert saved.keys() == adapters.keys()
for again in (False, True):
    if again:  # as Trainer does when it resumes
        with torch.no_grad():
            [p.zero_() for p in adapters.values()]
        compiled.load_adapter("adapter", "default", is_trainable=True)
    for name, p in adapters.items():
        assert saved[name].any() and torch.equal(p.detach().full_tensor(), saved[name]), name
compiled.close()
dist.destroy_process_group()
"""
