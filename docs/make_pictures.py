"""Draw the pictures of the documentation from a real model: python docs/make_pictures.py

One MoE layer of transformers' Mixtral: as it was captured and as each of four ranks runs it (the forward, before it is
differentiated); the step times of benchmarks/results/peers.md; the losses of benchmarks/real_run.py; a step of
benchmarks/whole_blocks.py, predicted and measured; a report of a small Mixtral on two ranks of this machine, predicted
and measured; and a plan. Needs a chromium, and pip install -e '.[pictures]'
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draw import is_drawn, kind_of, svg_before_after
from playwright.sync_api import sync_playwright
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moefx
from moefx.axes import MeshSpec
from moefx.capture.trace import trace
from moefx.compiler.pipeline import refresh, whole
from moefx.context.pass_types import PassContext
from moefx.costmodel.calibrate import calibrate
from moefx.ir.text import op_name
from moefx.options import Options
from moefx.report import charts
from moefx.report.traces import Trace

IMAGES = Path(__file__).parent / "images"


def layer(width: int = 64, inner: int = 128) -> nn.Module:
    config = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():  # the block alone leaves them undefined
        nn.init.normal_(parameter, std=0.02)
    return block


def graphs(model: nn.Module, *args: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(as captured, as placed on each of four ranks of expert parallelism)"""
    leaves, spec = pytree.tree_flatten((args, {}))
    captured = trace(model, model, leaves, spec, torch.device("cpu"))
    before = copy.deepcopy(captured.gm)
    ctx = PassContext(MeshSpec.named({"ep": 4}), Options(), captured.fake_mode)
    for entry in whole():
        if entry.run(captured.gm, ctx).changes:
            refresh(captured.gm, ctx)
    return before, captured.gm


# What a first look needs: the router, the rows' way to the experts and back.
_SHOWN = re.compile(r"linear|topk|dispatch|exchange_counts|all_to_all|grouped_linear|grouped_mm\w*|combine")


def is_shown(node: fx.Node) -> bool:
    """A dozen boxes of the layer: its input, the ops named above, and what it returns."""
    if node.op == "placeholder":
        return kind(node) == "input" and node.name.startswith("hidden")
    return bool(_SHOWN.fullmatch(op_name(node))) or is_result(node)


def is_result(node: fx.Node) -> bool:
    """The last computation: its readers are the output, and views and sizes that lead nowhere else."""

    def ends(user: fx.Node) -> bool:
        return user.op == "output" or (not is_drawn(user) and all(map(ends, user.users)))

    return is_drawn(node) and bool(node.users) and all(map(ends, node.users))


def kind(node: fx.Node) -> str:
    source = node.meta.get("moefx") if node.op == "placeholder" else None
    return "parameter" if source is not None and source.kind in ("param", "experts", "stack") else kind_of(node)


def compare_with_peers(measured: Path, image: Path) -> None:
    """The step times that benchmarks/peers.py measured, as bars: of the blocking layer's step, with quartiles."""
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "moefx"}
    with plt.rc_context(style):
        _, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        for ax, (title, rows) in zip(axes, ratios(measured.read_text()).items()):
            rows = sorted(rows, key=lambda row: -row[1])
            names, middles = [row[0] for row in rows], [row[1] for row in rows]
            spread = [[mid - low for _, mid, low, _ in rows], [high - mid for _, mid, _, high in rows]]
            colors = ["#c65f12" if name.startswith("moefx") else "#b9c3cf" for name in names]
            ax.barh(names, middles, xerr=spread, color=colors, ecolor="#444444", capsize=2)
            ax.axvline(1, color="#858585", linewidth=0.8, linestyle=":")
            ax.set_title(title, loc="left", fontweight="bold")
            ax.set_xlabel("time of a step / blocking layer")
        plt.savefig(image, metadata={"Date": None})


def compare_curves(measured: Path, image: Path) -> None:
    """The losses of benchmarks/real_run.py, and how far those of several ranks are from one device's."""
    losses = {name: torch.tensor(each) for name, each in json.loads(measured.read_text(encoding="utf-8")).items()}
    smooth = {name: each.unfold(0, 10, 1).mean(1) for name, each in losses.items()}
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "moefx"}
    eager, noise = smooth.pop("one device"), smooth.pop("noise")
    with plt.rc_context(style):
        _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        steps = range(10, 10 + len(eager))
        left.plot(steps, smooth.pop("dense"), color="#858585", label="dense, one device")
        left.plot(steps, eager, color="#1f2328", linewidth=3, alpha=0.35, label="MoE, one device, eager")
        right.semilogy(steps, (noise - eager).abs().clamp(min=1e-7), color="#1f2328", linewidth=3, alpha=0.35,
                       label="one device, other order of sums")  # fmt: skip
        for (name, each), color, dash in zip(smooth.items(), ("#c65f12", "#2f6fab", "#3a8f4d"), ("-", "--", ":")):
            left.plot(steps, each, color=color, linestyle=dash, linewidth=1.2, label=f"MoE, moefx: {name}")
            right.semilogy(steps, (each - eager).abs().clamp(min=1e-7), color=color, linestyle=dash, linewidth=1.2,
                           label=name)  # fmt: skip
        left.set(xlabel="step", ylabel="loss, mean of ten steps")
        right.set(xlabel="step", ylabel="difference from one device's loss")
        for ax in (left, right):
            ax.legend(frameon=False)
        plt.savefig(image, metadata={"Date": None})
    plt.close()


