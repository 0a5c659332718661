"""Gradients that share collectives, and when these begin, on an emulated cluster.

    python benchmarks/buckets.py            as root; writes results/buckets.md
    python benchmarks/buckets.py --quick    4 layers, few rounds; prints

Steps are forward and backward of Qwen3-MoE's kind, one thread a rank, gloo, interleaved in the same processes
(interleave.py); ratios are taken round by round: median and quartiles. "same": every gradient agrees with that of the
first row to 1e-6.

Buckets: small layers on four ranks that read different data (dp=4), two on a node. Programs differ in how many bytes of
gradients a collective is worth beginning for. Collectives are those of gradients in a step, as the session's trace has
them.

Idle links: four layers of 256 wide, 4 x 256 tokens, experts over two nodes of one rank (ep=2), mixtures in two chunks
ordered by "heuristic", with a machine that was calibrated in the same cluster just before. Programs differ in when
reductions begin: as soon as their gradients are there, or where they hold up no exchange (costmodel/filling.py).
beside: reductions of the backward that have an exchange beside them on their link, as predicted, of how many;
backward: what it is predicted to take, in ms, and what its exchanges take together.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from dataclasses import replace
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
from moefx.costmodel import machine as machines
from moefx.costmodel.calibrate import calibrate
from moefx.costmodel.filling import REDUCTION, beside, filled
from moefx.costmodel.schedulers import Plan
from moefx.costmodel.tasks import TaskGraph
from moefx.passes import order

HERE = Path(__file__).parent
BEGINS = {"as soon as they are ready": "at once", "where links are idle": "idle"}
LIMITS = {"one each": 0, "64 KiB": 2**16, "512 KiB": 2**19, "4 MiB, the default": 2**22, "all": 2**40}
RATE, INTRA = "200mbit", "1600mbit"


def model_of(layers: int, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=512, hidden_size=width, intermediate_size=width, moe_intermediate_size=width // 2,
        head_dim=width // 4, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=2, use_cache=False))  # fmt: skip


def step(model: moefx.CompiledModule, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model._session.trace = []
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return {name: param.grad.to_local() for name, param in model.named_parameters() if param.grad is not None}


def alike(found: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    first = next(iter(found.values()))
    return {name: "yes" if all(torch.allclose(grad, first[each], rtol=1e-5, atol=1e-6) for each, grad in grads.items())
            else "no" for name, grads in found.items()}  # fmt: skip


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    found = torch.randint(0, 512, (samples, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    return {"input_ids": found, "labels": found}


def run_buckets(layers: int, rounds: int) -> str:
    batch, models = tokens(2, 16), {}
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for name, limit in LIMITS.items():
        machines.BUCKET_BYTES = limit
        models[name] = moefx.compile(model_of(layers), mesh, example_inputs=batch)
    same = alike({name: {each: grad.clone() for each, grad in step(model, batch).items()}
                  for name, model in models.items()})  # fmt: skip
    counts = {name: sum(each.kind == "all_reduce" for each in model._session.trace) for name, model in models.items()}
    seconds = measure({name: partial(step, model, batch) for name, model in models.items()}, rounds, warm_up=1)
    return "\n".join(f"| {name} | {counts[name]} | {Spread.of([1e3 * s for s in seconds[name]]).text(0)} | "
                     f"{ratios(seconds, name, 'one each').text(2)} | {same[name]} |" for name in LIMITS)  # fmt: skip


def run_idle(layers: int, rounds: int) -> str:
    batch, models, predicted = tokens(4, 256), {}, {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    machine = calibrate(quick=True, ranks_per_node=1)
    for name, how in BEGINS.items():
        def fill(graph, plan, weights, rates, name=name, how=how):
            found = predicted[name] = filled(graph, plan, weights, rates)
            if how == "at once":
                found = predicted[name] = replace(found, graph=graph, plan=plan, behind={}, fits=fitting(graph, plan))
            return found

        order.filled = fill
        models[name] = moefx.compile(model_of(layers, 256), mesh, alltoall="direct", chunks=2, scheduler="heuristic",
                                     machine=machine, example_inputs=batch)  # fmt: skip
    same = alike({name: {each: grad.clone() for each, grad in step(model, batch).items()}
                  for name, model in models.items()})  # fmt: skip
    seconds = measure({name: partial(step, model, batch) for name, model in models.items()}, rounds, warm_up=1)
    first, rows = next(iter(models)), []
    for name, one in predicted.items():
        timeline, took = one.plan.timeline, Spread.of([1e3 * s for s in seconds[name]])
        spans = [timeline.end[each.name] - timeline.start[each.name] for each in one.graph if each.kind in ("A1", "A2")]
        rows.append(f"| {name} | {one.of - one.fits} of {one.of} | {1e3 * timeline.makespan:.0f}, "
                    f"{1e3 * sum(spans):.0f} | {took.text(0)} | {ratios(seconds, name, first).text(2)} | "
                    f"{same[name]} |")  # fmt: skip
    return "\n".join(rows)


def fitting(graph: TaskGraph, plan: Plan) -> int:
    """How many reductions have no exchange beside them."""
    fillers = {task.name for task in graph if task.kind == REDUCTION}
    return len(fillers - beside(graph, plan, fillers))


def run(what: str, layers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = (run_buckets if what == "buckets" else run_idle)(layers, rounds)
    if dist.get_rank() == 0:
        Path(folder, "rows").write_text(rows)
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def in_cluster(what: str, ranks: int, intra: str, *arguments: str) -> str:
    """The rows that rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder, cluster("buckets", 2, RATE, intra) as nodes:
        command = [sys.executable, os.path.abspath(__file__), "--in-cluster", what, *arguments, folder]
        if status := nodes.run(command, ranks, timeout_s=1500):
            raise SystemExit(status)
        return Path(folder, "rows").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int, default=24, help="of the model whose buckets are compared")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--in-cluster", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_cluster:
        what, layers, rounds, folder = args.in_cluster
        run(what, int(layers), int(rounds), folder)
        return
    layers, rounds = (4, 3) if args.quick else (args.layers, args.rounds)
    rows = in_cluster("buckets", 2, INTRA, str(layers), str(rounds))
    idle = in_cluster("idle", 1, "", "2" if args.quick else "4", str(rounds))
    text = "\n".join([
        "# Gradients in buckets", "",
        f"Written by `{' '.join(['python benchmarks/buckets.py', *sys.argv[1:]])}`, {datetime.date.today()}: "
        f"torch {torch.__version__}, {layers} layers of buckets, {rounds} rounds, links of {RATE} between nodes and "
        f"{INTRA} inside; load {load()}.", "", __doc__.split("\n\n", 2)[2].strip(), "",
        "| gradients share a collective up to | collectives | ms | over one each | same |", "|---|---|---|---|---|",
        rows, "", "| reductions begin | beside | backward | ms | over at once | same |",
        "|---|---|---|---|---|---|", idle, ""])  # fmt: skip
    print(text)
    if not args.quick:
        (HERE / "results" / "buckets.md").write_text(text)


if __name__ == "__main__":
    main()
