"""Parameters of which every rank has some rows: moefx beside FSDP2, on the same plain models.

    python benchmarks/shard_dense.py              writes results/shard_dense.md
    python benchmarks/shard_dense.py --quick      small models, few rounds; prints

Forward and backward on ranks that are processes with one thread each and gloo between them; gradients are set to None
before each step, and there is no optimizer. "fsdp2" is `torch.distributed.fsdp.fully_shard` of every layer, then of the
model, as its documentation does it. "moefx" is `Options(shard_dense=True)`, "moefx, kept" the same with keep="eager"
(weights are not gathered again in the backward), "moefx, replicated" without. A dense model is compiled over `dp`;
of a mixture of experts, moefx spreads the experts over `ep`, and FSDP2 gathers them with all else.

Steps are interleaved in the same processes (interleave.py); ratios are taken round by round: median and quartiles.
Sent are the bytes that a rank sends of weights and their gradients where it has shards; with a ring the formula is
3 (N - 1) / N of the parameters. The peak is that of a step beyond what a rank has of parameters, at the boundaries of
operators.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from interleave import Spread, load, measure, ratios
from overhead import step_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.peaks import Peak  # noqa: E402

SHARDED = {"moefx": {}, "moefx, kept": {"keep": "eager"}}
BATCH, LENGTH = 2, 64


def sizes(width: int, layers: int) -> dict[str, object]:
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
            "vocab_size": 2048, "use_cache": False, "attn_implementation": "sdpa",
            "tie_word_embeddings": True}  # fmt: skip


def llama(width: int, layers: int) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(intermediate_size=3 * width, **sizes(width, layers)))


def qwen3_moe(width: int, layers: int) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(moe_intermediate_size=width // 2, num_experts=8, num_experts_per_tok=2,
                                              head_dim=width // 8, experts_implementation="grouped_mm",
                                              **sizes(width, layers)))  # fmt: skip


MODELS = {"llama": (llama, "dp"), "qwen3_moe": (qwen3_moe, "ep")}


def fsdp2(model: nn.Module, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def peak_of(model: nn.Module, step: Callable[[], Tensor]) -> float:
    """MiB beyond parameters, gradients included."""
    with Peak([*model.parameters(), *model.buffers()]) as peak:
        step()
    return peak.peak / 2**20


def sent(compiled: moefx.CompiledModule) -> float:
    """MiB of weights and of their gradients that this rank has sent in the last step."""
    kinds = [each for each in compiled._session.trace if each.region != "the backward"]
    return sum(each.num_bytes for each in kinds if each.kind in ("all_gather", "reduce_scatter")) / 2**20


def run(rank: int, folder: str, ranks: int, name: str, width: int, layers: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    make, axis = MODELS[name]
    torch.manual_seed(0)
    plain = make(width, layers)
    number = sum(param.numel() for param in plain.parameters())
    tokens = torch.randint(0, 2048, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": tokens, "labels": tokens}
    models: dict[str, nn.Module] = {}
    for contestant in ("fsdp2", "moefx, replicated", *SHARDED):
        model = make(width, layers)
        model.load_state_dict(plain.state_dict())
        models[contestant] = fsdp2(model, ranks) if contestant == "fsdp2" else moefx.compile(
            model, init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,)),
            dynamic=False, shard_dense=contestant in SHARDED, **SHARDED.get(contestant, {}),
            example_inputs=batch)  # fmt: skip
    steps = {contestant: step_of(model, batch) for contestant, model in models.items()}
    losses = {contestant: step() for contestant, step in steps.items()}
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["fsdp2"])
    traffic = {contestant: sent(models[contestant]) for contestant in SHARDED}
    seconds = measure(steps, rounds, warm_up=2)
    peaks = {contestant: peak_of(models[contestant], step) for contestant, step in steps.items()}
    if rank == 0:
        with open(f"{folder}/rows", "w") as file:
            for contestant, each in seconds.items():
                took, ratio = Spread.of([1e3 * s for s in each]).text(0), ratios(seconds, contestant, "fsdp2").text(2)
                moved = f"{traffic[contestant]:.1f}" if contestant in traffic else ""
                print(f"| {name}, {number / 1e6:.1f} M | {contestant} | {took} | {ratio} | {moved} | "
                      f"{peaks[contestant]:.1f} |", file=file)  # fmt: skip
    for contestant in models:
        if contestant != "fsdp2":
            models[contestant].close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    rounds, shape = (3, (64, 2)) if args.quick else (args.rounds, (512, 4))
    written = f"`{' '.join(['python', 'benchmarks/shard_dense.py', *sys.argv[1:]])}`, {datetime.date.today()}"
    lines = ["# Dense parameters in shards, beside FSDP2", "",
             f"Written by {written}: torch {torch.__version__}, transformers {transformers.__version__}, {args.ranks} "
             f"ranks, {rounds} rounds, {shape[1]} layers of width {shape[0]}, batches of {BATCH} times {LENGTH} tokens "
             f"a rank; load {load()}.", "", __doc__.split("\n\n", 2)[2].strip(), "",
             "| model | contestant | ms | over fsdp2 | MiB sent | peak, MiB |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (folder, args.ranks, name, *shape, rounds), nprocs=args.ranks)
            found = (Path(folder) / "rows").read_text().splitlines()
        lines += found
        print(*found, sep="\n", flush=True)
    if not args.quick:
        (ROOT / "benchmarks" / "results" / "shard_dense.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
