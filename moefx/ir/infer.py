"""Give a graph that was read from text the fake values that a traced one has.

Inputs get theirs from annotations: equal symbols are equal sizes, `u0` is a size known only from data. Every other node
is run on fakes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from moefx import _torch_compat as compat
from moefx.ir.read import Spec, evaluate, specs


def infer(gm: GraphModule, sizes: Mapping[str, int] | None = None, *, trained: frozenset[str] = frozenset()) -> Any:
    """Set meta["val"] of every node; returns the fake mode. sizes: example sizes of symbols, 4, 6, 8, .. by default.

    trained: the inputs that want a gradient. Raises VerifyError for an input that has no annotation, or no right one.
    """
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    found = specs(gm)
    symbols: dict[str, Any] = {}
    for spec in found.values():
        for name in re.findall(r"\b[su]\d+\b", " ".join(map(str, (*spec.shape, spec.size or "")))):
            if name not in symbols:
                hint = (sizes or {}).get(name, 4 + 2 * len(symbols))
                symbols[name] = compat.new_symbol(mode, name, None if name.startswith("u") else hint)
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"] = _fake(mode, found[node.name], symbols, node.name in trained)
    propagate(gm, mode)
    return mode


def _fake(mode: Any, spec: Spec, symbols: Mapping[str, Any], trained: bool) -> Any:
    if spec.dtype is None:
        return evaluate(spec.size, symbols)
    shape = tuple(evaluate(size, symbols) for size in spec.shape)
    with mode:
        fake = torch.empty(shape, dtype=spec.dtype, device=spec.device)
    return nn.Parameter(fake) if trained else fake


class _Propagate(torch.fx.Interpreter):
    """Recomputes every node's fake value; the values of inputs are given."""

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        node.meta.pop("example_value", None)
        node.meta["val"] = result
        return result


def propagate(gm: GraphModule, mode: Any) -> None:
    """Make meta["val"] true again, from that of the inputs."""
    inputs = [n.meta["val"] if "val" in n.meta else n.meta["example_value"]
              for n in gm.graph.find_nodes(op="placeholder")]
    with compat.faking(mode):
        _Propagate(gm, garbage_collect_values=False).run(*inputs, enable_io_processing=False)
