"""Train one small language model of Qwen3-MoE's kind six times, and compare the curves.

    python benchmarks/real_run.py                 300 steps; writes results/real_run.json and .md
    python benchmarks/real_run.py --steps 6       prints

The text is the source of Python's standard library (examples/corpus.py), 16 sequences of 128 bytes a step. Every run
starts with the same weights and sees the same sequences in the same steps:

    one device     transformers' Qwen3-MoE, eager, without moefx
    noise          the same, with the sequences of each step from last to first: the same sums in another order
    2 ranks        examples/train_moe.py, experts over both
    4 ranks        the same, experts over 2 x 2: two copies of each
    resumed        2 ranks to the middle, saved; then 4 ranks from that checkpoint
    dense          Qwen3 without experts; its MLP is as wide as the two experts that a token visits
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_run.json"
sys.path.insert(0, str(ROOT / "examples"))

from corpus import Batches, read_text  # noqa: E402
from models import COMMON, build  # noqa: E402
from train_moe import Trainer, parse  # noqa: E402

SEQUENCES = 16  # of a step
WITHIN = 3  # times as far as the noise may another run be, to count as the same


def plain(steps: int, *, dense: bool = False, backwards: bool = False) -> list[float]:
    args = parse(["--steps", str(steps), "--batch", str(SEQUENCES)])
    torch.manual_seed(args.seed)
    wide = {**COMMON, "head_dim": 32, "intermediate_size": 2 * 192}
    wide.pop("num_experts_per_tok")
    trainer = Trainer(Qwen3ForCausalLM(Qwen3Config(**wide)) if dense else build("qwen3_moe"), args)
    batches = Batches(read_text(), rows=SEQUENCES, length=args.seq, readers=1, seed=args.seed)
    order = [*range(SEQUENCES)][:: -1 if backwards else 1]
    return [trainer.step([batches(step, 0)[order]], 1, hold_back=False)[0].item() for step in range(steps)]


def compiled(ranks: int, steps: int, *more: str) -> list[float]:
    """What examples/train_moe.py prints on so many ranks, with as many sequences of a step in all."""
    mesh = ["--dp", "2", "--ep", "2"] if ranks == 4 else []
    out = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(ROOT / "examples" / "train_moe.py"), "--steps", str(steps), "--batch", str(SEQUENCES // ranks), *mesh,
         *more], cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip
    if out.returncode:
        raise SystemExit(f"{ranks} ranks failed:\n{out.stderr[-3000:]}")
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", out.stdout + out.stderr, re.MULTILINE)]


def curves(steps: int) -> dict[str, list[float]]:
    found = {"one device": plain(steps), "noise": plain(steps, backwards=True),
             "2 ranks": compiled(2, steps), "4 ranks": compiled(4, steps)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--checkpoint", folder, "--save-every", str(steps // 2)]
        first = compiled(2, steps // 2, *kept)
        found["resumed"] = first + compiled(4, steps, *kept, "--resume")
    return found | {"dense": plain(steps, dense=True)}


def ends(losses: list[float]) -> float:
    """The loss, in the mean of the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def apart(losses: list[float], eager: list[float]) -> tuple[float, float]:
    """How far two curves are from one another, each in means of ten steps: (in the median, at most)."""
    means = [[statistics.fmean(each[i : i + 10]) for i in range(0, len(eager), 10)] for each in (losses, eager)]
    far = [abs(ours - theirs) for ours, theirs in zip(*means)]
    return statistics.median(far), max(far)


def page(found: dict[str, list[float]]) -> str:
    eager = found["one device"]
    lines = [
        "# A real run", "", f"Written by `python benchmarks/real_run.py`: {len(eager)} steps, on CPU.", "",
        __doc__.split("\n\n", 2)[2].strip(), "",
        "| run | first loss | last tenth | first ten steps differ from one device's by | all, in means of ten steps: "
        "median | at most |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, losses in found.items():
        early = max(abs(ours - theirs) for ours, theirs in zip(losses[:10], eager[:10]))
        differ = [] if name in ("one device", "dense") else [early, *apart(losses, eager)]
        lines.append(" | ".join([f"| {name}", f"{losses[0]:.4f}", f"{ends(losses):.4f}",
                                 *(f"{each:.1e}" for each in differ), *[""] * (3 - len(differ))]) + " |")  # fmt: skip
    noise = apart(found["noise"], eager)
    agree = all(ours <= WITHIN * of_noise for name in ("2 ranks", "4 ranks", "resumed")
                for ours, of_noise in zip(apart(found[name], eager), noise))  # fmt: skip
    lines += ["", f"The three runs of moefx {'agree' if agree else 'do NOT agree'} with one device's: in the median "
              f"and at most, they are no further from it than {WITHIN} times as far as one device is from itself if it "
              "sees the sequences of each step in another order."]  # fmt: skip
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    found = curves(steps)
    assert all(len(losses) == steps for losses in found.values()), {name: len(each) for name, each in found.items()}
    print(page(found))
    if steps == 300:
        RESULTS.write_text(json.dumps(found), encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
