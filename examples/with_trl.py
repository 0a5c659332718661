"""TRL's SFTTrainer with LoRA adapters on attention and experts, on two ranks.

    torchrun --nproc-per-node 2 examples/with_trl.py

Needs trl, peft and datasets. `docs/trainer.md` says what works with transformers' Trainer, and so with this one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from corpus import counting
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import moefx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/trl")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)  # fmt: skip
    adapters = LoraConfig(target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.down_proj"], r=4)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    model = moefx.compile(get_peft_model(AutoModelForCausalLM.from_config(config), adapters), mesh)

    args = SFTConfig(
        given.folder, max_steps=given.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=5, save_strategy="no", use_cpu=True, report_to=[], bf16=False,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = [{name: row.tolist() for name, row in each.items()} for each in counting(512, seed=0)]
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    if dist.get_rank() == 0:
        print("loss", [f"{each['loss']:.3f}" for each in trainer.state.log_history if "loss" in each])
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
