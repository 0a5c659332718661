"""Ops of one expert on its rows, done on the rows of all experts.

In the user's code the rows of an expert are numbered by the first axes of a tensor: [n, D], [B, S, D] where it computes
every token, [1, n, D], or [n * H, D / H] where it takes rows apart. Emitted are [R, D], [R, D], [R, D] and
[R, H, D / H]: one axis for the rows of all experts, and behind it what a row is made of.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch.fx import Node

from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.dim_arguments import is_view, named
from moefx.ir.dim_indexing import items
from moefx.ir.dims import is_reshape, trace
from moefx.ir.fates import How
from moefx.ir.names import called, op_name
from moefx.ir.op import expr
from moefx.ir.shapes import sizes


class RowOps:
    """number: of the rows of an expert in the user's code."""

    def __init__(self, region: ragged.Rows, number: sympy.Expr) -> None:
        self.region, self.number = region, number

    def copy(self, node: Node, new: dict[Node, Node], of_rows: set[Node]) -> Node:
        """The op of a node on what its arguments became. Raises RaiseError if it mixes rows."""
        rows = [a for a in node.all_input_nodes if a in of_rows and edit.tensor_value(a) is not None]
        found = {a: self._split(a) for a in rows}
        if None in found.values() or not rows:  # nothing is known of their rows: what comes of them is checked later
            return self.region.copy(node, new)
        fronts = {a: front for a, (front, _) in found.items()}
        plain = all(front == 1 and edit.tensor_value(new[a]).dim() == edit.tensor_value(a).dim()
                    for a, front in fronts.items())  # fmt: skip
        if is_reshape(node) or _takes_all(node):
            return self._reshaped(node, new, plain)
        for a in rows:
            _check_alone(node, a, fronts[a])
        if plain:
            return self.region.copy(node, new)
        return self.region.copy(node, new, *_from_the_end(node, rows[0], fronts[rows[0]]))

    def _split(self, node: Node) -> tuple[int, tuple[sympy.Expr, ...]] | None:
        """(how many axes number the rows, or parts of them; what a row has behind them)."""
        shape, total, parts = sizes(node), sympy.Integer(1), None
        for axis, size in enumerate(shape):
            total = total * size
            share = sympy.simplify(total / self.number)
            if share == 1:
                return axis + 1, shape[axis + 1 :]
            if parts is None and share.is_Integer:
                parts = axis + 1, (share, *shape[axis + 1 :])
        return parts

    def _reshaped(self, node: Node, new: dict[Node, Node], plain: bool) -> Node:
        x, found = new[node.args[0]], self._split(node)
        if found is None or not all(size.is_Integer for size in found[1]):
            raise RaiseError(f"{called(node)} mixes the rows of an expert", where=edit.place(node),
                             hint="keep the rows on the first dim")  # fmt: skip
        front, row = found
        if plain and front == 1 and len(row) == edit.tensor_value(node).dim() - 1:
            return self.region.copy(node, new)
        if tuple(expr(size) for size in edit.tensor_value(x).shape[1:]) == row:
            return x
        return self.region.method("reshape", x, -1, *map(int, row))


def _takes_all(node: Node) -> bool:
    """x[0] of [1, n, D]."""
    if node.target is not operator.getitem or items(node.args[1], 0) is None:
        return False
    return sympy.prod(sizes(node)) == sympy.prod(sizes(node.args[0]))


def _check_alone(node: Node, x: Node, front: int) -> None:
    """Softmaxes, sums, sorts and the like along the rows mix them."""
    if is_view(op_name(node)) or node.target is operator.getitem:
        return  # what they make of the rows is seen of sizes
    for operand in trace(node) or ():
        for dim, fate in enumerate(operand.dims[:front]) if operand.node is x else ():
            if fate.how not in (How.KEPT, How.SHARED, How.UNREAD):
                raise RaiseError(f"{called(node)} along dim {dim} mixes the rows of an expert", where=edit.place(node),
                                 hint="compute every row from itself")  # fmt: skip


def _axes(node: Node, x: Node) -> int:
    """How many axes the dims of an op count."""
    return edit.tensor_value(x).dim() + (op_name(node) == "stack")


def _from_the_end(node: Node, x: Node, front: int) -> tuple[tuple, dict[str, Any]]:
    """The arguments of an op, for tensors with other axes in front than `front` ones."""
    args, kwargs, count = list(node.args), dict(node.kwargs), _axes(node, x)
    if node.target is operator.getitem and isinstance(args[1], tuple):
        item = args[1]
        if item[0] is not Ellipsis and item[:front] == (slice(None),) * front:
            args[1] = (slice(None), *item[front:])
    for place, given in named(node):
        several = isinstance(given, (tuple, list))
        dims = [dim - count if dim >= 0 else dim for dim in (given if several else (given,))]
        if isinstance(place, str):
            kwargs[place] = dims if several else dims[0]
        elif place is not None:
            args[place : place + len(dims)] = [dims] if args[place] is given and several else dims
    return tuple(args), kwargs
