"""Run a part of a graph on real tensors: the numeric half of every raise.

A part is given by its outputs and by the values of nodes where evaluation stops. Sizes that depend only on the inputs'
symbols, or on those of the values given, are taken from given symbol values, so no input of the model is needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate, map_arg

from moefx.ir import edit
from moefx.ir.expert_weights import is_weight
from moefx.ir.mark import Mark
from moefx.ir.op import expr, run, value
from moefx.ir.writes import users_of_memory


class Evaluator:
    """Evaluates nodes of one graph on demand. `symbols`: {sympy symbol: int}; `known`: values that are given."""

    def __init__(self, symbols: dict[sympy.Symbol, int], known: dict[Node, Any]) -> None:
        self.symbols = symbols
        self.values = dict(known)

    def run(self, outputs: Iterable[Node]) -> list[Any]:
        """Values of `outputs`, in-place effects of earlier nodes on what is evaluated included."""
        outputs = list(outputs)
        needed = self._needed(outputs)
        graph = outputs[0].graph
        for node, given in self.values.items():  # that are still to be written to: others may read them, too
            if isinstance(given, torch.Tensor) and any(user in needed for user in _writers(node)):
                self.values[node] = given.clone()
        with torch.enable_grad():
            for node in graph.nodes:
                if node in needed and node not in self.values:
                    self.values[node] = self._evaluate(node)
        return [self.values[o] for o in outputs]

    def size(self, size: Any) -> int:
        """A concrete size for an int or SymInt."""
        return size if type(size) is int else _with(expr(size), tuple(self.symbols.items()))

    def _needed(self, outputs: list[Node]) -> set[Node]:
        needed: set[Node] = set()
        stack = [*outputs, *(write for node in outputs for write in _writes_to(node))]
        while stack:
            node = stack.pop()
            if node in needed or node in self.values:
                continue
            needed.add(node)
            if not self._is_given_size(node):
                stack.extend(_dependencies(node))
        return needed

    def _is_given_size(self, node: Node) -> bool:
        return is_of_symbols(node) or _is_of_outside(node, self.symbols.keys(), self.values)

    def _evaluate(self, node: Node) -> Any:
        if self._is_given_size(node):
            return self.size(value(node))
        if node.op == "placeholder":
            raise KeyError(node.name)
        if node.op == "get_attr":
            return getattr(node.graph.owning_module, node.target)
        assert node.op.startswith("call"), f"cannot evaluate {node.op} {node.name}"
        return run_here(node, self.values)


@functools.lru_cache(1024)
def _with(size: sympy.Expr, symbols: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(size.subs(dict(symbols)))


def run_here(node: Node, values: Mapping[Node, Any]) -> Any:
    """What a node calls, called on the CPU with the values of its inputs."""
    given = map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = map_aggregate(given, _here)
    try:
        return run(node, args, kwargs)
    except NotImplementedError:  # as histc of integers: a model on a GPU may use what the CPU has no kernel for
        found = run(node, *map_aggregate((args, kwargs), _in_double))
        return found.to(value(node).dtype)


def held(node: Node) -> torch.Tensor | None:
    """What an input always is."""
    source = node.meta.get("moefx")
    return source.key if getattr(source, "kind", None) == "constant" else node.meta.get("held")


def _here(argument: Any) -> Any:
    """All is evaluated on the CPU, also what a model makes on its GPU."""
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _in_double(argument: Any) -> Any:
    return argument.double() if isinstance(argument, torch.Tensor) else argument


def _dependencies(node: Node) -> list[Node]:
    """Inputs of a node, and the writes to it."""
    return [*node.all_input_nodes, *_writes_to(node)]


def _writes_to(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.setitem and user.args[0] is node]


def _writers(node: Node) -> list[Node]:
    return [user for user, is_write in users_of_memory(node).items() if is_write]


def boundary(outputs: Iterable[Node], stop: Iterable[Node]) -> tuple[list[Node], set[Node]]:
    """The placeholders and stop nodes that `outputs` depend on, in graph order, and what stands between them."""
    stop, outputs = set(stop), list(outputs)
    given = _symbols_of(stop)
    seen: set[Node] = set()
    found: set[Node] = set()
    stack = [*outputs, *(write for node in outputs for write in _writes_to(node))]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stop or node.op == "placeholder":
            found.add(node)
        elif not _is_of_outside(node, given, stop):
            stack.extend(_dependencies(node))
    return [n for n in next(iter(seen)).graph.nodes if n in found], seen - found


def part_of(mark: Mark, end: Node, stop: Collection[Node]) -> dict[Node, Node]:
    """What `end` was computed of when the graph was marked, writes to it included, as a graph of its own: {node: its
    copy}. Copies of `stop`, of the model's inputs and of numbers that are known without it are inputs there."""
    given, leaves = _symbols_of(stop), set(stop)

    def before(node: Node) -> list[Node]:
        if node in leaves or node.op == "placeholder" or is_of_symbols(node) or (
                _is_of_outside(node, given, stop, mark.inputs)):  # fmt: skip
            leaves.add(node)
            return []
        return [*mark.inputs(node), *mark.writes(node)]

    found = edit.closure([end, *mark.writes(end)], before) | leaves
    graph, copies = Graph(mark.gm), {}
    for node in mark.nodes:
        if node in leaves:
            copies[node] = graph.placeholder(node.name)
        elif node in found:
            op, target, *arguments = mark.nodes[node]
            copies[node] = graph.create_node(op, target, *map_arg(tuple(arguments), copies.__getitem__), node.name)
        if node in copies:
            copies[node].meta = {**node.meta, "val": mark.values[node]}
    return copies


def _symbols_of(nodes: Iterable[Node]) -> set[sympy.Symbol]:
    """The symbols of their sizes."""
    return {each for node in nodes for size in getattr(value(node), "shape", ()) for each in expr(size).free_symbols}


def is_of_symbols(node: Node) -> bool:
    """Whether a number depends on nothing but the sizes of the model's inputs."""
    found = value(node)
    return isinstance(found, torch.SymInt) and not free_unbacked_symbols(found)


def _is_of_outside(node: Node, symbols: Collection[sympy.Symbol], inside: Collection[Node],
                   inputs: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes) -> bool:  # fmt: skip
    """Whether a number that depends on data is known with these symbols, and is computed of other inputs of the model
    than the values `inside`: as that of tokens which were picked before."""
    found = value(node)
    if not isinstance(found, torch.SymInt) or is_of_symbols(node) or not expr(found).free_symbols <= set(symbols):
        return False
    sources = edit.closure([node], lambda each: () if each in inside or is_of_symbols(each) else inputs(each))
    return any(each.op == "placeholder" and each not in inside and not is_weight(each) for each in sources)
