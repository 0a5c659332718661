"""Cut whole blocks along the batch or the sequence: exchanges of one part run beside what another computes.

Contract
    takes  MOE   regions in chunks
    gives  MOE   the same, where the chunks of a region are parts of the batch, or of the sequence where there are fewer
                 samples than parts: what stands between regions is computed part by part, too
    never  cuts what mixes samples (positions), draws random numbers or is written to: before that the parts are put
           together, and behind it the cut begins again

Pseudo-code
    every value that is made of whole samples (positions) has a place of them in one of its dims      (part_dims.py)
    of these are cut: what parameters go into between a region and what mixes them, on either side; behind the last
    region as long as values do not grow; the parts of a region's chunks are the parts of the batch (the sequence)

    x = attention(x0); y = cat(experts(x[:n]), experts(x[n:])); z = norm(y)
        ->  a, b = x0.split(..); ya = experts(attention(a)); yb = experts(attention(b)); z = cat(norm(ya), norm(yb))

The parts stand interleaved. `order` gives them their order in time.
"""

from __future__ import annotations

import operator
from functools import partial, reduce

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx.analysis.sizes import sizes_of_inputs
from moefx.context.pass_types import PassContext, PassResult
from moefx.features.whole_blocks.part_dims import PartDims, axes
from moefx.ir import edit
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import tensor_of
from moefx.ir.fates import Place, Size, quotient, shape_of
from moefx.ir.names import op_name
from moefx.ir.op import value
from moefx.ir.ops.regions import CHUNKED, enter_experts
from moefx.ir.shapes import LIKE, name_sizes


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    is_asked = ctx.options.parallel.whole_blocks is True or ctx.decisions.proposed_by == "whole_blocks"
    if not is_asked or not ctx.decisions.chunks:
        return result
    n = max(chunk.n for chunk in ctx.decisions.chunks.values())
    regions = {chunk.of for chunk in ctx.decisions.chunks.values() if chunk.n == n}
    marked = [node for node in gm.graph.nodes if node.meta.get(CHUNKED) in regions]
    cats = {node: node.meta[CHUNKED] for node in marked if node.target is torch.cat}
    splits = {node: node.meta[CHUNKED] for node in marked if node.target == "split"}
    found = _best(gm, n, splits, cats, sizes_of_inputs(ctx))
    if found is None:
        result.skip(gm.graph.output_node(), "no input has a batch")
        return result
    axis = found.axis.name
    capacities = {node.args[-1]: node for node in gm.graph.find_nodes(op="call_function", target=enter_experts)
                  if node.args[1] is None}  # fmt: skip
    for region in sorted(regions - found.regions().keys()):
        node, why = found.reason(region)
        if region in capacities:
            node, why = capacities[region], "its chunks are parts of the capacity"
        result.skip(node, f"region {region} is not cut with the {axis}: {node.name}: {why}")
    if found.regions():
        for node, why in found.seams().items():
            result.skip(node, f"all parts of the {axis} meet in {node.name}: {why}")
        _Cut(found).rewrite(result)
    return result


def _best(gm: GraphModule, n: int, splits: dict[Node, int], cats: dict[Node, int],
          sizes: dict[str, int]) -> PartDims | None:  # fmt: skip
    """The axis that cuts most regions; of such the batch, where it has a sample for each part, else the sequence."""
    tried: list[PartDims] = []
    for axis in axes(gm, sizes):
        found = PartDims(gm, axis, n, splits, cats, sizes)
        if axis.dim == 0 or axis.number >= n:
            found.find()
            tried.append(found)
        if axis.number >= n and found.regions().keys() == {*splits.values()}:
            break
    return max(tried, default=None, key=lambda each: (len(each.regions()), each.axis.number >= n, -each.axis.dim,
                                                      len(each.places)))  # fmt: skip


