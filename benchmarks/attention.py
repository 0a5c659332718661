"""Masks of attention that become an argument of the kernel: which models have them, and what a step gains on the CPU.

    python benchmarks/attention.py                        both; writes results/attention.md
    python benchmarks/attention.py --rounds 0 mixtral     a family; prints
    python benchmarks/attention.py --no-families          the step alone; prints

Families are those of coverage.py, tiny, captured as they train, with the attention that transformers gives them. The
step is forward and backward of one layer of Qwen3-MoE (hidden 1024, 16 heads of 128 with 2 of keys, 8 experts of 768,
2 per token), head and loss included, in single precision, compiled for one rank: without the two passes, with the mask
alone dropped (ask-kernels), and with keys in groups too (group-keys); beside it transformers' own, by `grouped_mm`. All
have the same weights and batch, and take turns. A ratio is of two steps of one round.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from interleave import Spread, measure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import moefx  # noqa: E402
from moefx.axes import MeshSpec  # noqa: E402
from moefx.capture.trace import trace  # noqa: E402
from moefx.compiler import pipeline  # noqa: E402
from moefx.context.pass_types import PassContext  # noqa: E402
from moefx.errors import MoefxError  # noqa: E402
from moefx.ir.names import arg, op_name  # noqa: E402
from moefx.passes import ask_kernels, canonicalize  # noqa: E402
from tests.support.families import case_of, families  # noqa: E402
from tests.support.models import Case  # noqa: E402
from tests.support.ranks import fake_world  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "attention.md"
CONTESTANTS = {"as captured": ("ask-kernels", "group-keys"), "no mask": ("group-keys",), "no mask, grouped keys": ()}


def family_row(family: str) -> str:
    """What the layers of a family ask of attention, and why not."""
    case = case_of(family)
    batch, model = case.batch(0), case.build()
    leaves, spec = tree_flatten(((), batch))
    try:
        captured = trace(model, model, leaves, spec, torch.device("cpu"))
    except MoefxError:  # loops over the experts that were hit must be written anew first
        return _compiled_row(family, case)
    gm, ctx = captured.gm, PassContext(MeshSpec.named({"ep": 1}, None), moefx.Options(), captured.fake_mode)
    canonicalize.run(gm, ctx)
    reasons = [reason for _, reason in ask_kernels.run(gm, ctx).skipped]
    calls = [node for node in gm.graph.nodes if op_name(node) == "scaled_dot_product_attention"]
    return _row(family, sum(bool(arg(node, 5, "is_causal", False)) for node in calls), len(calls), reasons)


def _compiled_row(family: str, case: Case) -> str:
    """The same of a whole program."""
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build(), mesh)) as compiled:
            compiled.prepare(**case.batch(0))
            step = moefx.inspect(compiled).step("ask-kernels")
    text = step.texts["graph"]
    return _row(family, text.count("is_causal=True"), text.count("scaled_dot_product_attention("),
                [reason for _, reason in step.skipped])  # fmt: skip


def _row(family: str, causal: int, calls: int, reasons: list[str]) -> str:
    short = dict.fromkeys(re.sub(r"layers_\d+", "layers_*", reason) for reason in reasons)
    return f"| {family} | {f'{causal} of {calls}' if calls else 'no such call'} | {'; '.join(short)} |"


def model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=2, head_dim=128,
        moe_intermediate_size=768, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, vocab_size=1024,
        use_cache=False, attn_implementation="sdpa", experts_implementation="grouped_mm",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


@contextmanager
def without(names: tuple[str, ...]) -> Iterator[None]:
    """A pipeline that lacks these passes."""
    with mock.patch.object(pipeline, "WHOLE", tuple(each for each in pipeline.WHOLE if each.name not in names)):
        yield


def loss_of(contestant: nn.Module, tokens: torch.Tensor) -> float:
    """After a step."""
    for parameter in contestant.parameters():
        parameter.grad = None
    loss = contestant(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def step_rows(batch: int, length: int, rounds: int) -> list[str]:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    tokens = torch.randint(0, 1024, (batch, length), generator=torch.Generator().manual_seed(0))
    models: dict[str, nn.Module] = {"transformers": model()}
    with ExitStack() as stack:
        for name, passes in CONTESTANTS.items():
            models[name] = stack.enter_context(closing(moefx.compile(model(), mesh)))
            with without(passes):
                models[name].prepare(input_ids=tokens, labels=tokens)
        losses = {name: loss_of(each, tokens) for name, each in models.items()}
        times = measure({name: partial(loss_of, each, tokens) for name, each in models.items()}, rounds, warm_up=0)
    dist.destroy_process_group()
    rows = []
    for name, found in times.items():
        ratios = Spread.of([a / b for a, b in zip(found, times["as captured"])])
        rows.append(f"| {name} | {statistics.median(found):.2f} | {ratios.text()} | {losses[name]:.6f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--rounds", type=int, default=15, help="of the step; 0: none")
    parser.add_argument("--no-families", action="store_true")
    parser.add_argument("--shape", type=int, nargs=2, default=(2, 1024), metavar=("BATCH", "LENGTH"))
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = ["# Attention without a mask", "", *__doc__.strip().splitlines(), "",
             f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} thread, "
             f"at {commit.stdout.strip()}."]  # fmt: skip
    if arguments.rounds:
        batch, length = arguments.shape
        lines += ["", f"{batch} x {length} tokens, {arguments.rounds} rounds: medians; in brackets quartiles.", "",
                  "| contestant | seconds | by as captured | loss |", "|---|---|---|---|",
                  *step_rows(batch, length, arguments.rounds)]  # fmt: skip
        print("\n".join(lines), flush=True)
    if not arguments.no_families:
        lines += ["", "Causal: how many calls of `scaled_dot_product_attention` in a captured model ask for "
                  "`is_causal`; `eager` attention, of models that have no other, calls none. A window has 4 keys in "
                  "these tiny models.", "",
                  "| family | causal | why not the others |", "|---|---|---|"]  # fmt: skip
        for family in arguments.families or families():
            lines.append(family_row(family))
            print(lines[-1], flush=True)
    if not arguments.families and not arguments.no_families and arguments.rounds:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
