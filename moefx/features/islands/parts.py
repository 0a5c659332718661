"""Runs of ops as functions of their own, one for all that are equal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moefx.ir import edit
from moefx.ir.describe import Symbols
from moefx.ir.op import expr, value
from moefx.link.lower import place_on_device
from moefx.link.parts import Part

_CALL = re.compile(r"[A-Za-z]\w*\(")  # in a formula, as Mod(s0, 8)
_MADE_BY = "moefx.features.islands.runtime.compiled"


class Parts:
    """The islands of one graph. taken: names that none of them may have."""

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = taken
        self._numbers = itertools.count()
        self._known: dict[tuple, Part] = {}

    def of(self, given: Sequence[Node], ops: Sequence[Node], made: Sequence[Node],
           sizes: Mapping[str, float]) -> Part | None:  # fmt: skip
        """The function of these ops, with the values that it is given and makes; None where its inputs do not show all
        sizes that their strides depend on, or one is no plain formula. sizes: examples of symbols."""
        graph = _graph(given, ops, made)
        symbols = Symbols(graph)
        types = [_type(value(node), symbols) for node in given]
        shown = {size.node.expr for node in given for size in _sizes(value(node)) if isinstance(size, torch.SymInt)}
        if not all(_strides(value(node)) <= shown for node in given) or any(_CALL.search(each) for each in types):
            return None
        examples = {new: max(2, round(sizes[old])) for old, new in symbols.names.items()}
        device = value(made[0]).device.type
        key = *types, device, *sorted(examples.items()), *_form(graph)
        if key not in self._known:
            name = next(name for i in self._numbers if (name := f"island_{i}") not in self._taken)
            self._known[key] = Part(name, graph, _MADE_BY, tuple(types), examples, device)
        return self._known[key]


def _sizes(found: object) -> tuple:
    return tuple(found.shape) if isinstance(found, torch.Tensor) else (found,)


def _strides(found: object) -> set[sympy.Symbol]:
    """The symbols in strides that do not follow from sizes."""
    if not isinstance(found, torch.Tensor) or _lies_row_by_row(found):
        return set()
    return set().union(*(expr(stride).free_symbols for stride in found.stride()))


def _lies_row_by_row(tensor: torch.Tensor) -> bool:
    wanted = sympy.S.One
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if sympy.expand(expr(stride) - wanted) != 0:
            return False
        wanted *= expr(size)
    return True


def _type(found: object, symbols: Symbols) -> str:
    """float32[s0, 16], with its strides where it does not lie row by row; of a number, its formula."""
    if not isinstance(found, torch.Tensor):
        return symbols.expr(found)
    named = f"{str(found.dtype).removeprefix('torch.')}[{', '.join(map(symbols.expr, found.shape))}]"
    return named if _lies_row_by_row(found) else f"{named} by [{', '.join(map(symbols.expr, found.stride()))}]"


def _graph(given: Sequence[Node], ops: Sequence[Node], made: Sequence[Node]) -> Graph:
    """The ops as a graph of its own."""
    graph, values = Graph(), {}
    for node in given:
        values[node] = graph.placeholder(_name(node))
    for node in ops:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = graph.create_node(node.op, node.target, args, kwargs, name=_name(node))
        place_on_device(values[node])
    graph.output(tuple(values[node] for node in made))
    for old, new in values.items():
        new.meta = {key: each for key, each in old.meta.items() if key in ("val", "stack_trace")}
    return graph


def _form(graph: Graph) -> list[str]:
    """What it does, without names."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return [f"{node.target if node.op == 'call_function' else node.op} {map_arg((node.args, node.kwargs), numbers.get)}"
            for node in graph.nodes]  # fmt: skip


def _name(node: Node) -> str:
    """One that does not tell layers apart: model_layers_3_norm_weight, grad_r3_combine -> norm_weight, grad_combine."""
    name = re.sub(r"^.*_\d+_(?=[a-z])", "", edit.base_name(node.meta.get("named", node.name)))
    words = [word for word in name.split("_") if not re.search(r"\d", word)]
    return "_".join(filter(None, words)) or name
