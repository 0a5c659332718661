"""Cut every MoE region into n chunks, whose exchanges and computations can overlap.

Contract
    takes  MOE   regions between enter_experts and leave_experts
    gives  MOE   the same regions n times, each on its share of the rows, and their results put together again
    never  changes what a token gets: rows are independent between enter and leave. The router is not cut.

Pseudo-code
    dropless regions are cut by tokens: chunk i routes, dispatches and combines tokens i*T//n to (i+1)*T//n
    capacity regions are cut along their capacity in the same way; every chunk has rows of all experts, so each keeps a
    full all-to-all

    y = combine(leave(experts(enter(dispatch(x, perm)))), perm)
        ->  x0, x1 = split(x); y0 = combine(leave(..x0..)); y1 = combine(leave(..x1..)); y = cat(y0, y1)

The chunks stand interleaved: every op of the region becomes its n copies in a row. `order` gives them their order in
time. Token counts may be smaller than n: empty chunks are ordinary ones.
"""

from __future__ import annotations

import itertools
import operator

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx.analysis.region_rows import BlockRows, RegionRows, rows_of
from moefx.context.decisions import Chunk
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import expr
from moefx.ir.ops.regions import CHUNKED, enter_experts, leave_experts

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    markers = gm.graph.find_nodes(op="call_function", target=enter_experts)
    for number in sorted({node.args[-1] for node in markers}):
        n = ctx.choice(number).chunks
        if n <= 1:
            continue
        rows = rows_of(gm, number)
        reason = rows.find()
        if reason is not None:
            result.skip(rows.enters[0], reason)
            continue
        _Cut(gm, number, n, rows, ctx).rewrite()
        result.changed(f"region {number} in {n} chunks")
    return result


class _Cut:
    """Copies the nodes of one region n times."""

    def __init__(self, gm: GraphModule, number: int, n: int, rows: RegionRows, ctx: PassContext) -> None:
        self.gm, self.number, self.n, self.rows, self.ctx = gm, number, n, rows, ctx
        self.pieces: dict[tuple[Node, int], list[Node]] = {}  # (whole, dim) -> its chunks
        self.sizes: dict[sympy.Expr, list[int | Node]] = {}  # a whole size -> the sizes of the chunks

    def rewrite(self) -> None:
        numbers = self._numbers()
        copies: dict[Node, list[Node]] = {}
        for node in self.rows.inner:
            copies[node] = []
            for i in range(self.n):
                replaced = self._arguments(node, i, copies)
                with edit.at(node):
                    new = self.gm.graph.node_copy(node, replaced.__getitem__)
                new._rename(f"{node.name}_c{i}")
                if node.target in (enter_experts, leave_experts):
                    new.args = (*new.args[:-1], numbers[i])
                copies[node].append(new)
        for node, dim in self.rows.results.items():
            with edit.at(node, after=True):
                whole = edit.call(self.gm.graph, torch.cat, copies[node], dim, name=f"{node.name}_all")
            whole.meta |= {"val": edit.tensor_value(node), CHUNKED: self.number}
            edit.rewrite_uses(node, whole)
        edit.erase_unused(self.rows.dead)
        for node in reversed(self.rows.inner):
            self.gm.graph.erase_node(node)
        edit.move_in_order(self.gm)

    def _numbers(self) -> list[int]:
        markers = self.gm.graph.find_nodes(op="call_function", target=enter_experts)
        free = max(node.args[-1] for node in markers) + 1
        numbers = [self.number, *range(free, free + self.n - 1)]
        self.ctx.decisions.chunks.update({number: Chunk(self.number, i, self.n) for i, number in enumerate(numbers)})
        return numbers

    def _arguments(self, node: Node, i: int, copies: dict[Node, list[Node]]) -> dict[Node, Node]:
        replaced = {}
        for argument in node.all_input_nodes:
            if argument in copies:
                replaced[argument] = copies[argument][i]
            else:
                dim = self.rows.dim_to_cut(node, argument)
                replaced[argument] = argument if dim is None else self._piece(node, argument, dim, i)
        return replaced

    def _piece(self, node: Node, whole: Node, dim: int, i: int) -> Node:
        """Chunk i of `whole` along `dim`; cut once, right before its first use."""
        key = whole, dim % edit.tensor_value(whole).dim()
        if key not in self.pieces:
            with edit.at(node):
                sizes = self._sizes(whole, key[1])
                parts = self.gm.graph.call_method("split", (whole, sizes, key[1]))
                parts._rename(f"{whole.name}_parts")
                parts.meta[CHUNKED] = self.number
                self.pieces[key] = [
                    edit.call(self.gm.graph, operator.getitem, parts, j, name=f"{whole.name}_{j}of{self.n}")
                    for j in range(self.n)
                ]
        return self.pieces[key][i]

    def _sizes(self, whole: Node, dim: int) -> list[int | Node]:
        size, graph, n = edit.tensor_value(whole).shape[dim], self.gm.graph, self.n
        if not isinstance(size, torch.SymInt):
            return [size * (j + 1) // n - size * j // n for j in range(n)]
        if isinstance(self.rows, BlockRows):
            return self._sizes_of_blocks(whole, dim)
        if expr(size) not in self.sizes:
            total = graph.call_method("size", (whole, dim))
            ends = [graph.call_function(operator.floordiv, (total, n))]
            for j in range(2, n):
                scaled = graph.call_function(operator.mul, (total, j))
                ends.append(graph.call_function(operator.floordiv, (scaled, n)))
            ends.append(total)
            steps = [graph.call_function(operator.sub, (b, a)) for a, b in itertools.pairwise(ends)]
            self.sizes[expr(size)] = [ends[0], *steps]
        return self.sizes[expr(size)]

    def _sizes_of_blocks(self, whole: Node, dim: int) -> list[int | Node]:
        """The last one as what the others leave: so their sum is known to be the whole."""
        total = expr(edit.tensor_value(whole).shape[dim])
        if total not in self.sizes:
            graph = self.gm.graph
            last = graph.call_method("size", (whole, dim))
            sizes = [edit.call(graph, _ops.num_chunk_rows.default, whole, dim, i, self.n, name="chunk_rows")
                     for i in range(self.n - 1)]  # fmt: skip
            for size in sizes:
                last = graph.call_function(operator.sub, (last, size))
            self.sizes[total] = [*sizes, last]
        return self.sizes[total]
