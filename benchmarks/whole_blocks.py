"""Chunks of whole blocks beside chunks of mixtures: whole models on an emulated cluster of two nodes of one rank.

    python benchmarks/whole_blocks.py            as root; writes results/whole_blocks.md
    python benchmarks/whole_blocks.py --quick    one configuration, few rounds; prints

Forward and backward of Mixtral's and Qwen3-MoE's kind with the attention and norms of these, experts over ep=2, fp32,
one thread a rank, gloo. All programs of a configuration are interleaved in the same processes (interleave.py).

communication: the all-to-alls of the step alone, one after the other. share: that over the blocking step (one chunk,
"sequential"). The programs: "mixtures n": chunks=n; "blocks n": with whole_blocks, too, both ordered by "heuristic".
Ratios are to the blocking step, round by round: median and quartiles. gain: of the best mixtures over the best blocks,
by medians. floor: the larger of communication and of the blocking step less communication, over the blocking step;
both are measured, so a row may be below it by chance.
memory: the planned peaks of blocks over mixtures, n=2, forward and backward. "same": loss and all gradients agree with
those of the blocking step to 1e-5.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import cluster
from interleave import Spread, load, measure, ratios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefx

HERE = Path(__file__).parent
BLOCKING = "blocking"
PROGRAMS: dict[str, dict[str, Any]] = {
    BLOCKING: {"chunks": 1, "scheduler": "sequential"},
    "mixtures 2": {"chunks": 2, "scheduler": "heuristic"},
    "mixtures 4": {"chunks": 4, "scheduler": "heuristic"},
    "blocks 2": {"chunks": 2, "scheduler": "heuristic", "whole_blocks": True},
    "blocks 4": {"chunks": 4, "scheduler": "heuristic", "whole_blocks": True},
}


@dataclass(frozen=True)
class Configuration:
    """rate: of the link between the nodes. samples, length: of a rank's batch. inner: of an expert."""

    kind: str
    layers: int
    rate: str
    samples: int = 4
    length: int = 256
    width: int = 256
    inner: int = 256

    @property
    def title(self) -> str:
        return (f"{self.kind}, {self.layers} layers, {self.samples} x {self.length} tokens, {self.width} wide, experts "
                f"{self.inner}, {self.rate}")  # fmt: skip

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        shape = {"vocab_size": 256, "hidden_size": self.width, "num_hidden_layers": self.layers, "use_cache": False,
                 "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts_per_tok": 2,
                 "experts_implementation": "grouped_mm"}  # fmt: skip
        if self.kind == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**shape, intermediate_size=self.inner, num_local_experts=8))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, head_dim=self.width // 8, num_experts=8,
                                                  moe_intermediate_size=self.inner))  # fmt: skip


CONFIGURATIONS = [Configuration(kind, layers, rate) for kind in ("mixtral", "qwen3") for layers in (2, 4)
                  for rate in ("200mbit", "400mbit", "800mbit")]  # fmt: skip


def step(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters() if param.grad is not None)]


def exchanges(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> list[int]:
    """Bytes that every all-to-all of a step sends, of the rank that sends most."""
    model._session.trace = []
    step(model, batch)
    found = [each.num_bytes for each in model._session.trace if each.kind == "all_to_all"]
    model._session.trace = None
    most = torch.tensor(found)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def communicate(sizes: list[int]) -> None:
    for nbytes in sizes:
        sent = torch.zeros(max(1, nbytes // 4) * 2)
        dist.all_to_all_single(torch.empty_like(sent), sent)


def run(number: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = CONFIGURATIONS[number]
    tokens = torch.randint(0, 256, (chosen.samples, chosen.length),
                           generator=torch.Generator().manual_seed(dist.get_rank()))  # fmt: skip
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    models, peaks = {}, {}
    for name, options in PROGRAMS.items():
        models[name] = moefx.compile(chosen.model(), mesh, alltoall="direct", **options)
        models[name].prepare(**batch)
        peaks[name] = [peak.bytes for peak in moefx.explain(models[name]).programs[0].peaks.values()]
    wanted = step(models[BLOCKING], batch)
    same = {name: all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(step(model, batch), wanted))
            for name, model in models.items()}  # fmt: skip
    sizes = exchanges(models[BLOCKING], batch)
    steps = {name: partial(step, model, batch) for name, model in models.items()}
    seconds = measure({**steps, "communication": partial(communicate, sizes)}, rounds, warm_up=1)
    if dist.get_rank() == 0:
        Path(folder, "found").write_text(json.dumps({"seconds": seconds, "same": same, "peaks": peaks,
                                                     "exchanges": len(sizes)}))  # fmt: skip
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def row(chosen: Configuration, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    to = {name: ratios(seconds, name, BLOCKING) for name in (*PROGRAMS, "communication")}
    best = {kind: min(to[name].median for name in PROGRAMS if name.startswith(kind)) for kind in ("mixtures", "blocks")}
    share = to["communication"].median
    memory = [a / b for a, b in zip(found["peaks"]["blocks 2"], found["peaks"]["mixtures 2"])]
    cells = [chosen.title, Spread.of([1e3 * s for s in seconds[BLOCKING]]).text(0), f"{share:.2f}",
             *(to[name].text(2) for name in PROGRAMS if name != BLOCKING), f"{best['mixtures'] / best['blocks']:.2f}",
             f"{max(share, 1 - share):.2f}", " ".join(f"{each:.2f}" for each in memory),
             "yes" if all(found["same"].values()) else "no"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", help="configurations by number")
    parser.add_argument("--in-cluster", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_cluster:
        number, rounds, folder = args.in_cluster
        run(int(number), int(rounds), folder)
        return
    numbers = [0] if args.quick else args.only or range(len(CONFIGURATIONS))
    rounds, rows = 3 if args.quick else 12, []
    for number in numbers:
        chosen = CONFIGURATIONS[number]
        with tempfile.TemporaryDirectory() as folder, cluster("blocks", 2, chosen.rate) as nodes:
            command = [sys.executable, os.path.abspath(__file__), "--in-cluster", str(number), str(rounds), folder]
            status = nodes.run(command, 1, timeout_s=1500)
            if status:
                raise SystemExit(status)
            rows.append(row(chosen, json.loads(Path(folder, "found").read_text())))
        print(rows[-1], flush=True)
    columns = ["model", "blocking, ms", "share", *(name for name in PROGRAMS if name != BLOCKING), "gain", "floor",
               "memory", "same"]  # fmt: skip
    text = "\n".join([
        "# Chunks of whole blocks", "",
        f"Written by `{' '.join(['python benchmarks/whole_blocks.py', *sys.argv[1:]])}`, {datetime.date.today()}: "
        f"torch {torch.__version__}, {rounds} rounds; load {load()}.", "", __doc__.split("\n\n", 2)[2].strip(), "",
        f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows, ""])  # fmt: skip
    if not args.quick:
        (HERE / "results" / "whole_blocks.md").write_text(text)


if __name__ == "__main__":
    main()
