"""Which values are made of parts of the batch, or of the sequence, and which are worth computing part by part.

Read off the table of dims (`ir/dims.py`), never from names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

import sympy
from torch.fx import GraphModule, Node

from moefx.analysis.sizes import number_of
from moefx.ir import edit
from moefx.ir.dim_arguments import is_view
from moefx.ir.dims import CASTS, tensor_of, trace
from moefx.ir.fates import Fate, How, Operand, Place, Size, quotient, shape_of
from moefx.ir.names import op_name
from moefx.ir.op import value
from moefx.ir.randomness import draws, never_drops
from moefx.ir.writes import is_written, writes


class Axis(NamedTuple):
    """What is cut: dim `dim` of inputs, of `size` entries, which are `units`. lead: how many entries the dims in front
    have. number: `size` in the call that is compiled for."""

    dim: int
    size: Size
    lead: Size
    number: int

    @property
    def name(self) -> str:
        return ("batch", "sequence")[self.dim]

    @property
    def units(self) -> str:
        return ("samples", "positions")[self.dim]


@dataclass
class PartDims:
    """n: in how many parts the axis is cut. splits, cats: where regions take the parts of their chunks, and put them
    together: {node: region}.

    places: {value: the place of the axis in it, along which it has parts}. why: {value that is not computed part by
    part, though what it is computed from could be: the reason}. cut: the values that are computed part by part, in
    order. views: of such, which only others read: they are views of all of it, so that it is put together once.
    """

    gm: GraphModule
    axis: Axis
    n: int
    splits: dict[Node, int]
    cats: dict[Node, int]
    sizes: Mapping[str, int]
    places: dict[Node, Place] = field(default_factory=dict)
    why: dict[Node, str] = field(default_factory=dict)
    cut: list[Node] = field(default_factory=list)
    views: set[Node] = field(default_factory=set)

    def find(self) -> None:
        for node in self.gm.graph.nodes:
            self._label(node)
        self.cut = self._worth_it()

    def regions(self) -> dict[int, Place]:
        """Those that take their tokens where the axis is, so that its parts are their chunks; and the place."""
        found: dict[int, set[Place | None]] = {}
        for split, region in self.splits.items():
            place = self.places.get(split.args[0])
            found.setdefault(region, set()).add(place if place is not None and place.dim == split.args[2] else None)
        return {region: place for region, (place, *others) in found.items() if place is not None and not others}

    def reason(self, region: int) -> tuple[Node, str]:
        """What stands between the axis and a region that is not cut with it."""
        taken = [split.args[0] for split, each in self.splits.items() if each == region]
        first = next((node for node in taken if node not in self.places), taken[0])
        if first in self.places:
            return first, f"its {self.axis.units} are not where the region takes tokens"
        behind = edit.ancestors([first], stop=lambda node: node in self.places or node in self.why)
        found = [node for node in self.gm.graph.nodes if node in behind and node in self.why]
        return (found[-1], self.why[found[-1]]) if found else (first, f"it is not computed from the {self.axis.name}")

    def seams(self) -> dict[Node, str]:
        """Between the axis and a region that is cut: {value that needs all parts together: the reason}."""
        done, wanted = {*self.cut, *self.views}, self._wanted()
        return {node: why for node, why in self.why.items()
                if node in wanted and any(each in done for each in node.all_input_nodes)}  # fmt: skip

    def needs(self, node: Node) -> dict[Node, Place | None]:
        """What a value that is computed part by part reads: {argument: the place of its parts; None: all of it}."""
        found: dict[Node, Place | None] = {each: None for each in node.all_input_nodes}
        for operand in trace(node):
            if (place := self._origin(operand, self.places[node])) is not None:
                found[operand.node] = place
        return found

    # ---- labels

    def _label(self, node: Node) -> None:
        axis, tensor = self.axis, tensor_of(node)
        if node.op == "placeholder":
            shape = shape_of(tensor) if tensor is not None and node.meta["moefx"].kind == "input" else ()
            if axis.size in shape[axis.dim : axis.dim + 1] and not is_written(node):
                self.places[node] = Place(axis.dim, axis.size)
        elif node in self.cats:
            if (place := self.regions().get(self.cats[node])) is not None:
                self.places[node] = replace(place, dim=node.args[1])
        elif node.op.startswith("call") and tensor is not None and node not in self.splits and any(
                each in self.places for each in node.all_input_nodes):  # fmt: skip
            place, why = self._place(node)
            if place is None:
                self.why[node] = why
                place = None if writes(node) or is_written(node) else self._behind(shape_of(tensor))
            if place is not None:
                self.places[node] = place

    def _behind(self, shape: tuple[Size, ...]) -> Place | None:
        """Where the axis is again behind an op that mixes it: the first dim that it fits into."""
        axis = self.axis
        for dim, size in enumerate(shape):
            if size == axis.size or self.divides(axis.lead * axis.size, size):
                return Place(dim, axis.size, 1 if size == axis.size else axis.lead)
        return None

    def _place(self, node: Node) -> tuple[Place | None, str]:
        """The place of the axis in a value, or why it has none."""
        units = self.axis.units
        if draws(node) and not never_drops(node):
            return None, "it draws random numbers"
        if writes(node) or is_written(node):
            return None, "it is written to"
        operands = trace(node)
        if operands is None:
            return None, f"nobody knows what it does to a {self.axis.name}"
        found: set[Place | None] = set()
        for operand in operands:
            if (own := self.places.get(operand.node)) and operand.dims[own.dim].how is not How.UNREAD:
                found.add(self._onto(operand.dims[own.dim], own.outer))
        if len(found) != 1 or None in found:
            return None, f"it mixes {units}" if found else "it reads sizes alone"
        (place,) = found
        if not self.divides(1, place.outer) or not self.divides(
                place.outer * place.size, shape_of(tensor_of(node))[place.dim]):  # fmt: skip
            return None, f"data decide how much of it a {units[:-1]} is"
        needs: dict[Node, Place | None] = {}
        for operand in operands:
            origin, name = self._origin(operand, place), operand.node.name
            if origin is None and not all(_is_shared(fate, place.dim) for fate in operand.dims):
                return None, f"it mixes {units} of {name}"
            if origin is not None and self.places.get(operand.node, origin) != origin:
                return None, f"{name} has its {units} on another dim"
            if needs.setdefault(operand.node, origin) != origin:
                return None, f"it reads {name} twice, cut and whole"
        return place, ""

    # ---- factors of dims

    def _onto(self, fate: Fate, outer: Size) -> Place | None:
        """Where the axis, with `outer` entries in front of it in a dim, is in the result."""
        for place in fate.to if fate.how is How.KEPT else ():
            if self.divides(outer * self.axis.size, place.size):
                return Place(place.dim, self.axis.size, place.outer * outer)
            if not self.divides(place.size, outer):
                return None
            outer = quotient(outer, place.size)
        return None

    def _origin(self, operand: Operand, place: Place) -> Place | None:
        """Where the axis comes from, which is at a place of the result."""
        for dim, fate in enumerate(operand.dims):
            outer: Size = 1
            for each in fate.to if fate.how is How.KEPT else ():
                if each.dim == place.dim and self.divides(each.outer, place.outer):
                    inside = quotient(place.outer, each.outer)
                    if self.divides(inside * place.size, each.size):
                        return Place(dim, place.size, outer * inside)
                outer = outer * each.size
        return None

    def divides(self, part: Size, size: Size) -> bool:
        """Whether a size is a multiple of another one, by what sizes of inputs say."""
        if isinstance(part, int) and isinstance(size, int):
            return part != 0 and size % part == 0
        times = sympy.sympify(quotient(size, part))
        return bool(times.is_integer and times.is_polynomial()) and times.free_symbols <= self._symbols

    @cached_property
    def _symbols(self) -> set[Size]:
        """The sizes of inputs."""
        tensors = (tensor_of(node) for node in self.gm.graph.find_nodes(op="placeholder"))
        return {size for tensor in tensors if tensor is not None for size in shape_of(tensor)}

    # ---- what pays

    def _worth_it(self) -> list[Node]:
        """Of what is computed from parameters: what regions take, back to the first value that needs all parts; what
        regions give, up to the first such value, on the way to other regions or as long as values grow no larger: the
        logits stay whole."""
        bits = {region: 1 << i for i, region in enumerate(self.regions())}
        cats = {node: bits[region] for node, region in self.cats.items() if region in bits}
        splits = {node: bits[region] for node, region in self.splits.items() if region in bits}
        nodes, may, wanted = [*self.gm.graph.nodes], self._may(), self._wanted()
        before = self._near(splits, may, nodes[::-1], lambda node: node.users)
        near = self._near(cats, may, nodes, lambda node: node.all_input_nodes)
        found, largest = {*cats}, max(map(self._number, cats), default=0)
        for node in nodes:
            if node in near and any(each in found for each in node.all_input_nodes) and (
                    node in wanted or self._number(node) <= largest):  # fmt: skip
                found.add(node)
        found |= before
        return self._with_what_lies_between(found, may, nodes)

    def _with_what_lies_between(self, found: set[Node], may: set[Node], nodes: list[Node]) -> list[Node]:
        """These, what is computed from them alone on the way to others of them, and whatever one op gives together."""
        found |= {each for node in found - self.cats.keys() for each in node.all_input_nodes if _has_several(each)}
        on_the_way = edit.closure(found, lambda node: node.all_input_nodes if node in may else ())
        for node in nodes:
            given = [each for each in node.all_input_nodes if each in self.places and each.op != "placeholder"]
            is_between = node in on_the_way and all(each in found for each in given)
            if node in may and given and (is_between or any(_has_several(each) and each in found for each in given)):
                found.add(node)
        for node in reversed(nodes):
            if node in found - self.cats.keys() and (is_view(op_name(node)) or op_name(node) in CASTS) and not any(
                    user in found or user in self.splits for user in node.users):  # fmt: skip
                found.remove(node)
                self.views.add(node)
        return [node for node in nodes if node in found]

    def _near(self, ends: dict[Node, int], may: set[Node], nodes: list[Node],
              next_to: Callable[[Node], Iterable[Node]]) -> set[Node]:  # fmt: skip
        """Which of these nodes, in order, lie behind an end and not behind a value that needs all parts of that end."""
        behind: dict[Node, int] = {}
        direct: dict[Node, int] = {}
        all_parts: dict[Node, int] = {}
        for node in nodes:
            given, own = [each for each in next_to(node) if each in behind], ends.get(node, 0)
            behind[node] = reduce(or_, (behind[each] for each in given), own)
            direct[node] = reduce(or_, (direct[each] for each in given), 0) if node in may else 0
            all_parts[node] = reduce(or_, (all_parts[each] for each in given), behind[node] if node in self.why else 0)
            direct[node] |= own
        return {node for node in may if direct[node] & ~all_parts[node]}

    def _may(self) -> set[Node]:
        """What can be computed part by part. Values of inputs alone, as masks, are computed once."""
        params = {node for node in self.gm.graph.find_nodes(op="placeholder") if node.meta["moefx"].kind == "param"}
        work = edit.descendants(params)
        found: set[Node] = set()
        for node in self.places:
            if node in work and node not in self.why and node.op != "placeholder" and all(
                    each in found for each in node.all_input_nodes if _has_several(each)):  # fmt: skip
                found.add(node)
        return found

    def _wanted(self) -> set[Node]:
        """What regions that are cut are computed from."""
        regions = self.regions()
        return edit.ancestors(node.args[0] for node, region in self.splits.items() if region in regions)

    def _number(self, node: Node) -> int:
        """How many entries a value has in the call that is compiled for."""
        return math.prod(number_of(size, self.sizes) for size in shape_of(tensor_of(node)))


def _is_shared(fate: Fate, dim: int) -> bool:
    """Whether an operand's dim is no part of the result's, or is its only entry for all of it."""
    return all(place.dim != dim for place in fate.to) or fate.how is How.SHARED


def _has_several(node: Node) -> bool:
    """Whether a node gives several tensors, of which others take one each."""
    return isinstance(value(node), (tuple, list)) and tensor_of(node) is not None


def axes(gm: GraphModule, sizes: Mapping[str, int]) -> list[Axis]:
    """What inputs may be cut along: the batch first, and of several sizes the most frequent one."""
    tensors = [tensor_of(node) for node in gm.graph.find_nodes(op="placeholder") if node.meta["moefx"].kind == "input"]
    shapes = [shape_of(tensor) for tensor in tensors if tensor is not None]
    found = []
    for dim in (0, 1):
        counts = Counter(shape[dim] for shape in shapes if len(shape) > dim)
        for size, _ in counts.most_common():
            leads = [shape[0] for shape in shapes if dim and size in shape[1:2] and shape[0] != 1]
            number = number_of(size, sizes)
            found.append(Axis(dim, number if size == number else size, leads[0] if leads else 1, number))
    return found
