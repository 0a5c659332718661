"""Random models under random limits of memory: each stays within its limit, or is refused with the least it needs.

    python benchmarks/memory_limits.py [--cases 200] [--first 0] [--log cases.jsonl]

writes results/memory_limits.md, of all cases in the log, to which new ones are added.

Compiled for ranks that are not there (torch's fake process group), for one of the presets of machines. A limit is drawn
between a third and 1.1 of what the program needs that keeps everything. "Needs" is the sweep of the finished program
(`moefx.costmodel.memory`), not a measurement. A refusal is right if the program that is made with the limit that it
names is not refused, and no limit below is met.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moefx
from moefx.errors import MoefxError

HERE = Path(__file__).parent


class Case(NamedTuple):
    ranks: int
    layers: int
    tokens: int
    width: int
    inner: int
    experts: int
    k: int
    gated: str  # the family of the blocks
    dense: bool  # a dense layer between them
    chunks: int | None
    machine: str
    share: float  # of what is needed with everything kept


class Outcome(NamedTuple):
    needed: float  # bytes, with everything kept
    limit: float
    peak: float | None  # None: refused
    least: float | None  # that the refusal names
    ways: tuple[str, ...]
    seconds: float


def drawn(seed: int) -> Case:
    """Three cases in a row are the same but for their limits."""
    draw, of_limit = random.Random(seed // 3), random.Random(seed)
    experts = draw.choice([8, 16])
    return Case(draw.choice([2, 4, 8]), draw.choice([1, 2]), draw.choice([256, 1024, 4096]), draw.choice([64, 128]),
                draw.choice([64, 128, 512]), experts, draw.choice([1, 2, 4]), draw.choice(["mixtral", "qwen3"]),
                draw.random() < 0.5, draw.choice([None, None, 1, 2, 4]),
                draw.choice(["emulated-200mbit", "h100-8x400g"]), of_limit.uniform(0.33, 1.1))  # fmt: skip


class Layers(nn.Module):
    """Blocks with residuals, a dense layer between them if asked for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        shared = {"hidden_size": case.width, "num_experts_per_tok": case.k}
        if case.gated == "mixtral":
            config = MixtralConfig(intermediate_size=case.inner, num_local_experts=case.experts, **shared)
            make = MixtralSparseMoeBlock
        else:
            config = Qwen3MoeConfig(moe_intermediate_size=case.inner, num_experts=case.experts, **shared)
            make = Qwen3MoeSparseMoeBlock
        config._experts_implementation = "grouped_mm"
        self.blocks = nn.ModuleList(make(config) for _ in range(case.layers))
        self.dense = nn.ModuleList(nn.Sequential(nn.Linear(case.width, 2 * case.width), nn.GELU(),
                                                 nn.Linear(2 * case.width, case.width))
                                   for _ in range(case.layers if case.dense else 0))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            out = block(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
            if self.dense:
                x = x + self.dense[number](x)
        return x


def compiled(case: Case, limit: float | None) -> tuple[float, tuple[str, ...]]:
    """(planned peak in bytes, the ways that are not `keep`). Raises MoefxError where a limit is refused."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("ep",))
    options = moefx.Options.named(memory_limit=limit, chunks=case.chunks, machine=case.machine, dynamic=False, verify=0,
                            ranks_per_node=case.ranks)  # fmt: skip
    x = torch.zeros(1, case.tokens, case.width, requires_grad=True)
    model = moefx.compile(Layers(case), mesh, options, example_inputs=(x,))
    try:
        program = moefx.explain(model).programs[-1]
        decision = model._variants[-1].context.decisions
        ways = {way for each in decision.restoring.values() for way in each} - {"keep"}
        return max(peak.bytes for peak in program.peaks.values()), tuple(sorted(ways))
    finally:
        model.close()


@functools.lru_cache(maxsize=1)
def needed_by(case: Case) -> float:
    return compiled(case, None)[0]


def judged(case: Case) -> Outcome:
    began = time.perf_counter()
    needed = needed_by(case._replace(share=0.0))
    limit, ways = needed * case.share, ()
    peak = least = None
    try:
        peak, ways = compiled(case, limit)
    except MoefxError as error:
        least = float(re.search(r"needs less than (\d+) bytes", str(error))[1])
    return Outcome(needed, limit, peak, least, ways, time.perf_counter() - began)


def is_right(found: Outcome) -> bool:
    return found.peak <= found.limit if found.least is None else found.limit < found.least <= found.needed + 1


def report(cases: list[tuple[Case, Outcome]]) -> str:
    met = [found for _, found in cases if found.peak is not None]
    refused = [found for _, found in cases if found.least is not None]
    right = sum(is_right(found) for _, found in cases)
    used = sorted(found.peak / found.limit for found in met if found.ways)
    lines = ["# Limits of memory", "", "Made by `python benchmarks/memory_limits.py`, whose docstring says how.", "",
             f"{len(cases)} random configurations: {right} right; {len(met)} stay within their limit, "
             f"{sum(bool(found.ways) for found in met)} of them since something is not kept; {len(refused)} are "
             "refused, with the least that is needed above the limit."]  # fmt: skip
    if used:
        lines.append(f"Where something is not kept, {used[len(used) // 2]:.1%} of the limit is used in the median.")
    lines += ["", "| " + " | ".join(Case._fields) + " | needed MB | limit MB | peak MB | least MB | ways |",
              "|---" * (len(Case._fields) + 5) + "|"]  # fmt: skip
    for case, found in cases:
        cells = [f"{each:.2f}" if isinstance(each, float) else str(each) for each in case]
        cells += ["" if each is None else f"{each / 1e6:.2f}" for each in found[:4]]
        lines.append("| " + " | ".join([*cells, ", ".join(found.ways)]) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log", type=Path, help="of earlier launches, too")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory_limits.md")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = [(Case(*case), Outcome(*outcome)) for case, outcome in
             map(json.loads, args.log.read_text().splitlines() if args.log and args.log.exists() else ())]  # fmt: skip
    for seed in range(args.first, args.first + args.cases):
        case = drawn(seed)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
        try:
            outcome = judged(case)
        finally:
            dist.destroy_process_group()
        print(seed, "right" if is_right(outcome) else "WRONG", case, outcome, flush=True)
        found.append((case, outcome))
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps((case, outcome)) + "\n")
    args.out.write_text(report(found))


if __name__ == "__main__":
    main()
