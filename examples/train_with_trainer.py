"""A small Mixtral, trained by transformers.Trainer on two ranks.

    torchrun --nproc-per-node 2 examples/train_with_trainer.py
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --resume

Needs accelerate. `docs/trainer.md` walks through it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import counting
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, MixtralConfig, Trainer, TrainerCallback, TrainingArguments

import moefx
from moefx import checkpoint


class Resumable(TrainerCallback):
    """Saves what Trainer leaves out, the optimizer among it, whenever Trainer saves; loads it when Trainer resumes."""

    def __init__(self, keep_last: int | None = 1) -> None:
        self.keep_last = keep_last

    def on_save(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        checkpoint.save(
            Path(args.output_dir) / "exact", held["model"], held["optimizer"].optimizer,
            step=state.global_step, extra=held["lr_scheduler"].state_dict(), keep_last=self.keep_last,
        )  # fmt: skip

    def on_train_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if state.global_step:
            found = checkpoint.load(Path(args.output_dir) / "exact", held["model"], held["optimizer"].optimizer)
            held["lr_scheduler"].load_state_dict(found["extra"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)  # fmt: skip
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    model = moefx.compile(AutoModelForCausalLM.from_config(config), mesh)

    args = TrainingArguments(
        given.folder, max_steps=given.steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=10, eval_strategy="steps", eval_steps=20, save_steps=20,
        save_only_model=True, use_cpu=True, report_to=[],
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=counting(1024, seed=0), eval_dataset=counting(64, seed=1),
                      callbacks=[Resumable()])  # fmt: skip
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(f"{given.folder}/trained")
    if trainer.is_world_process_zero():
        plain = AutoModelForCausalLM.from_pretrained(f"{given.folder}/trained")
        begin = torch.tensor([[10, 11, 12, 13]])
        print(plain.generate(begin, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