class _Cut:
    """parts: {(value, place): its parts}. sizes: {a size: a node that has it}. shares: {a size: those of the parts}."""

    def __init__(self, found: PartDims) -> None:
        self.found, self.graph = found, found.gm.graph
        self.parts: dict[tuple[Node, Place], list[Node]] = {}
        self.sizes: dict[Size, Node | int] = {}
        self.shares: dict[Size, list[Node | int]] = {}
        self.first = next(node for node in self.graph.nodes if node.op != "placeholder")

    def rewrite(self, result: PassResult) -> None:
        found = self.found
        self.given = next(node for node in self.graph.find_nodes(op="placeholder") if node in found.places)
        regions = found.regions()
        taken = {node: regions[region] for node, region in found.splits.items() if region in regions}
        for node in self._of_a_size():
            name_sizes(node)  # of a part one is another
        self.replaced = {*found.cut, *taken}
        outside = {node: self._readers(node) for node in found.cut}
        shapes = {node: shape_of(tensor_of(node)) for node in found.cut}
        for node in found.cut:
            self.parts[node, found.places[node]] = self._parts(node)
        for node, place in taken.items():
            self._take(node, place)
        for node in found.cut:
            self._give(node, outside[node], shapes[node])
        for node in reversed(found.cut):
            if not node.users:
                self.graph.erase_node(node)
        edit.erase_unused(node for node in self.graph.nodes if isinstance(value(node), torch.SymInt)
                          and node.op.startswith("call"))  # fmt: skip
        edit.move_in_order(found.gm)
        result.changed(f"{len(found.cut)} values of {len(regions)} regions in {found.n} parts of the {found.axis.name}")

    def _of_a_size(self) -> list[Node]:
        """What may be made as large as another tensor."""
        cut = self.found.cut
        found = [*cut, *(reader for node in cut for user in node.users for reader in user.users)]
        return [node for node in dict.fromkeys(found) if op_name(node) not in LIKE]

    def _readers(self, node: Node) -> list[Node]:
        """Those who want the value as it was."""
        return [user for user in node.users if user not in self.replaced]

    def _parts(self, node: Node) -> list[Node]:
        found = self.found
        if node in found.cats:
            return list(node.args[0])
        needs, made = found.needs(node), []
        pieces = {given: self._of(given, place, node) for given, place in needs.items() if place is not None}
        in_pieces = any(place is not None and (place.dim, place.outer) != (0, 1) for place in needs.values())
        for i in range(found.n):
            with edit.at(node):
                new = self.graph.node_copy(node, lambda each, i=i: pieces[each][i] if each in pieces else each)
            new._rename(f"{node.name}_c{i}")
            hold(new, self._held(node, i))
            if in_pieces and op_name(new) == "view" and sizes_held(new):
                new.target = "reshape"
            made.append(new)
        return made

    def _held(self, node: Node, i: int) -> dict[int, Node | int]:
        """The sizes among the arguments of part i. A part may be empty, so none is left to be found."""
        shape, held, dim = shape_of(tensor_of(node)), sizes_held(node), self.found.places[node].dim
        open_ = {other for other, each in held.items() if type(each.of(node)) is int and each.of(node) == -1} - {dim}
        found = {other: self._size(shape[other]) for other in open_ if self.found.divides(1, shape[other])}
        if dim in held and (held[dim].of(node) != -1 or found):
            found[dim] = self._shares(shape[dim])[i]
        return found

    def _of(self, whole: Node, place: Place, reader: Node) -> list[Node]:
        """The parts of a value; of one that is computed whole, views of it right before its first reader."""
        if (whole, place) not in self.parts:
            size, dim, outer = shape_of(tensor_of(whole))[place.dim], place.dim, place.outer
            inside = quotient(size, outer)
            with edit.at(reader):
                given = whole
                if outer != 1:
                    given = self.graph.call_method("unflatten", (whole, dim, (self._size(outer), self._size(inside))))
                split = self.graph.call_method("split", (given, self._shares(inside), dim + int(outer != 1)))
                split._rename(f"{whole.name}_parts")
                made = [edit.call(self.graph, operator.getitem, split, i, name=f"{whole.name}_{i}of{self.found.n}")
                        for i in range(self.found.n)]  # fmt: skip
                if outer != 1:
                    made = [self.graph.call_method("flatten", (part, dim, dim + 1)) for part in made]
            self.parts[whole, place] = made
        return self.parts[whole, place]

    def _joined(self, node: Node, place: Place, size: Size) -> Node:
        """All of a value that is computed part by part."""
        parts, dim, outer = self.parts[node, place], place.dim, place.outer
        with edit.at(node, after=True):
            if outer != 1:
                parts = [self.graph.call_method("unflatten", (part, dim, (self._size(outer), share)))
                         for part, share in zip(parts, self._shares(quotient(size, outer)))]  # fmt: skip
            whole = edit.call(self.graph, torch.cat, parts, dim + int(outer != 1), name=f"{node.name}_all")
            if outer != 1:
                whole = self.graph.call_method("flatten", (whole, dim, dim + 1))
        whole.meta["val"] = value(node)
        return whole

    def _take(self, split: Node, place: Place) -> None:
        """A region's chunks take the parts."""
        parts = self._of(split.args[0], place, split)
        for item in list(split.users):
            item.replace_all_uses_with(parts[item.args[1]])
            self.graph.erase_node(item)
        self.graph.erase_node(split)

    def _give(self, node: Node, readers: list[Node], shape: tuple[Size, ...]) -> None:
        """All of a value, for those who read it whole; those who want its sizes alone get these."""
        sized = [user for user in readers if _is_size(user)]
        for user in sized:
            user.replace_all_uses_with(self._size(shape[user.args[1] % len(shape)]))
            self.graph.erase_node(user)
        place = self.found.places[node]
        if len(sized) == len(readers) or (node in self.found.cats and place.outer == 1):
            return
        whole = self._joined(node, place, shape[place.dim])
        for user in readers:
            if user not in sized:
                user.replace_input_with(node, whole)

    # ---- sizes

    def _shares(self, size: Size) -> list[Node | int]:
        """The same of the parts; of the last as what the others leave, so that all are known to be the whole."""
        axis, n = self.found.axis, self.found.n
        if isinstance(size, int):
            return [size // axis.size * (axis.size * (i + 1) // n - axis.size * i // n) for i in range(n)]
        if size not in self.shares:
            whole = self._size(size) if size == axis.size else self._shares(axis.size)
            rest = self._size(quotient(size, axis.size))
            with edit.at(self.first):
                if size != axis.size:
                    made = [edit.call(self.graph, operator.mul, part, rest) for part in whole]
                else:
                    made = [edit.call(self.graph, torch.ops.moefx.num_chunk_rows.default, self.given, axis.dim, i, n,
                                      name=axis.units) for i in range(n - 1)]  # fmt: skip
                    made.append(reduce(partial(edit.call, self.graph, operator.sub), made, whole))
            self.shares[size] = made
        return self.shares[size]

    def _size(self, size: Size) -> Node | int:
        """A size of inputs, or a polynomial of such, before everything else."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        if size not in self.sizes:
            terms = [size.base] * int(size.exp) if size.is_Pow else size.args
            made = [self._size(each) for each in terms]
            with edit.at(self.first):
                if made:
                    made = reduce(partial(edit.call, self.graph, operator.add if size.is_Add else operator.mul), made)
                else:
                    made = edit.call(self.graph, torch.ops.aten.sym_size.int, *self._input_of(size))
            self.sizes[size] = made
        return self.sizes[size]

    def _input_of(self, size: sympy.Expr) -> tuple[Node, int]:
        for node in self.graph.find_nodes(op="placeholder"):
            shape = shape_of(tensor_of(node)) if tensor_of(node) is not None else ()
            if size in shape:
                return node, shape.index(size)
        raise ValueError(f"no input has the size {size}")


def _is_size(node: Node) -> bool:
    return op_name(node) in ("size", "sym_size") and len(node.args) > 1 and isinstance(node.args[1], int)
