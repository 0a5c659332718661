"""Cut whole blocks along the batch, so that exchanges of one part run beside attention and experts of another.

Contract
    takes  MOE   regions in chunks
    gives  MOE   the same, where the chunks of a region are parts of the batch: what stands between regions is computed
                 part by part, too
    never  cuts what mixes samples, draws random numbers or is written to: before that the parts are put together

Pseudo-code
    every value that is made of whole samples has a dim of samples          (batch_dims.py)
    of these are cut: what parameters go into on the way to a region, and behind the last one as long as values do not
    grow; the parts of a region's chunks are the parts of the batch

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

from moefx.context.pass_types import PassContext, PassResult
from moefx.features.whole_blocks.batch_dims import BatchDims, batches
from moefx.ir import edit
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import tensor_of
from moefx.ir.fates import Size, quotient, shape_of
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
    tried = [BatchDims(gm, batch, n, splits, cats) for batch in batches(gm)]
    for each in tried:
        each.find()
    if not tried:
        result.skip(gm.graph.output_node(), "no input has a batch")
        return result
    found = max(tried, key=lambda each: (len(each.regions()), len(each.dims)))
    capacities = {node.args[-1]: node for node in gm.graph.find_nodes(op="call_function", target=enter_experts)
                  if node.args[1] is None}  # fmt: skip
    for region in sorted(regions - found.regions()):
        node, why = found.reason(region)
        if region in capacities:
            node, why = capacities[region], "its chunks are parts of the capacity"
        result.skip(node, f"region {region} is not cut with the batch: {node.name}: {why}")
    if found.regions():
        for node, why in found.seams().items():
            result.skip(node, f"all parts of the batch meet in {node.name}: {why}")
        _Cut(found).rewrite(result)
    return result


class _Cut:
    """parts: {(value, dim): its parts}. sizes: {a size: a node that has it}. shares: {a size: those of the parts}."""

    def __init__(self, found: BatchDims) -> None:
        self.found, self.graph = found, found.gm.graph
        self.parts: dict[tuple[Node, int], list[Node]] = {}
        self.sizes: dict[Size, Node | int] = {}
        self.shares: dict[Size, list[Node | int]] = {}
        self.first = next(node for node in self.graph.nodes if node.op != "placeholder")

    def rewrite(self, result: PassResult) -> None:
        found = self.found
        self.given = next(node for node in self.graph.find_nodes(op="placeholder") if node in found.dims)
        regions = found.regions()
        taken = [node for node, region in found.splits.items() if region in regions]
        for node in self._of_a_size():
            name_sizes(node)  # of a part one is another
        self.replaced = {*found.cut, *taken}
        outside = {node: self._readers(node) for node in found.cut}
        shapes = {node: shape_of(tensor_of(node)) for node in found.cut}
        for node in found.cut:
            self.parts[node, found.dims[node]] = self._parts(node)
        for node in taken:
            self._take(node)
        for node in found.cut:
            self._give(node, outside[node], shapes[node])
        for node in reversed(found.cut):
            if not node.users:
                self.graph.erase_node(node)
        edit.erase_unused(node for node in self.graph.nodes if isinstance(value(node), torch.SymInt)
                          and node.op.startswith("call"))  # fmt: skip
        edit.move_in_order(found.gm)
        result.changed(f"{len(found.cut)} values of {len(regions)} regions in {found.n} parts of the batch")

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
        needs, dim, made = found.needs(node), found.dims[node], []
        pieces = {given: self._of(given, place, node) for given, place in needs.items() if place is not None}
        for i in range(found.n):
            with edit.at(node):
                new = self.graph.node_copy(node, lambda each, i=i: pieces[each][i] if each in pieces else each)
            new._rename(f"{node.name}_c{i}")
            hold(new, self._held(node, dim, i))
            made.append(new)
        return made

    def _held(self, node: Node, dim: int, i: int) -> dict[int, Node | int]:
        """The sizes among the arguments of part i. A part may have no samples, so none is left to be found."""
        shape, held = shape_of(tensor_of(node)), sizes_held(node)
        found = {place: size for place, size in enumerate(shape)
                 if place in held and type(size) is int and held[place].of(node) == -1}  # fmt: skip
        if dim in held and (held[dim].of(node) != -1 or found):
            found[dim] = self._shares(shape[dim])[i]
        return found

    def _of(self, whole: Node, dim: int, reader: Node) -> list[Node]:
        """The parts of a value; of one that is computed whole, views of it right before its first reader."""
        if (whole, dim) not in self.parts:
            sizes = self._shares(shape_of(tensor_of(whole))[dim])
            with edit.at(reader):
                split = self.graph.call_method("split", (whole, sizes, dim))
                split._rename(f"{whole.name}_parts")
                self.parts[whole, dim] = [edit.call(self.graph, operator.getitem, split, i,
                                                    name=f"{whole.name}_{i}of{self.found.n}")
                                          for i in range(self.found.n)]  # fmt: skip
        return self.parts[whole, dim]

    def _take(self, split: Node) -> None:
        """A region's chunks take the parts."""
        parts = self._of(split.args[0], split.args[2], split)
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
        if len(sized) == len(readers) or node in self.found.cats:
            return
        dim = self.found.dims[node]
        with edit.at(node, after=True):
            whole = edit.call(self.graph, torch.cat, self.parts[node, dim], dim, name=f"{node.name}_all")
        whole.meta["val"] = value(node)
        for user in readers:
            if user not in sized:
                user.replace_input_with(node, whole)

    # ---- sizes

    def _shares(self, size: Size) -> list[Node | int]:
        """The same of the parts of the batch; of the last as what the others leave, so that all are known to be the
        whole."""
        batch, n = self.found.batch, self.found.n
        if isinstance(size, int):
            return [size // batch * (batch * (i + 1) // n - batch * i // n) for i in range(n)]
        if size not in self.shares:
            whole = self._size(batch) if size == batch else self._shares(batch)
            rest = self._size(quotient(size, batch))
            with edit.at(self.first):
                if size != batch:
                    made = [edit.call(self.graph, operator.mul, part, rest) for part in whole]
                else:
                    made = [edit.call(self.graph, torch.ops.moefx.num_chunk_rows.default, self.given, 0, i, n,
                                      name="samples") for i in range(n - 1)]  # fmt: skip
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
