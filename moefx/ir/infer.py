"""Give a graph that was read from text the fake values that a traced one has.

Inputs get theirs from annotations: equal symbols are equal sizes, `u0` is a size known only from data. Every other node
is run on fakes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.errors import VerifyError
from moefx.ir.edit import place
from moefx.ir.op import expr, value
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

    def __init__(self, gm: GraphModule, mode: Any) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode
        self.sizes: list[torch.fx.Node] = []  # of rows that other ranks send

    def run_node(self, node: torch.fx.Node) -> Any:
        known = compat.learned_sizes(self.mode)
        result = super().run_node(node)
        node.meta.pop("example_value", None)
        node.meta["val"] = result
        if isinstance(result, torch.SymInt) and getattr(node.target, "namespace", "") == "moefx":
            self.sizes.append(node)
        elif compat.learned_sizes(self.mode) > known:
            for size in self.sizes:
                self._check_is_open(size, node)
        return result

    def _check_is_open(self, size: torch.fx.Node, cause: torch.fx.Node) -> None:
        """torch believes an op that only fits one number of rows; other batches would have others."""
        found = expr(size.meta["val"])
        if not any(s.name.startswith("u") for s in found.free_symbols):
            raise VerifyError(
                f"{cause.name} takes {found} rows alone; how many there are ({size.name}) depends on data",
                where=place(cause),
                hint="use -1 for the number of an expert's rows, and dynamic=True",
            )


def propagate(gm: GraphModule, mode: Any) -> None:
    """Make meta["val"] true again, from that of the inputs.

    Raises VerifyError where an op leaves one number alone for rows whose number depends on data."""
    inputs = [n.meta["val"] if "val" in n.meta else n.meta["example_value"]
              for n in gm.graph.find_nodes(op="placeholder")]
    with compat.faking(mode):
        _Propagate(gm, mode).run(*inputs, enable_io_processing=False)


def update(node: torch.fx.Node, autocast: tuple = ()) -> None:
    """Make meta["val"] true again where it follows from that of `node`, as far as sizes change."""
    stale = set(node.users)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.faking(node.meta["val"].fake_mode))
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        for later in node.graph.nodes:
            if later not in stale or later.op == "output":
                continue
            before, args = value(later), map_arg((later.args, later.kwargs), value)
            found = getattr(args[0][0], later.target)(*args[0][1:], **args[1]) if later.op == "call_method" else (
                later.target(*args[0], **args[1]))  # fmt: skip
            later.meta.pop("example_value", None)
            later.meta["val"] = found
            if not _same(before, found):
                stale.update(later.users)


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return tuple(map(expr, before.shape)) == tuple(map(expr, after.shape))
