"""Whether a graph that was captured for sizes of two and more is right for a size of one.

Torch takes a symbolic size to be at least two, so that `if x.shape[1] == 1:` or `y.squeeze()` leave no trace in the
graph. A batch that has such a size where the graph has a symbol is captured once more, with that size as it is; what
was recorded of the two captures must be the same for that size, but for views that do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.names import called, op_name
from moefx.ir.op import NUMBERS, expr, value

Shapes = tuple[tuple[sympy.Expr, ...] | None, ...]


@dataclass(frozen=True)
class Recording:
    """What a graph does, without what it computes of sizes: those stand as expressions where they are used."""

    shapes: Shapes  # of the arguments
    does: tuple[Any, ...]
    nodes: tuple[Node, ...]


def record(gm: GraphModule, fakes: list[Any]) -> Recording:
    recorder = _Recorder()
    for node in gm.graph.nodes:
        recorder.see(node)
    return Recording(shapes_of(fakes), tuple(recorder.does), tuple(recorder.nodes))


def shapes_of(fakes: list[Any]) -> Shapes:
    return tuple(None if fake is None else tuple(expr(size) for size in fake.shape) for fake in fakes)


@dataclass(frozen=True)
class Verdict:
    """complaint: what is otherwise, or None. for_all_sizes: the others may be any that `guard`, if there is one, is
    right for."""

    complaint: str | None
    for_all_sizes: bool = False
    guard: Any = None


def compare(general: Recording, special: Recording, sizes: tuple[tuple[int, ...] | None, ...]) -> Verdict:
    """sizes: of the arguments with which the second was captured, in which ones are constant."""
    first = None
    for fixed in (special.shapes, sizes):
        mine = _Normal(general, _matched(general.shapes, fixed))
        other = _Normal(special, _matched(special.shapes, fixed))
        found = mine.difference(other)
        if found is None:
            return Verdict(None, fixed is special.shapes)
        first = first or found
    return Verdict(f"with a size of one the forward does something else: {first}", True)


def _matched(shapes: Shapes, others: tuple) -> dict[sympy.Symbol, Any]:
    return {size: other for mine, theirs in zip(shapes, others) for size, other in zip(mine or (), theirs or ())
            if isinstance(size, sympy.Symbol)}  # fmt: skip


@dataclass(frozen=True)
class _Ref:
    """What an op before gave."""

    number: int


class _Recorder:
    def __init__(self) -> None:
        self.does: list[Any] = []
        self.nodes: list[Node] = []
        self._place: dict[Node, int] = {}
        self._unknown: dict[sympy.Symbol, sympy.Symbol] = {}  # sizes that data decide, in the order of the graph

    def see(self, node: Node) -> None:
        found, before = value(node), len(self._unknown)
        sizes = self._shape(found)
        if _is_check(node) or (_is_number(found) and len(self._unknown) == before and node.op != "output"):
            return
        self._place[node] = len(self.does)
        self.nodes.append(node)
        if node.op == "placeholder":
            source = node.meta["moefx"]
            self.does.append((source.kind, None if source.kind == "constant" else source.key, sizes))
        else:
            self.does.append((op_name(node), self._argument(node.args), self._argument(node.kwargs), sizes))

    def _shape(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            return str(found.dtype), tuple(map(self._size, found.shape))
        if isinstance(found, NUMBERS):
            return self._size(found)
        if isinstance(found, (tuple, list)):
            return tuple(map(self._shape, found))
        return type(found).__name__

    def _size(self, size: Any) -> Any:
        if isinstance(size, (bool, float)):
            return size
        found = size.node.expr if isinstance(size, (torch.SymFloat, torch.SymBool)) else expr(size)
        for symbol in sorted(found.free_symbols, key=str):
            if str(symbol).startswith(("u", "zu")):
                self._unknown.setdefault(symbol, sympy.Symbol(f"unknown{len(self._unknown)}"))
        return found.xreplace(self._unknown)

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Node):
            return _Ref(self._place[given]) if given in self._place else self._shape(value(given))
        if isinstance(given, slice):
            return "slice", *map(self._argument, (given.start, given.stop, given.step))
        if isinstance(given, dict):
            return tuple((name, self._argument(each)) for name, each in given.items())
        if isinstance(given, (tuple, list)):
            return tuple(map(self._argument, given))
        if isinstance(given, NUMBERS):
            return self._size(given)
        return given if given is None or isinstance(given, (str, torch.dtype, torch.device)) else type(given).__name__


def _is_number(found: Any) -> bool:
    return isinstance(found, NUMBERS) or (isinstance(found, (tuple, list)) and all(map(_is_number, found)))


def _is_check(node: Node) -> bool:
    return not node.users and ("check" in op_name(node) or "assert" in op_name(node))


_VIEWS = ("expand", "expand_as", "view", "view_as", "reshape", "contiguous", "broadcast_to", "getitem", "flatten")


class _Normal:
    """A recording for certain sizes: of each op what it does and to which; without unused ones and idle views."""

    def __init__(self, recording: Recording, sizes: dict[sympy.Symbol, Any]) -> None:
        self._sizes = sizes
        self._known: dict[sympy.Expr, sympy.Expr] = {}
        self.nodes: list[Node] = []
        self.does: list[Any] = []
        places: dict[int, Any] = {}
        shapes: list[Any] = []
        for number, (name, *given, shape) in enumerate(recording.does):
            args, shape = self._put(tuple(given), places), self._put(shape, places)
            shapes.append(shape)
            source = _source(recording.does[number])
            if name in _VIEWS and source is not None and shapes[source] == shape and _takes_all(given):
                places[number] = places[source]
                continue
            places[number] = len(self.does)
            self.does.append((name, args, shape))
            self.nodes.append(recording.nodes[number])

    def difference(self, other: _Normal) -> str | None:
        for mine, theirs, node in zip(self.does, other.does, other.nodes):
            if mine != theirs:
                return f"{called(node)} ({edit.place(node)})"
        return None if len(self.does) == len(other.does) else "something at its end"

    def _put(self, given: Any, places: dict[int, Any]) -> Any:
        if isinstance(given, _Ref):
            return _Ref(places[given.number])
        if isinstance(given, tuple):
            return tuple(self._put(each, places) for each in given)
        if isinstance(given, sympy.Basic):
            if given not in self._known:
                self._known[given] = _plain(given.subs(self._sizes))
            return self._known[given]
        return _plain(given)


def _plain(number: Any) -> Any:
    """Numbers that are equal compare so; a float may have been rounded otherwise."""
    if isinstance(number, (float, sympy.Float)):
        return float(f"{float(number):.12g}")
    return int(number) if isinstance(number, sympy.Integer) else number


def _source(does: tuple) -> int | None:
    """The tensor that an op takes first."""
    first = does[1][0] if len(does) == 4 and does[1] else None
    return first.number if isinstance(first, _Ref) else None


def _takes_all(given: Any) -> bool:
    """Whether an index, if there is one, is of slices: of the same shape then, it takes all."""
    args, _ = given
    return not any(isinstance(each, _Ref) for index in args[1:] for each in (index if _is_tuple(index) else (index,)))


def _is_tuple(index: Any) -> bool:
    return isinstance(index, tuple) and index[:1] != ("slice",)
