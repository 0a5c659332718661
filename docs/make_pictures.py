"""Draw the pictures of the documentation from a real model: python docs/make_pictures.py

One MoE layer of transformers' Mixtral: as it was captured and as each of four ranks runs it (the forward, before it is
differentiated); and its timeline on two ranks of this machine, predicted and measured.
"""

from __future__ import annotations

import copy
import operator
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moefx
from moefx.capture.trace import trace
from moefx.costmodel.calibrate import calibrate
from moefx.ir.draw import draw_before_after, is_drawn, kind_of
from moefx.options import Options
from moefx.pass_types import MeshSpec, PassContext
from moefx.pipeline import WHOLE, refresh
from moefx.trace_views import draw

IMAGES = Path(__file__).parent / "images"


def layer(width: int = 64, inner: int = 128) -> nn.Module:
    config = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    return MixtralSparseMoeBlock(config)


def graphs(model: nn.Module, *args: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(as captured, as placed on each of four ranks of expert parallelism)"""
    leaves, spec = pytree.tree_flatten((args, {}))
    captured = trace(model, model, leaves, spec, torch.device("cpu"))
    before = copy.deepcopy(captured.gm)
    ctx = PassContext(MeshSpec({"ep": 4}, "ep"), Options(), captured.fake_mode)
    for entry in WHOLE:
        if entry.run(captured.gm, ctx).changes:
            refresh(captured.gm, ctx)
    return before, captured.gm


def is_interesting(node: fx.Node) -> bool:
    """What is drawn by default, without values that nobody reads any more."""
    return is_drawn(node) and (bool(node.users) or node.op != "call_function" or is_write(node))


def is_write(node: fx.Node) -> bool:
    return node.target is operator.setitem


def kind(node: fx.Node) -> str:
    source = node.meta.get("moefx") if node.op == "placeholder" else None
    return "parameter" if source is not None and source.kind in ("param", "experts", "stack") else kind_of(node)


def timeline_of(rank: int, world: int, folder: str) -> None:
    """Body of one rank: ten steps of a layer in two chunks, wide tokens and narrow experts, so that there is something
    to hide."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    options = Options(machine=calibrate(quick=True), chunks=2, scheduler="optsche")
    compiled = moefx.compile(layer(512, 128), init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), options)
    x = torch.randn(4, 512, 512, requires_grad=True)
    compiled(x).square().mean().backward()
    with moefx.profile(compiled) as profile:
        for _ in range(10):
            compiled(x).square().mean().backward()
    found = profile.gather()
    if rank == 0:
        title = f"A Mixtral MoE layer in 2 chunks by OptSche, {world} ranks, gloo: predicted and measured"
        draw(found, IMAGES / "timeline.svg", title=title)
        print(found.hidden_share())
    compiled.close()
    dist.destroy_process_group()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    before, after = graphs(layer(), torch.randn(2, 16, 64))
    title = "A Mixtral MoE layer: captured, and as each of four ranks runs it"
    draw_before_after(before, after, IMAGES / "layer.svg", title=title, keep=is_interesting, kind=kind)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(timeline_of, (2, folder), nprocs=2)


if __name__ == "__main__":
    main()
