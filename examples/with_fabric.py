"""Lightning Fabric: a loop with accumulation, clipping, bf16 and a checkpoint, on two ranks.

    torchrun --nproc-per-node 2 examples/with_fabric.py

Needs lightning. `docs/lightning.md` walks through it.
"""

from __future__ import annotations

import argparse
import os

import torch
from corpus import counting
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MixtralConfig

import moefx

RANKS = int(os.environ["WORLD_SIZE"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/fabric")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    # To Fabric the model is parallel as it comes, and every rank reads rows of its own.
    strategy = ModelParallelStrategy(lambda model, _: model, data_parallel_size=RANKS, tensor_parallel_size=1)
    fabric = Fabric(accelerator="auto", devices=RANKS, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0)
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=8)  # fmt: skip
    mesh = init_device_mesh(fabric.device.type, (RANKS,), mesh_dim_names=("ep",))
    compiled = moefx.compile(AutoModelForCausalLM.from_config(config).to(fabric.device), mesh)
    model = fabric.setup_module(compiled)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(counting(512, seed=0), batch_size=8, shuffle=True))

    for epoch in range(given.epochs):
        for number, batch in enumerate(loader):
            last = number % 2 == 1
            with compiled.no_sync() if not last else torch.enable_grad():
                loss = model(**batch).loss
                fabric.backward(loss / 2)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")
        moefx.checkpoint.save(given.folder, compiled, optimizer.optimizer, step=epoch)
    compiled.close()


if __name__ == "__main__":
    main()
