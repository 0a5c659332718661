"""Draw the pictures of the README from a real model: python docs/make_pictures.py

One MoE layer of transformers' Mixtral, as it was captured and as each of four ranks runs it (the forward, before it is
differentiated).
"""

from __future__ import annotations

import copy
import operator
from pathlib import Path

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moefx.capture.trace import trace
from moefx.ir.draw import draw_before_after, is_drawn, kind_of
from moefx.options import Options
from moefx.pass_types import MeshSpec, PassContext
from moefx.pipeline import WHOLE, refresh

IMAGES = Path(__file__).parent / "images"


def layer() -> nn.Module:
    config = MixtralConfig(hidden_size=64, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    return MixtralSparseMoeBlock(config)


def graphs(model: nn.Module, *args: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(as captured, as placed on each of four ranks of expert parallelism)"""
    leaves, spec = pytree.tree_flatten((args, {}))
    captured = trace(model, leaves, spec)
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


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    before, after = graphs(layer(), torch.randn(2, 16, 64))
    title = "A Mixtral MoE layer: captured, and as each of four ranks runs it"
    draw_before_after(before, after, IMAGES / "layer.svg", title=title, keep=is_interesting, kind=kind)


if __name__ == "__main__":
    main()
