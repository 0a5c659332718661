"""Give a graph that was read from text the fake values that a traced one has.

Inputs get theirs from annotations: equal symbols are equal sizes, `u0` is a size known only from data. Every other node
is run on fakes.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import place
from moefx.ir.fakes import Results, run_each
from moefx.ir.names import called
from moefx.ir.op import expr, run, value
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


@dataclass
class _Run:
    """What a node was computed from, and its result."""

    target: Any
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[Any]
    result: Any

    @staticmethod
    def of(node: Node, inputs: list[Any]) -> _Run:
        return _Run(node.target, node.args, node.kwargs, inputs, value(node))

    def stands(self, node: Node, inputs: list[Any]) -> bool:
        """Whether another run would give the same."""
        return (
            value(node) is self.result and node.target == self.target
            and _unchanged(self.args, node.args) and _unchanged(self.kwargs, node.kwargs)
            and all(map(_alike, inputs, self.inputs))
        )  # fmt: skip


class Values:
    """How the fake values of a graph's nodes came about, so that after a pass those alone are computed anew that
    follow from what it changed."""

    def __init__(self) -> None:
        self._runs: dict[Node, _Run] = {}
        self.results = Results()

    def learn(self, gm: GraphModule, *, copied: bool = False) -> None:
        """What a graph holds is true; whether ops take sizes that depend on data is left to a run of them, unless nodes
        are copies of such as ran."""
        for node in gm.graph.nodes:
            inputs = [value(each) for each in node.all_input_nodes]
            if _is_plain(node, inputs) and (copied or not any(map(free_unbacked_symbols, inputs))):
                self._runs[node] = _Run.of(node, inputs)

    def note(self, node: Node, inputs: list[Any]) -> None:
        if _is_plain(node, inputs):
            self._runs[node] = _Run.of(node, inputs)

    def stand(self, node: Node, inputs: list[Any]) -> bool:
        run = self._runs.get(node)
        return run is not None and run.stands(node, inputs)


def _is_plain(node: Node, inputs: list[Any]) -> bool:
    """Whether all that a node does is to make tensors and numbers of tensors and numbers."""
    result = value(node)
    results = result if isinstance(result, (tuple, list)) else [result]
    if result is None:
        results = [] if node.target is operator.setitem else [None]
    return node.op in ("call_function", "call_method") and all(
        isinstance(v, (torch.Tensor, torch.SymInt, int)) for v in (*inputs, *results)
    )


class _Propagate(torch.fx.Interpreter):
    """Recomputes the nodes' fake values; the values of inputs are given."""

    def __init__(self, gm: GraphModule, mode: Any, values: Values) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode, self.values = mode, values
        self.sizes: list[Node] = []  # of rows that other ranks send
        self.run_each = run_each(gm.graph)

    def run_node(self, node: Node) -> Any:
        inputs = [self.env[n] for n in node.all_input_nodes]
        known = compat.learned_sizes(self.mode)
        result = value(node) if self.values.stand(node, inputs) else self._found(node, inputs)
        node.meta.pop("example_value", None)
        node.meta["val"] = result
        self.values.note(node, inputs)
        if isinstance(result, torch.SymInt) and getattr(node.target, "namespace", "") == "moefx":
            self.sizes.append(node)
        elif compat.learned_sizes(self.mode) > known:
            for size in self.sizes:
                self._check_is_open(size, node)
        return result

    def _found(self, node: Node, inputs: list[Any]) -> Any:
        word = self.values.results.of(node, inputs, self.mode) if node not in self.run_each else None
        result = word.result(value(node)) if word is not None else None
        if result is None:
            result = self._run(node)
            if word is not None:
                word.note(result)
        return result

    def _run(self, node: Node) -> Any:
        try:
            return super().run_node(node)
        except RuntimeError as error:
            if not compat.is_data_dependent(error):
                raise
            raise UnsupportedUse(f"{called(node)} asks how many rows there are, which depends on data",
                                 where=place(node), hint="write the line with other ops of torch",
                                 ) from error  # fmt: skip

    def _check_is_open(self, size: Node, cause: Node) -> None:
        """torch believes an op that only fits one number of rows; other batches would have others."""
        found = expr(size.meta["val"])
        if not any(s.name.startswith("u") for s in found.free_symbols):
            raise VerifyError(
                f"{cause.name} takes {found} rows alone; how many there are ({size.name}) depends on data",
                where=place(cause),
                hint="use -1 for the number of an expert's rows, and dynamic=True",
            )


def propagate(gm: GraphModule, mode: Any, values: Values | None = None) -> None:
    """Make meta["val"] true again, from that of the inputs; with `values`, where something changed since.

    Raises VerifyError where an op leaves one number alone for rows whose number depends on data."""
    inputs = [value(n) for n in gm.graph.find_nodes(op="placeholder")]
    with compat.faking(mode):
        _Propagate(gm, mode, values or Values()).run(*inputs, enable_io_processing=False)


def update(node: Node, autocast: tuple = ()) -> None:
    """Make meta["val"] true again where it follows from that of `node`, as far as sizes change."""
    stale = set(node.users)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.faking(value(node).fake_mode))
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        for later in node.graph.nodes:
            if later not in stale or later.op == "output":
                continue
            before, found = value(later), run(later, *map_arg((later.args, later.kwargs), value))
            later.meta.pop("example_value", None)
            later.meta["val"] = found
            if not _same(before, found):
                stale.update(later.users)


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return tuple(map(expr, before.shape)) == tuple(map(expr, after.shape))


def _unchanged(before: Any, after: Any) -> bool:
    """Of arguments; edits of a node replace them. 1 equals 1.0 and True, but is written otherwise."""
    return before is after or (before == after and repr(before) == repr(after))


def _alike(before: Any, after: Any) -> bool:
    """Whether ops do the same with both fake values."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if not isinstance(before, torch.Tensor):
        return expr(before) == expr(after)
    return (
        (before.dtype, before.device, before.requires_grad) == (after.dtype, after.device, after.requires_grad)
        and _same(before, after)
        and tuple(map(expr, before.stride())) == tuple(map(expr, after.stride()))
        and expr(before.storage_offset()) == expr(after.storage_offset())
    )
