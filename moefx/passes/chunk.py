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
from abc import ABC, abstractmethod
from collections.abc import Iterable

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx.context.decisions import Chunk
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import is_reshape, trace
from moefx.ir.fates import How, Operand
from moefx.ir.op import expr, lookup, value
from moefx.ir.ops.regions import enter_experts, leave_experts
from moefx.ir.regions import per_token

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    markers = gm.graph.find_nodes(op="call_function", target=enter_experts)
    wanted = edit.ancestors([gm.graph.output_node()])
    for number in sorted({node.args[-1] for node in markers}):
        n = ctx.choice(number).chunks
        if n <= 1:
            continue
        enters = [m for m in markers if m.args[-1] == number]
        cut = (_Tokens if enters[0].args[1] is not None else _Blocks)(gm, number, n, ctx)
        reason = cut.find(enters, wanted)
        if reason is not None:
            result.skip(enters[0], reason)
            continue
        cut.rewrite()
        result.changed(f"region {number} in {n} chunks")
    return result


class _Cut(ABC):
    """Copies the nodes of one region n times. `inner`: the nodes to copy, in graph order; `dead`: what hung on them and
    nobody wants; `results`: nodes used outside, with the dim of their rows."""

    def __init__(self, gm: GraphModule, number: int, n: int, ctx: PassContext) -> None:
        self.gm, self.number, self.n, self.ctx = gm, number, n, ctx
        self.inner: list[Node] = []
        self.dead: set[Node] = set()
        self.results: dict[Node, int] = {}
        self.pieces: dict[tuple[Node, int], list[Node]] = {}  # (whole, dim) -> its chunks
        self.sizes: dict[sympy.Expr, list[int | Node]] = {}  # a whole size -> the sizes of the chunks

    def rewrite(self) -> None:
        numbers = self._numbers()
        copies: dict[Node, list[Node]] = {}
        for node in self.inner:
            copies[node] = []
            for i in range(self.n):
                replaced = self._arguments(node, i, copies)
                with edit.at(node):
                    new = self.gm.graph.node_copy(node, replaced.__getitem__)
                new._rename(f"{node.name}_c{i}")
                if node.target in (enter_experts, leave_experts):
                    new.args = (*new.args[:-1], numbers[i])
                copies[node].append(new)
        for node, dim in self.results.items():
            with edit.at(node, after=True):
                whole = edit.call(self.gm.graph, torch.cat, copies[node], dim, name=f"{node.name}_all")
            whole.meta["val"] = edit.tensor_value(node)
            edit.rewrite_uses(node, whole)
        edit.erase_unused(self.dead)
        for node in reversed(self.inner):
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
                dim = self._dim_to_cut(node, argument)
                replaced[argument] = argument if dim is None else self._piece(node, argument, dim, i)
        return replaced

    def _reason_against(self, rows: dict[Node, set[int]], size: sympy.Expr, what: str) -> str | None:
        """Why some op of the region cannot be done chunk by chunk; None: all of them can.

        rows: the dims of rows of what ops of the dialect give, `size` of them in all. Those of the rest follow.
        """
        for node in self.inner:
            operands = trace(node)
            if node not in rows:
                rows[node] = _rows_of(node, operands, rows, size)
                if any(_mixes(node, operand, rows.get(operand.node, ())) for operand in operands or ()):
                    return f"{node.name} mixes rows"
            for dim, held in sizes_held(node).items():
                if dim in rows[node] and type(given := held.of(node)) is int and given != -1:
                    return f"{node.name} fixes {what} as {given}"
            for argument in node.all_input_nodes:
                if argument in rows or self._dim_to_cut(node, argument) is not None:
                    continue
                if _is_of_rows(argument, operands, rows[node], size):
                    return f"{node.name} reads {argument.name}, whose size depends on {what}"
        return None

    @abstractmethod
    def _dim_to_cut(self, node: Node, argument: Node) -> int | None:
        """The dim along which a chunk's copy of `node` takes its share of `argument`; None: it reads the whole."""

    def _piece(self, node: Node, whole: Node, dim: int, i: int) -> Node:
        """Chunk i of `whole` along `dim`; cut once, right before its first use."""
        key = whole, dim % edit.tensor_value(whole).dim()
        if key not in self.pieces:
            with edit.at(node):
                sizes = self._sizes(whole, key[1])
                parts = self.gm.graph.call_method("split", (whole, sizes, key[1]))
                parts._rename(f"{whole.name}_parts")
                self.pieces[key] = [
                    edit.call(self.gm.graph, operator.getitem, parts, j, name=f"{whole.name}_{j}of{self.n}")
                    for j in range(self.n)
                ]
        return self.pieces[key][i]

    def _sizes(self, whole: Node, dim: int) -> list[int | Node]:
        size, graph, n = edit.tensor_value(whole).shape[dim], self.gm.graph, self.n
        if not isinstance(size, torch.SymInt):
            return [size * (j + 1) // n - size * j // n for j in range(n)]
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


class _Tokens(_Cut):
    """A dropless region: from its routing to its combines."""

    def find(self, enters: list[Node], wanted: set[Node]) -> str | None:
        counts = enters[0].args[1]
        self.route = counts.args[0]
        inside = edit.descendants([self.route], until=_ops.combine.default)
        combines = [node for node in inside if node.target is _ops.combine.default]
        alive = edit.ancestors(combines)
        self.inner = [n for n in self.gm.graph.nodes if n in inside & alive]
        self.dead = inside - alive - wanted
        for node in self.inner:
            if node not in combines and any(u in wanted and u not in alive & inside for u in node.users):
                return f"{node.name} depends on the routing, but not through a combine"
        self.results = dict.fromkeys(combines, 0)
        shape = edit.tensor_value(self.route.args[0]).shape
        rows = {n: {0} for n in self.inner if _moves_rows(n)}
        rows |= {n: {0} if n.target is operator.getitem and n.args[1] == 0 else set() for n in self.route.users}
        pairs = expr(shape[0]) * expr(shape[1])
        return self._reason_against({self.route: set(), **rows}, pairs, "the number of tokens")

    def _dim_to_cut(self, node: Node, argument: Node) -> int | None:
        return 0 if argument in per_token(node) else None


class _Blocks(_Cut):
    """A capacity region: from enter_experts to leave_experts."""

    def find(self, enters: list[Node], wanted: set[Node]) -> str | None:
        leaves = [node for node in self.gm.graph.find_nodes(op="call_function", target=leave_experts)
                  if node.args[-1] == self.number]
        inside = edit.descendants(enters) & edit.ancestors(leaves)
        self.inner = [n for n in self.gm.graph.nodes if n in inside]
        self.results = {node: node.args[3] for node in leaves}
        capacity = expr(edit.tensor_value(enters[0]).shape[enters[0].args[3]])
        return self._reason_against({node: {node.args[3]} for node in enters}, capacity, "the capacity")

    def _dim_to_cut(self, node: Node, argument: Node) -> int | None:
        return node.args[3] if node.target is enter_experts else None


def _moves_rows(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.tokens is not None and bool(op.tokens.orders)


def _rows_of(node: Node, operands: list[Operand] | None, rows: dict[Node, set[int]], size: sympy.Expr) -> set[int]:
    """Which dims of a node's result run over rows: as its operands say, or by their size if the op is unknown."""
    if operands is None:
        tensor = edit.tensor_value(node)
        return set() if tensor is None else {i for i, each in enumerate(tensor.shape) if expr(each) == size}
    return {place.dim for operand in operands for dim in rows.get(operand.node, ()) for place in operand.dims[dim].to}


def _mixes(node: Node, operand: Operand, rows: Iterable[int]) -> bool:
    hows = {operand.dims[dim].how for dim in rows}
    return bool(hows & {How.REDUCED, How.CONTRACTED, How.ORDERED}) or (How.MIXED in hows and not is_reshape(node))


def _is_of_rows(argument: Node, operands: list[Operand] | None, rows: set[int], size: sympy.Expr) -> bool:
    """Whether an op needs the part of a value from outside that belongs to its rows, or may do so. rows: the dims of
    its result that run over rows."""
    found = value(argument)
    if not isinstance(found, torch.Tensor):
        sizes = [found]
    elif operands is None:
        sizes = list(found.shape)
        if found.dim() > 1 and expr(sizes[0]) == size:
            return True
    else:
        sizes = []
        for operand in (o for o in operands if o.node is argument):
            kept = [fate for fate in operand.dims if fate.how is How.KEPT]
            if any(place.dim in rows for fate in kept for place in fate.to):
                return True  # and of those that are taken by number nobody knows of what the numbers are
            sizes += [each for each, fate in zip(found.shape, operand.dims) if fate.how not in (How.KEPT, How.SHARED)]
    return any(isinstance(each, torch.SymInt) and expr(each).free_symbols & size.free_symbols for each in sizes)
