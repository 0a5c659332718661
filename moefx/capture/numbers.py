"""Numbers of Python that decide sizes: a capacity factor, say, that is another one in every step.

Dynamo takes what a forward reads from attributes and arguments for constants, so that every value would need a program
of its own. Where such a number only decides sizes, it is an input: the arithmetic of Python between it and the sizes
runs before the program in every call, and what comes of it enters the program as one integer per size, of which
nothing is known when it is compiled.

    capacity = max(1, int(self.factor * tokens / E)); y = zeros(capacity)
        ->  before the program: c = max(1, int(factor * tokens / E));  in it: y = zeros(c.item())
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from moefx import _torch_compat as compat
from moefx.capture.inputs import is_asked, sizes_of
from moefx.capture.python_state import plain_path
from moefx.ir import edit
from moefx.ir.infer import update
from moefx.ir.names import op_name
from moefx.ir.op import expr, value

Key = str | int  # of a number: the expression that it is read by, or the index of the flattened argument
_ROUNDED = ("ToFloat", "TruncToInt", "FloatTrueDiv", "IntTrueDiv", "CeilToInt", "FloorToInt", "RoundToInt")
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_SCALARS = (bool, int, float, torch.SymBool, *_SYMBOLIC)


@dataclass(frozen=True)
class Numbers:
    """What is computed of numbers before every call. keys: which numbers are inputs, and of which type they are.

    read: gives the number at a path. prologue: (numbers, sizes) -> what enters the program. sizes: expressions of the
    symbols of arguments. guards: (condition, symbols of the numbers in it) that must hold.
    """

    keys: Mapping[Key, type] = field(default_factory=dict)
    read: Callable[[str], Any] | None = None
    prologue: Callable[..., tuple] | None = None
    shapes: tuple = ()
    sizes: tuple[sympy.Expr, ...] = ()
    guards: tuple[sympy.Expr, ...] = ()
    symbols: Mapping[Key, sympy.Symbol] = field(default_factory=dict)
    _known: dict[tuple, tuple] = field(default_factory=dict)  # sizes of arguments -> values of `sizes`, whole or not

    def now(self, leaves: Sequence[Any]) -> dict[Key, Any]:
        return {key: leaves[key] if isinstance(key, int) else self.read(key) for key in self.keys}

    def complaint(self, leaves: Sequence[Any]) -> str | None:
        """None if the numbers of a call are such as the program was captured for; else what does not fit."""
        now = self.now(leaves)
        for key, kind in self.keys.items():
            if type(now[key]) is not kind or not abs(now[key]) < float("inf"):
                return f"{key} is {now[key]!r}, no {kind.__name__}"
        if not self.guards:
            return None
        values = self._symbols(sizes_of(leaves)) | {self.symbols[key]: sympy.sympify(now[key]) for key in self.keys}
        broken = next((guard for guard in self.guards if guard.subs(values) == sympy.false), None)
        return None if broken is None else f"the numbers break {broken}"

    def inputs(self, leaves: Sequence[Any]) -> list[Tensor]:
        """What the program takes behind the arguments of a call."""
        return [torch.tensor(number) for number in self.values(leaves, sizes_of(leaves))]

    def values(self, leaves: Sequence[Any], sizes: tuple) -> list[int]:
        if self.prologue is None:
            return []
        if sizes not in self._known:
            symbols = self._symbols(sizes)
            found = [size.subs(symbols) for size in self.sizes]
            self._known[sizes] = tuple(int(each) if each.is_Integer else float(each) for each in found)
        return list(self.prologue(*self.now(leaves).values(), *self._known[sizes]))

    def _symbols(self, sizes: tuple) -> dict[sympy.Symbol, int]:
        pairs = [pair for mine, given in zip(self.shapes, sizes) if mine is not None for pair in zip(mine, given)]
        return {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}


class Reads:
    """Which expressions of dynamo's read numbers that are to be inputs of a capture of `model`."""

    def __init__(self, free: frozenset[Key], model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.free = free
        leaves, tree = pytree.tree_flatten((args, kwargs))
        args, kwargs = pytree.tree_unflatten([_Place(i) for i in range(len(leaves))], tree)
        try:
            self.local = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            self.local = {}

    def is_free(self, path: str) -> bool:
        return bool(self.free) and self._key(path) in self.free

    def _key(self, path: str) -> Key:
        try:
            found = eval(path, {"L": self.local, "__builtins__": {}})  # an expression of names and constants
        except Exception:  # not of the arguments
            found = None
        return found.index if isinstance(found, _Place) else plain_path(path)

    def places(self, gm: GraphModule, mode: Any) -> dict[int, Key]:
        """Among the placeholders of a capture: which number each is."""
        found, paths = {}, compat.sources_of_numbers(mode.shape_env) if self.free else {}
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder") if self.free else ()):
            items = [node] if isinstance(value(node), torch.SymInt) else list(node.users)
            symbols = [compat.symbol_of(value(each)) for each in items if isinstance(value(each), _SYMBOLIC)]
            keys = {self._key(paths[symbol]) for symbol in symbols if symbol in paths} & self.free
            found |= dict.fromkeys([place] if keys else (), min(keys, key=str, default=None))
        return found


@dataclass(frozen=True)
class _Place:
    index: int


def candidates(graph: Graph, state: Any, leaves: Sequence[Any], dims: Collection[int]) -> frozenset[Key]:
    """Numbers that may decide sizes of a graph in which they are constants. dims: sizes of parameters.

    Floats, where a size is computed with rounding; integers that are a number of classes which no parameter has."""
    sizes = [expr(size) for node in graph.nodes for size in _shape(value(node))]
    found: set[Key] = set()
    if any(part.func.__name__ in _ROUNDED or part.is_Float for size in set(sizes) if not size.is_Atom
           for part in sympy.preorder_traversal(size)):  # fmt: skip
        found |= {i for i, leaf in enumerate(leaves) if type(leaf) is float}
        found |= {path for path, number in state.numbers if type(number) is float}
    counts = {node.args[1] for node in graph.nodes if op_name(node) == "one_hot" and type(node.args[1]) is int}
    counts -= set(dims)
    if counts:
        found |= {i for i, leaf in enumerate(leaves) if type(leaf) is int and leaf in counts}
        found |= {path for path, number in state.numbers if type(number) is int and number in counts}
    return frozenset(found)


def _shape(found: Any) -> list[Any]:
    return [size for size in found.shape if isinstance(size, torch.SymInt)] if isinstance(found, Tensor) else []


class Cut:
    """Takes what is computed of numbers out of a graph. keys: the placeholders of numbers. useful: those of the numbers
    that only decide sizes."""

    def __init__(self, gm: GraphModule, keys: Mapping[Node, Key], fakes: Sequence[Any]) -> None:
        self.gm, self.keys = gm, keys
        self.mode = next(value(n).fake_mode for n in gm.graph.nodes if isinstance(value(n), Tensor))
        self.shapes = tuple(None if fake is None else tuple(map(expr, fake.shape)) for fake in fakes)
        self.known = {size for shape in self.shapes for size in shape or () if isinstance(size, sympy.Symbol)}
        self.starts = {user: key for node, key in keys.items()
                       for user in (node.users if isinstance(value(node), Tensor) else [node])}  # fmt: skip
        self.before: dict[Node, set[Key]] = {}  # nodes that run before the program -> the numbers that they read
        for node in gm.graph.nodes:
            inputs = node.all_input_nodes
            read = set().union(*(self.before.get(each, ()) for each in inputs))
            if node in self.starts:
                self.before[node] = {self.starts[node]}
            elif (read and node.op != "output" and isinstance(value(node), _SCALARS)
                  and all(each in self.before or self._is_size(each) for each in inputs)):  # fmt: skip
                self.before[node] = read
        self.sized: dict[sympy.Expr, list[Node]] = {}  # what the program reads
        self.misread: set[Key] = set()  # by ops that do not take it for a size
        for node, read in self.before.items():
            users, found = [u for u in node.users if u not in self.before], value(node)
            if users and isinstance(found, torch.SymInt) and not expr(found).is_number:
                self.sized.setdefault(expr(found), []).append(node)
            elif users or (node in self.starts and not _is_symbol(found)):
                self.misread |= read
        sized = set().union(*(self.before[node] for nodes in self.sized.values() for node in nodes))
        self.useful = frozenset(sized - self.misread)

    def _is_size(self, node: Node) -> bool:
        """Or what was computed of sizes: tokens / experts."""
        found = value(node)
        return isinstance(found, (int, *_SYMBOLIC)) and expr(found).free_symbols <= self.known

    def run(self, leaves: Sequence[Any], sizes: tuple, read: Callable[[str], Any]) -> tuple[Numbers, dict[Node, int]]:
        """Also the new placeholders, in their order, with what is an example of each. sizes: of the arguments."""
        numbers = self._numbers(read)
        made: dict[Node, int] = {}
        graph, last = self.gm.graph, self.gm.graph.find_nodes(op="placeholder")[-1]
        for example in numbers.values(leaves, sizes):
            with graph.inserting_after(last):
                last = graph.placeholder(f"capacity{len(made)}")
            made[last] = example
            with self.mode:
                last.meta["example_value"] = torch.empty((), dtype=torch.int64)
        with graph.inserting_after(last):
            items = [graph.call_method("item", (node,)) for node in reversed(made)][::-1]
        for item, nodes in zip(items, self.sized.values()):
            for node in nodes:
                node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in self.before)
        inside = {*self.before, *self.keys}
        read_sizes = {each for node in self.before for each in node.all_input_nodes if each not in inside}
        for node in dict.fromkeys((*reversed(self.before), *self.keys)):
            graph.erase_node(node)
        edit.erase_unused(node for node in read_sizes if node.op != "placeholder")
        for node in made:
            update(node)
        return numbers, made

    def _numbers(self, read: Callable[[str], Any]) -> Numbers:
        kinds = {key: float if isinstance(value(node), Tensor) else int for node, key in self.keys.items()}
        graph = Graph()
        numbers = {key: graph.placeholder(f"number{i}") for i, key in enumerate(kinds)}
        outside = dict.fromkeys(each for node in self.before if node not in self.starts
                                for each in node.all_input_nodes if each not in self.before)  # fmt: skip
        sizes = list(dict.fromkeys(expr(value(each)) for each in outside))
        places = {size: graph.placeholder(f"size{i}") for i, size in enumerate(sizes)}
        copies = {each: places[expr(value(each))] for each in outside}
        for node in self.before:
            copies[node] = (numbers[self.starts[node]] if node in self.starts
                            else graph.node_copy(node, copies.__getitem__))  # fmt: skip
        graph.output(tuple(copies[nodes[0]] for nodes in self.sized.values()))
        symbols = {key: value(node).node.expr for node, key in self.starts.items()}
        guards = [guard.expr for guard in self.mode.shape_env.guards
                  if guard.expr.free_symbols & {*symbols.values()} and is_asked(guard)]
        return Numbers(kinds, read, GraphModule({}, graph), self.shapes, tuple(sizes), tuple(guards), symbols)


def _is_symbol(found: Any) -> bool:
    return isinstance(found, _SYMBOLIC) and isinstance(found.node.expr, sympy.Symbol)