def compare_timelines(measured: Path, image: Path, graph: str = "backward") -> None:
    """The trace of benchmarks/whole_blocks.py --timeline: a step as predicted, and below it as measured."""
    trace = Trace.load(measured)
    figure = charts.timeline(trace, graph)
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "moefx"}
    names = list(dict.fromkeys(bars["yaxis"] for bars in figure["data"]))
    with plt.rc_context(style):
        drawn, several = plt.subplots(len(names), 1, figsize=(10, 4.2), sharex=True, layout="constrained")
        for name, ax, process in zip(names, several, (trace.predicted, *trace.measured)):
            rows = figure["layout"][name.replace("y", "yaxis")]["categoryarray"]
            for bars in figure["data"]:
                if bars["yaxis"] == name:
                    said = bars["name"] if bars["showlegend"] else None
                    ax.barh([rows.index(row) for row in bars["y"]], bars["x"], left=bars["base"], height=0.8,
                            color=bars["marker"]["color"], label=said)  # fmt: skip
            said = process.name if process.rank is None else f"measured, {process.name}"
            ax.set_title(said, loc="left", fontweight="bold")
            ax.set_yticks(range(len(rows)), rows)
            ax.invert_yaxis()
        several[-1].set_xlabel(f"ms of the {graph}")
        drawn.suptitle(trace.about["title"], x=0.01, ha="left", fontsize=9)
        drawn.legend(loc="outside right upper", frameon=False)
        plt.savefig(image, metadata={"Date": None})
    plt.close()


def ratios(text: str) -> dict[str, list[tuple[str, float, float, float]]]:
    """{heading: [(system, median, quartiles)]} of the tables in benchmarks/results/peers.md; of moefx without chunks,
    with four by OptSche, and as planned."""
    shown = {"simple": "blocking layer", "moefx": "moefx, no chunks", "moefx 4 chunks, optsche": "moefx, 4 chunks",
             "moefx, planned": "moefx, planned"}  # fmt: skip
    found: dict[str, list[tuple[str, float, float, float]]] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (.+?) \| [^|]+ \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|", section, flags=re.MULTILINE)
        kept = [(shown.get(name, name), *map(float, numbers)) for name, *numbers in rows
                if name in shown or (not name.startswith("moefx") and not name.endswith("alone"))]  # fmt: skip
        if kept:
            found[section.splitlines()[0]] = kept
    return found


def run_of(rank: int, world: int, folder: str) -> None:
    """Body of one rank: ten steps of a model of two layers in two chunks, wide tokens and narrow experts, so that there
    is something to hide."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    options = Options(machine=calibrate(quick=True), chunks=2, scheduler="optsche")
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=256, hidden_size=512, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=8, num_key_value_heads=4, num_local_experts=8)  # fmt: skip
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    compiled = moefx.compile(MixtralForCausalLM(config), mesh, options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    tokens = torch.randint(256, (4, 256), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with moefx.profile(compiled) as profile:
        for _ in range(10):
            step()
    if rank == 0:
        compiled.report(f"{folder}/run.html", optimizer)
        print(profile.compare())
    compiled.close()
    dist.destroy_process_group()


def planned(page: Path) -> None:
    """The page of the plan that docs/plan.md begins with."""
    config = os.path.relpath(IMAGES.parents[1] / "examples" / "configs" / "qwen3-235b-a22b.json")
    options = Options().changed(shard_dense=True)
    moefx.plan(config, "h100-8x400g", 2048, ep=64, memory_limit=80e9, options=options).draw(page)


def shots(run: Path, plan: Path) -> None:
    """The tops of a report and of a plan; of the report also the timeline and the memory."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 900, "height": 780}, color_scheme="light")
        shown.set_default_timeout(300_000)
        for page, name in ((plan, "plan"), (run, "report")):
            shown.goto(page.as_uri())
            shown.wait_for_selector(".chart .main-svg")
            shown.screenshot(path=IMAGES / f"{name}.png")
        for heading, name in (("Timeline of a step", "timeline"), ("Memory over a step", "memory")):
            section = shown.locator("section", has=shown.get_by_role("heading", name=heading))
            section.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    before, after = graphs(layer(), torch.randn(2, 16, 64))
    title = "A Mixtral MoE layer: captured, and as each of four ranks runs it"
    picture = svg_before_after(before, after, title=title, keep=is_shown, kind=kind)
    (IMAGES / "layer.svg").write_text(picture, encoding="utf-8")
    compare_with_peers(IMAGES.parents[1] / "benchmarks/results/peers.md", IMAGES / "peers.svg")
    compare_curves(IMAGES.parents[1] / "benchmarks/results/real_run.json", IMAGES / "real_run.svg")
    compare_timelines(IMAGES.parents[1] / "benchmarks/results/whole_blocks_timeline.json", IMAGES / "whole_blocks.svg")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_of, (2, folder), nprocs=2)
        planned(Path(folder) / "plan.html")
        shots(Path(folder) / "run.html", Path(folder) / "plan.html")


if __name__ == "__main__":
    main()
