"""What of a region is cut where its rows are: into chunks, or into the shares of ranks that read the same data.

A dropless region is cut by tokens, from its routing to its combines; a capacity region along its capacity, from
enter_experts to leave_experts. Rows are independent in between, and the router is not cut.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import is_reshape, trace
from moefx.ir.fates import How, Operand
from moefx.ir.op import expr, lookup, value
from moefx.ir.ops.regions import enter_experts, leave_experts
from moefx.ir.randomness import first_draw
from moefx.ir.regions import per_token


class RegionRows(ABC):
    """`inner`: the nodes that work on rows, in graph order; `dead`: what hangs on them and nobody wants; `results`:
    nodes used outside, with the dim of their rows."""

    def __init__(self, gm: GraphModule, enters: list[Node]) -> None:
        self.gm, self.enters = gm, enters
        self.inner: list[Node] = []
        self.dead: set[Node] = set()
        self.results: dict[Node, int] = {}

    @abstractmethod
    def find(self) -> str | None:
        """Why the region cannot be cut; None: it can, and the fields are filled."""

    @abstractmethod
    def dim_to_cut(self, node: Node, argument: Node) -> int | None:
        """The dim along which `node` takes a share of `argument`, which comes from outside; None: it reads the whole.
        """

    def arguments(self, node: Node) -> dict[Node, int]:
        """What a node reads from outside, and is cut: {argument: dim}."""
        found = {a: self.dim_to_cut(node, a) for a in node.all_input_nodes if a not in self.inner}
        return {argument: dim for argument, dim in found.items() if dim is not None}

    def _reason_against(self, rows: dict[Node, set[int]], size: sympy.Expr, what: str) -> str | None:
        """Why some op of the region cannot be done share by share; None: all of them can.

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
                if argument in rows or self.dim_to_cut(node, argument) is not None:
                    continue
                if _is_of_rows(argument, operands, rows[node], size):
                    return f"{node.name} reads {argument.name}, whose size depends on {what}"
        return None


class TokenRows(RegionRows):
    """A dropless region: from its routing to its combines."""

    def find(self) -> str | None:
        counts, wanted = self.enters[0].args[1], edit.ancestors([self.gm.graph.output_node()])
        self.route = counts.args[0]
        inside = edit.closure([self.route], lambda node: () if _ends(node) else node.users)
        combines = [node for node in inside if _ends(node)]
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

    def dim_to_cut(self, node: Node, argument: Node) -> int | None:
        return 0 if argument in per_token(node) else None


class BlockRows(RegionRows):
    """A capacity region: from enter_experts to leave_experts."""

    def find(self) -> str | None:
        enters = self.enters
        leaves = [node for node in self.gm.graph.find_nodes(op="call_function", target=leave_experts)
                  if node.args[-1] == enters[0].args[-1]]
        inside = edit.descendants(enters) & edit.ancestors(leaves)
        self.inner = [n for n in self.gm.graph.nodes if n in inside]
        self.results = {node: node.args[3] for node in leaves}
        capacity = expr(edit.tensor_value(enters[0]).shape[enters[0].args[3]])
        return self._reason_against({node: {node.args[3]} for node in enters}, capacity, "the capacity")

    def dim_to_cut(self, node: Node, argument: Node) -> int | None:
        return node.args[3] if node.target is enter_experts else None


def rows_of(gm: GraphModule, number: int) -> RegionRows:
    """The rows of a region."""
    enters = [n for n in gm.graph.find_nodes(op="call_function", target=enter_experts) if n.args[-1] == number]
    return (BlockRows if enters[0].args[1] is None else TokenRows)(gm, enters)


def refuse_draws(nodes: Iterable[Node], copies: str, path: str) -> None:
    """Raises UnsupportedUse where one of these ops draws random numbers, and ranks along an axis, "" for none, have
    copies of the rows: these would no longer be equal, nor would the ranks' generators."""
    draw = first_draw(nodes)
    if copies and draw is not None:
        raise UnsupportedUse(f"{draw.name} draws random numbers, and other ones for every copy of a row that the ranks "
                             f"along '{copies}' send, who read the same data", where=path,
                             hint="experts without dropout, or a mesh with dims of its own for 'mp', 'ep' and 'esp'",
                             )  # fmt: skip


def _ends(node: Node) -> bool:
    """Whether rows are back with their tokens."""
    op = lookup(node)
    return op is not None and op.tokens is not None and op.tokens.ends


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
            kept = [fate for each, fate in zip(found.shape, operand.dims)
                    if fate.how is How.KEPT and (expr(each) != 1 or size == 1)]  # fmt: skip
            if any(place.dim in rows for fate in kept for place in fate.to):
                return True  # and of those that are taken by number nobody knows of what the numbers are
            sizes += [each for each, fate in zip(found.shape, operand.dims) if fate.how not in (How.KEPT, How.SHARED)]
    return any(isinstance(each, torch.SymInt) and expr(each).free_symbols & size.free_symbols for each in sizes)
