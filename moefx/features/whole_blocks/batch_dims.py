"""Which values are made of whole samples of a batch, and which of them are worth computing part by part.

Read off the table of dims (`ir/dims.py`), never from names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.dims import tensor_of, trace
from moefx.ir.fates import Fate, How, Size, quotient, shape_of
from moefx.ir.op import value
from moefx.ir.randomness import draws, never_drops
from moefx.ir.writes import is_written, writes


@dataclass
class BatchDims:
    """batch: how many samples there are, n: in how many parts they are cut. splits, cats: where regions take the parts
    of their chunks, and put them together: {node: region}.

    dims: {value: its dim of samples, which are the outermost factor of it}. why: {value that is not computed part by
    part, though what it is computed from could be: the reason}. cut: the values that are computed part by part, in
    order.
    """

    gm: GraphModule
    batch: Size
    n: int
    splits: dict[Node, int]
    cats: dict[Node, int]
    dims: dict[Node, int] = field(default_factory=dict)
    why: dict[Node, str] = field(default_factory=dict)
    cut: list[Node] = field(default_factory=list)

    def find(self) -> None:
        inputs = (tensor_of(node) for node in self.gm.graph.find_nodes(op="placeholder"))
        self.symbols = {size for tensor in inputs if tensor is not None for size in shape_of(tensor)
                        if not isinstance(size, int)}  # fmt: skip
        for node in self.gm.graph.nodes:
            self._label(node)
        self.cut = self._worth_it()

    def regions(self) -> set[int]:
        """Those whose tokens are samples, so that the parts of the batch are their chunks."""
        return {*self.splits.values()} - {region for node, region in self.splits.items()
                                          if self.dims.get(node.args[0]) != node.args[2]}  # fmt: skip

    def reason(self, region: int) -> tuple[Node, str]:
        """What stands between the batch and a region that is not cut with it."""
        first = next(node for node, each in self.splits.items() if each == region and node.args[0] not in self.dims)
        behind = edit.ancestors([first.args[0]], stop=lambda node: node in self.dims or node in self.why)
        found = [node for node in self.gm.graph.nodes if node in behind and node in self.why]
        return (found[-1], self.why[found[-1]]) if found else (first.args[0], "it is not computed from the batch")

    def seams(self) -> dict[Node, str]:
        """Between the batch and a region that is cut: {value that needs all parts together: the reason}."""
        done, wanted = {*self.cut}, self._wanted()
        return {node: why for node, why in self.why.items()
                if node in wanted and any(each in done for each in node.all_input_nodes)}  # fmt: skip

    def needs(self, node: Node) -> dict[Node, int | None]:
        """What a value that is computed part by part reads: {argument: its dim of samples; None: all of it}."""
        dim = self.dims[node]
        found: dict[Node, int | None] = {each: None for each in node.all_input_nodes}
        for operand in trace(node):
            if (place := self._meeting(operand.dims, dim)) is not None:
                found[operand.node] = place
        return found

    # ---- labels

    def _label(self, node: Node) -> None:
        if node.op == "placeholder":
            shape = shape_of(tensor_of(node)) if tensor_of(node) is not None else ()
            if node.meta["moefx"].kind == "input" and shape and shape[0] == self.batch and not is_written(node):
                self.dims[node] = 0
        elif node in self.cats:
            if self.cats[node] in self.regions():
                self.dims[node] = node.args[1]
        elif node.op.startswith("call") and tensor_of(node) is not None and node not in self.splits:
            given = [each for each in node.all_input_nodes if each in self.dims]
            if given:
                dim, why = self._dim(node)
                if dim is None:
                    self.why[node] = why
                    shape = shape_of(tensor_of(node))
                    whole = writes(node) or is_written(node) or not shape or not self._is_batches(shape[0])
                    dim = None if whole else 0
                if dim is not None:
                    self.dims[node] = dim

    def _dim(self, node: Node) -> tuple[int | None, str]:
        """Its dim of samples, or why it has none."""
        if draws(node) and not never_drops(node):
            return None, "it draws random numbers"
        if writes(node) or is_written(node):
            return None, "it is written to"
        operands = trace(node)
        if operands is None:
            return None, "nobody knows what it does to a batch"
        found: set[int] = set()
        for operand in operands:
            fate = operand.dims[self.dims[operand.node]] if operand.node in self.dims else None
            if fate is not None and fate.how is not How.UNREAD:
                if not self._is_kept(fate):
                    is_inner = fate.how is How.KEPT and fate.to and fate.to[0].outer != 1
                    return None, "its samples do not lie one after the other" if is_inner else "it mixes samples"
                found.add(fate.to[0].dim)
        if len(found) != 1:
            return None, "it mixes samples" if found else "it reads sizes alone"
        (dim,) = found
        needs: dict[Node, int | None] = {}
        for operand in operands:
            if any(place.dim == dim for fate in operand.dims for place in fate.to):
                place = self._meeting(operand.dims, dim)
                if place is None and not all(_is_shared(fate, dim) for fate in operand.dims):
                    return None, f"it mixes samples of {operand.node.name}"
                if self.dims.get(operand.node, place) != place and place is not None:
                    return None, f"{operand.node.name} has its samples on another dim"
            else:
                place = None
            if needs.setdefault(operand.node, place) != place:
                return None, f"it reads {operand.node.name} twice, cut and whole"
        if not self._is_batches(shape_of(tensor_of(node))[dim]):
            return None, "data decide how much of it a sample is"
        return dim, ""

    def _is_kept(self, fate: Fate) -> bool:
        """Whether samples are the outermost factor of what a dim becomes."""
        return fate.how is How.KEPT and bool(fate.to) and fate.to[0].outer == 1 and self._is_batches(fate.to[0].size)

    def _meeting(self, dims: tuple[Fate, ...], dim: int) -> int | None:
        """The dim of an operand whose parts make the parts of the result's dim."""
        return next((place for place, fate in enumerate(dims) if self._is_kept(fate) and fate.to[0].dim == dim), None)

    def _is_batches(self, size: Size) -> bool:
        """Whether a size is a multiple of the batch's, by what sizes of inputs say."""
        times = sympy.sympify(quotient(size, self.batch))
        return bool(times.is_integer and times.is_polynomial()) and times.free_symbols <= self.symbols

    # ---- what pays

    def _worth_it(self) -> list[Node]:
        """What parameters go into on the way to the regions, and behind the last as long as values grow no larger: the
        logits stay whole. Values of inputs alone, as masks, are computed once."""
        regions, wanted = self.regions(), self._wanted()
        params = {node for node in self.gm.graph.find_nodes(op="placeholder") if node.meta["moefx"].kind == "param"}
        work = edit.descendants(params)
        cats = {node for node, region in self.cats.items() if region in regions}
        largest = max((_hint(node) for node in cats), default=0)
        found: set[Node] = set(cats)
        for node in self.gm.graph.nodes:
            if node not in self.dims or node in self.why or node not in work or node.op == "placeholder":
                continue
            several = [
                each for each in node.all_input_nodes if each in found and isinstance(value(each), (tuple, list))
            ]
            behind = any(each in found for each in node.all_input_nodes) and _hint(node) <= largest
            if node in wanted or behind or several:
                found.add(node)
        return [node for node in self.gm.graph.nodes if node in found]

    def _wanted(self) -> set[Node]:
        """What regions that are cut are computed from."""
        regions = self.regions()
        return edit.ancestors(node.args[0] for node, region in self.splits.items() if region in regions)


def _is_shared(fate: Fate, dim: int) -> bool:
    """Whether an operand's dim is no part of the result's, or is its only entry for all of it."""
    return all(place.dim != dim for place in fate.to) or fate.how is How.SHARED


def _hint(node: Node) -> int:
    """How many entries a value has in the call that is compiled for."""
    found = 1
    for size in tensor_of(node).shape:
        found *= size if type(size) is int else size.node.hint or 1
    return found


def batches(gm: GraphModule) -> list[Size]:
    """Sizes that may be the number of samples: those of the first dims of inputs, the most frequent first."""
    found: dict[Size, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        tensor = tensor_of(node)
        if node.meta["moefx"].kind == "input" and tensor is not None and tensor.dim() > 0:
            size = shape_of(tensor)[0]
            found[size] = found.get(size, 0) + 1
    return sorted(found, key=lambda size: -found[size])
