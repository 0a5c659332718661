"""Lightning's Trainer on two ranks: a LightningModule around a compiled model.

    torchrun --nproc-per-node 2 examples/with_lightning.py
    torchrun --nproc-per-node 2 examples/with_lightning.py --resume

Needs lightning. `docs/lightning.md` walks through it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from corpus import counting
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MixtralConfig

import moefx

RANKS = int(os.environ["WORLD_SIZE"])


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = None

    def configure_model(self) -> None:
        if self.compiled is None:
            torch.manual_seed(0)  # the same weights on every rank
            config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                   num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)  # fmt: skip
            mesh = init_device_mesh(self.device_mesh.device_type, (RANKS,), mesh_dim_names=("ep",))
            self.compiled = moefx.compile(AutoModelForCausalLM.from_config(config), mesh)

    def training_step(self, batch: dict, number: int) -> torch.Tensor:
        loss = self.compiled(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.compiled.parameters(), lr=1e-2)


class Checkpoint(L.Callback):
    """Saves by moefx at the end of every epoch, and goes on from there."""

    def __init__(self, folder: str, resume: bool) -> None:
        self.folder, self.resume = Path(folder), resume

    def on_train_start(self, trainer: L.Trainer, module: Model) -> None:
        if self.resume:
            moefx.checkpoint.load(self.folder, module.compiled, trainer.optimizers[0])

    def on_train_epoch_end(self, trainer: L.Trainer, module: Model) -> None:
        optimizer, step = trainer.optimizers[0], trainer.global_step
        moefx.checkpoint.save(self.folder, module.compiled, optimizer, step=step, keep_last=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    # Every rank reads rows of its own: all of them are "data parallel" to Lightning.
    trainer = L.Trainer(
        accelerator="auto", devices=RANKS, max_epochs=given.epochs, accumulate_grad_batches=2, gradient_clip_val=1.0,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1), precision="bf16-mixed",
        enable_checkpointing=False, logger=False, callbacks=[Checkpoint(given.folder, given.resume)],
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(counting(512, seed=0), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
    model.compiled.close()


if __name__ == "__main__":
    main()
