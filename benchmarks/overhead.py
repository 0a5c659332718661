"""What moefx costs where it has nothing to spread: a compiled model on one rank beside the plain model.

    python benchmarks/overhead.py             writes results/overhead_cpu.md
    python benchmarks/overhead.py --quick     few rounds; prints

Forward and backward of whole small models on one device (ep=1, gloo; gradients set to None before each step, no
optimizer). The ways in which transformers runs its experts are plain contestants (eager loops over the experts that
were hit, and grouped_mm; batched_mm copies the weights for every token and is far behind), a model with a ModuleList of
experts is its own, and the plain one with the smallest median is what moefx is compared with. All contestants share
weights, batch and process and take turns; a ratio is of two steps of the same round. On CPU every one of them
multiplies the rows of each expert by a matmul of their own in single precision: the path of the matmuls is the same.

Both tables are of the same contestants. In the first, glibc is told to keep freed memory, as the caching allocator of a
GPU does; as it comes, it gives the top of its heap back whenever enough of it is free, and whose steps then pay for new
pages (up to 3 % of a step) depends on the order in which each frees.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from interleave import Spread, load, measure, ratios
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import handmade  # noqa: E402

IMPLEMENTATIONS = ("eager", "grouped_mm")
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 1024, "use_cache": False, "attn_implementation": "sdpa"}  # fmt: skip
BATCH, LENGTH = 8, 128
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**33)}


def mixtral(**how: str) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(intermediate_size=512, num_local_experts=8, num_experts_per_tok=2, **SIZES,
                                            **how))  # fmt: skip


def qwen3_moe(**how: str) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(moe_intermediate_size=192, num_experts=32, num_experts_per_tok=4,
                                              head_dim=64, norm_topk_prob=True, **SIZES, **how))  # fmt: skip


class ListOfExperts(nn.Module):
    """Embedding, two layers with a ModuleList of experts each, head."""

    def __init__(self) -> None:
        super().__init__()
        width, vocabulary = SIZES["hidden_size"], SIZES["vocab_size"]
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Experts(width, 512) for _ in range(SIZES["num_hidden_layers"]))

    def forward(self, input_ids: Tensor, labels: Tensor) -> handmade.Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return handmade.output_of(self.head(x), labels)


class Experts(nn.Module):
    def __init__(self, width: int, inner: int, experts: int = 8, k: int = 2) -> None:
        super().__init__()
        self.k, self.router = k, nn.Linear(width, experts, bias=False)
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, idx = self.router(rows).softmax(-1).topk(self.k)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(idx == number)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


MODELS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "mixtral: 8 experts, 2 of them, 256 to 512": {i: lambda i=i: mixtral(experts_implementation=i)
                                                  for i in IMPLEMENTATIONS},
    "qwen3_moe: 32 experts, 4 of them, 256 to 192": {i: lambda i=i: qwen3_moe(experts_implementation=i)
                                                     for i in IMPLEMENTATIONS},
    "a ModuleList of 8 experts, 2 of them, 256 to 512": {"loop": ListOfExperts},
}  # fmt: skip


@contextmanager
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def step_of(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    params = list(model.parameters())

    def step() -> Tensor:
        for param in params:
            param.grad = None
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def compare(plain: dict[str, Callable[[], nn.Module]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in each round."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    models = {name: make() for name, make in plain.items()}
    first = next(iter(models.values()))
    for model in models.values():
        model.load_state_dict(first.state_dict())
    compiled = moefx.compile(next(iter(plain.values()))(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
    compiled.load_state_dict(first.state_dict())
    with closing(compiled):
        steps = {name: step_of(model, batch) for name, model in {**models, "moefx": compiled}.items()}
        losses = {name: step() for name, step in steps.items()}
        for loss in losses.values():
            torch.testing.assert_close(loss, losses["moefx"])
        return measure(steps, rounds, warm_up=2)


def rows_of_table(rounds: int) -> None:
    """Print the rows for the allocator as this process has it."""
    with one_rank():
        for name, plain in MODELS.items():
            seconds = compare(plain, rounds)
            fastest = min(plain, key=lambda each: statistics.median(seconds[each]))
            for contestant, each in seconds.items():
                took = Spread.of([1e3 * s for s in each]).text(0)
                ratio = ratios(seconds, "moefx", fastest).text(3) if contestant == "moefx" else ""
                mark = " (fastest plain)" if contestant == fastest else ""
                print(f"| {name} | {contestant}{mark} | {took} | {ratio} |", flush=True)


def in_a_process(rounds: int, **environment: str) -> list[str]:
    found = subprocess.run([sys.executable, __file__, "--rows", "--rounds", str(rounds)], env=os.environ | environment,
                           stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    lines = [line for line in found.stdout.splitlines() if line.startswith("| ")]
    print(*lines, sep="\n", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", action="store_true", help="the rows of one table, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rows:
        rows_of_table(arguments.rounds)
        return
    rounds = 3 if arguments.quick else arguments.rounds
    head = ["", "| model | contestant | ms | ratio |", "|---|---|---|---|"]
    lines = ["# Overhead on one rank", "",
             f"Written by `{' '.join(['python benchmarks/overhead.py', *sys.argv[1:]])}`, "
             f"{datetime.date.today().isoformat()}: torch {torch.__version__}, transformers "
             f"{transformers.__version__}, {rounds} rounds, batches of {BATCH} times {LENGTH} tokens, one thread; "
             f"load {load()}.", "", __doc__.split("\n\n", 2)[2].strip(), "",
             "Milliseconds: median (quartiles). Ratio: moefx over the fastest plain contestant; goal: median at most "
             "1.02, upper quartile at most 1.05."]  # fmt: skip
    lines += ["", "## Freed memory is kept", *head, *in_a_process(rounds, **KEEPS_MEMORY)]
    lines += ["", "## glibc as it comes", *head, *in_a_process(rounds)]
    if not arguments.quick:
        (ROOT / "benchmarks" / "results" / "overhead_cpu.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
