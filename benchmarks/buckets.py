"""Gradients that share collectives beside one collective for each: data parallel ranks on an emulated cluster.

    python benchmarks/buckets.py            as root; writes results/buckets.md
    python benchmarks/buckets.py --quick    4 layers, few rounds; prints

Qwen3-MoE's kind, small, forward and backward on four ranks that read different data (dp=4), two on a node; one thread a
rank, gloo. The program is the same: only how many bytes of gradients a collective is worth beginning for differs.
Steps are interleaved in the same processes (interleave.py); ratios are taken round by round: median and quartiles.
Collectives are those of gradients in a step, as the session's trace has them. "same": every gradient agrees with that
of one collective each to 1e-6.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import cluster
from interleave import Spread, load, measure, ratios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefx

HERE = Path(__file__).parent
LIMITS = {"one each": 0, "64 KiB": 2**16, "512 KiB": 2**19, "4 MiB, the default": 2**22, "all": 2**40}
RATE, INTRA = "200mbit", "1600mbit"


def model_of(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        use_cache=False))  # fmt: skip


def step(model: moefx.CompiledModule, batch: dict[str, torch.Tensor], limit: float) -> dict[str, torch.Tensor]:
    model._session.bucket_bytes, model._session.trace = limit, []
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return {name: param.grad.to_local() for name, param in model.named_parameters()}


def run(layers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = moefx.compile(model_of(layers), mesh, example_inputs=batch)
    counts, found = {}, {}
    for name, limit in LIMITS.items():
        found[name] = {each: grad.clone() for each, grad in step(model, batch, limit).items()}
        counts[name] = sum(each.kind == "all_reduce" for each in model._session.trace)
    same = {name: all(torch.allclose(grad, found["one each"][each], rtol=1e-5, atol=1e-6)
                      for each, grad in grads.items()) for name, grads in found.items()}  # fmt: skip
    seconds = measure({name: partial(step, model, batch, limit) for name, limit in LIMITS.items()}, rounds, warm_up=1)
    if dist.get_rank() == 0:
        rows = [f"| {name} | {counts[name]} | {Spread.of([1e3 * s for s in seconds[name]]).text(0)} | "
                f"{ratios(seconds, name, 'one each').text(2)} | {'yes' if same[name] else 'no'} |" for name in LIMITS]
        Path(folder, "rows").write_text("\n".join(rows))
    model.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--in-cluster", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_cluster:
        layers, rounds, folder = args.in_cluster
        run(int(layers), int(rounds), folder)
        return
    layers, rounds = (4, 3) if args.quick else (24, 20)
    with tempfile.TemporaryDirectory() as folder, cluster("buckets", 2, RATE, INTRA) as nodes:
        command = [sys.executable, os.path.abspath(__file__), "--in-cluster", str(layers), str(rounds), folder]
        status = nodes.run(command, 2, timeout_s=1500)
        if status:
            raise SystemExit(status)
        rows = Path(folder, "rows").read_text()
    text = "\n".join([
        "# Gradients in buckets", "",
        f"Written by `{' '.join(['python benchmarks/buckets.py', *sys.argv[1:]])}`, {datetime.date.today()}: "
        f"torch {torch.__version__}, {layers} layers, {rounds} rounds, links of {RATE} between nodes and {INTRA} "
        f"inside; load {load()}.", "", __doc__.split("\n\n", 2)[2].strip(), "",
        "| gradients share a collective up to | collectives | ms | over one each | same |", "|---|---|---|---|---|",
        rows, ""])  # fmt: skip
    print(text)
    if not args.quick:
        (HERE / "results" / "buckets.md").write_text(text)


if __name__ == "__main__":
    main()
