"""What moefx costs on one GPU: layers of Qwen3-MoE compiled for one rank, beside transformers' own ways.

    python benchmarks/one_gpu.py [--out benchmarks/results/one_gpu.md]

Forward and backward in bf16 of a few decoder layers with the sizes of Qwen3-30B-A3B (hidden 2048, 128 experts of 768,
8 per token), head and loss included; gradients set to None before each step, no optimizer. Plain contestants are the
ways in which transformers runs experts: "eager" loops over the experts that were hit, "grouped_mm" calls torch's
grouped product. "moefx with masks" lacks the passes by which attention asks its kernel for the causal mask, and for
keys in groups. All share weights and batch and take turns; times are of CUDA events. A ratio is of two steps of one
round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from attention import without
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import moefx  # noqa: E402

PLAIN = ("eager", "grouped_mm")


def model(layers: int, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=4096,
        use_cache=False, attn_implementation="sdpa", experts_implementation=implementation,
    )  # fmt: skip
    with torch.device("cuda"):
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def step_of(contestant: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in contestant.parameters():
            parameter.grad = None
        contestant(input_ids=tokens, labels=tokens).loss.backward()

    return step


def clock(step: Callable[[], None]) -> float:
    """Milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(layers: int, batch: int, length: int, rounds: int) -> list[str]:
    tokens = torch.randint(0, 4096, (batch, length), device="cuda")
    contestants = {name: model(layers, name) for name in PLAIN}
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    with closing(moefx.compile(model(layers, "grouped_mm"), mesh)) as compiled, closing(
            moefx.compile(model(layers, "grouped_mm"), mesh)) as masked:  # fmt: skip
        with without(("ask-kernels", "group-keys")):
            masked.prepare(input_ids=tokens, labels=tokens)
        contestants |= {"moefx with masks": masked, "moefx": compiled}
        steps = {name: step_of(each, tokens) for name, each in contestants.items()}
        losses = {name: each(input_ids=tokens, labels=tokens).loss.item() for name, each in contestants.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 3):
            for name, step in steps.items():
                milliseconds = clock(step)
                if number >= 3:
                    times[name].append(milliseconds)
        memory = {}
        for name, step in steps.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    rows = []
    for name, found in times.items():
        each = sorted(a / b for a, b in zip(times["moefx"], found))
        spread = f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        rows.append(f"| {layers} | {batch} x {length} | {name} | {statistics.median(found):.1f} | {spread} | "
                    f"{memory[name]:.2f} | {losses[name]:.4f} |")  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    lines = [f"# One rank on {torch.cuda.get_device_name()}", "", *__doc__.strip().splitlines(), "",
             f"torch {torch.__version__}, transformers {transformers.__version__}, {args.rounds} rounds. "
             "Medians; moefx / contestant is the median of ratios within a round, with the smallest and the largest. "
             "GiB: the peak of a step above what stands before it.", "",
             "| layers | tokens | contestant | ms | moefx / contestant | GiB | loss |", "|---|---|---|---|---|---|---|",
             ]  # fmt: skip
    for shape in ((2, 4, 2048), (2, 1, 512)):
        lines += measure(*shape, args.rounds)
        print("\n".join(lines[-3:]), flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
