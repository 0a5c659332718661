"""How long moefx compiles, by the number of layers, as rank 0 of 1024 (fake process group: no other rank exists).

    python benchmarks/compile_time.py             writes results/compile_time.md
    python benchmarks/compile_time.py --quick     few layers, once; prints
    python benchmarks/compile_time.py --second-start 48     the same job twice, with an empty cache on disk; prints

Models of 64 experts, 12 to 96 layers, on a mesh of dp=16, ep=64: Qwen3-MoE of transformers (stacked experts), and a
loop over a ModuleList of experts. Every compile is a process of its own; the numbers of layers take turns, several
times, and medians count. Seconds are of processor time, which other processes disturb least, from the model to the
linked forward and backward. slope: seconds per layer between two numbers of layers; linear passes keep it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPERTS, WIDTH, DP, EP = 64, 64, 16, 64
MODELS = {"qwen3_moe": (12, 24, 48, 96), "loop": (12, 24, 48)}  # by the numbers of layers


def build(name: str, layers: int):
    import torch
    from torch import nn
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sys.path.insert(0, str(ROOT))
    from tests.support.handmade import Block, LanguageModel, Loop, make_moe

    torch.manual_seed(0)
    if name == "loop":
        style = Loop(num_experts=EXPERTS)
        model = LanguageModel(style)
        model.layers = nn.ModuleList(Block(make_moe(style), False) for _ in range(layers))
        return model
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=WIDTH, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=8,
        use_cache=False,
    ))  # fmt: skip


def compile_once(name: str, layers: int) -> None:
    """Prints {step: seconds} as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import moefx

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DP * EP)
    mesh = init_device_mesh("cpu", (DP, EP), mesh_dim_names=("dp", "ep"))
    model = build(name, layers)
    tokens = torch.arange(32).view(2, 16) % 50
    start, wall = time.process_time(), time.perf_counter()
    compiled = moefx.compile(model, mesh, example_inputs={"input_ids": tokens, "labels": tokens})
    found = {"all": time.process_time() - start, "wall": time.perf_counter() - wall}
    (program,) = compiled.prepare(input_ids=tokens, labels=tokens)
    found["cached"] = float(program.origin is None)
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for record in () if found["cached"] else program.records:
        found[record.name] = found.get(record.name, 0.0) + record.seconds
    assert len(program.program.regions) == layers
    print(json.dumps(found))


def measure(name: str, layers: int, cache: str = "off") -> dict[str, float]:
    command = [sys.executable, __file__, "--once", name, str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"MOEFX_CACHE": cache})
    if done.returncode:
        raise SystemExit(f"{name} of {layers} layers: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def second_start(name: str, layers: int, runs: int) -> None:
    """Prints a line for each start, the first with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        for start in range(1 + runs):
            found = measure(name, layers, folder)
            assert found["cached"] == (start > 0), "the program did not come from where it should"
            size = sum(path.stat().st_size for path in Path(folder).glob("*.json")) / 1e6
            print(f"{name}, {layers} layers, start {start + 1}: {found['all']:.2f} s of processor time, "
                  f"{found['wall']:.2f} s in all, {found['MB']:.0f} MB at the peak; {size:.1f} MB on disk", flush=True)


def section(name: str, found: dict[int, list[dict[str, float]]]) -> str:
    medians = {layers: {step: statistics.median(run[step] for run in runs) for step in runs[0]}
               for layers, runs in found.items()}  # fmt: skip
    few, some, *_, many = medians
    slopes = {}
    for step in medians[few]:
        low = (medians[some][step] - medians[few][step]) / (some - few)
        high = (medians[many][step] - medians[some][step]) / (many - some)
        slopes[step] = high / low if low > 0 else float("nan")
    spread = ", ".join(f"{layers}: {min(r['all'] for r in runs):.1f} to {max(r['all'] for r in runs):.1f}"
                       for layers, runs in found.items())  # fmt: skip
    rest = medians[few].keys() - {"all", "wall", "MB", "cached"}
    steps = sorted(rest, key=lambda s: -medians[many][s])
    rows = []
    for step in ("all", "wall", "MB", *steps[:8]):
        columns = " | ".join(f"{medians[layers][step]:.2f}" for layers in medians)
        rows.append(f"| {step} | {columns} | {slopes[step]:.2f} |")
    return "\n".join([
        f"## {name}", "",
        f"Slope from {some} to {many} layers over slope from {few} to {some}: {slopes['all']:.2f}. Seconds of all "
        f"runs, by layers: {spread}.", "",
        "| | " + " | ".join(f"{layers} layers" for layers in medians) + " | slope over slope |",
        "|---" * (len(medians) + 2) + "|", *rows, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--once", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--second-start", type=int, metavar="LAYERS")
    arguments = parser.parse_args()
    if arguments.once:
        compile_once(arguments.once[0], int(arguments.once[1]))
        return
    if arguments.second_start:
        for name in arguments.models:
            second_start(name, arguments.second_start, 1 if arguments.quick else arguments.runs)
        return
    import torch

    runs = 1 if arguments.quick else arguments.runs
    text = ["# Time to compile", "",
            f"Written by `{' '.join(['python benchmarks/compile_time.py', *sys.argv[1:]])}`, "
            f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {runs} runs of each.", "",
            __doc__.split("\n\n", 2)[2].strip(), ""]  # fmt: skip
    for name in arguments.models:
        found: dict[int, list[dict[str, float]]] = defaultdict(list)
        for _ in range(runs):
            for number in (1, 2, 4) if arguments.quick else MODELS[name]:
                found[number].append(measure(name, number))
                print(f"{name}, {number} layers: {found[number][-1]['all']:.1f} s", flush=True)
        text.append(section(name, found))
    print("\n".join(text))
    if not arguments.quick:
        (ROOT / "benchmarks" / "results" / "compile_time.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
