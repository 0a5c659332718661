"""Ways to write that rows are taken by an index, put by an index, and brought from pairs to tokens.

Pairs are those of tokens and their choices: P = T*K of them, token by token.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.dim_indexing import items
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes

ZEROS = ("zeros_like", "zeros", "new_zeros")
FRESH = (*ZEROS, "empty_like", "empty", "new_empty")
JOINS = ("cat", "concat", "concatenate", "vstack", "row_stack")
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous")


@dataclass(frozen=True)
class Placed:
    """rows put at, or added to, the places `indices` of `base`. whole: what has all of it then."""

    base: Node
    indices: tuple
    rows: Node
    adds: bool
    whole: Node

    @property
    def index(self) -> Node:
        """Of whole rows."""
        return self.indices[0]


@dataclass(frozen=True)
class Summed:
    """The sum over the choices of a token, [P, D] -> [T, D], of `pairs` in this dtype, times `weights` [T, K]."""

    pairs: Node
    dtype: torch.dtype
    weights: Node | None


def taken(node: Node) -> tuple[Node, Node] | None:
    """(source, index) of source[index], for an index of whole rows."""
    name = op_name(node)
    if node.target is operator.getitem and isinstance(node.args[1], Node):
        return node.args
    if name in ("index_select", "gather") and arg(node, 1, "dim") == 0:
        index = arg(node, 2, "index")
        index = of_rows(index) if name == "gather" else index
        return None if index is None else (node.args[0], index)
    return None


def entry(node: Node) -> tuple[int, int] | None:
    """(axis, number) of x.select(axis, number), x[number], x[:, number] or x[.., number]; None for anything else."""
    x = edit.tensor_value(node.args[0]) if node.args else None
    if x is None or (op_name(node) != "select" and node.target is not operator.getitem):
        return None
    if op_name(node) == "select":
        found = [(arg(node, 1, "dim") % x.dim(), arg(node, 2, "index"))]
    else:
        item = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        found = [each for each in items(item, x.dim()) or () if each[1] != slice(None)] if None not in item else []
    return found[0] if len(found) == 1 and type(found[0][1]) is int and found[0][1] >= 0 else None


def placed(node: Node) -> Placed | None:
    """Whole rows that are put by one index."""
    found = put(node)
    return found if found is not None and len(found.indices) == 1 and isinstance(found.index, Node) else None


def put(node: Node) -> Placed | None:
    """Rows that are put by one index or several."""
    name, base = op_name(node).rstrip("_"), node.args[0] if node.args else None
    how = node.kwargs.get("alpha", 1), arg(node, 4, "reduce", "sum"), node.kwargs.get("include_self", True)
    if node.target is operator.setitem:
        found = node.args[1], node.args[2], False, base
    elif how != (1, "sum", True):
        return None
    elif name in ("index_add", "index_copy") and arg(node, 1, "dim") == 0:
        found = arg(node, 2, "index"), arg(node, 3, "source"), name == "index_add", node
    elif name in ("scatter", "scatter_add", "scatter_reduce") and arg(node, 1, "dim") == 0:
        found = of_rows(arg(node, 2, "index")), arg(node, 3, "src"), name != "scatter", node
    elif name == "index_put":
        found = arg(node, 1, "indices"), arg(node, 2, "values"), arg(node, 3, "accumulate", False) is True, node
    else:
        return None
    indices, rows, adds, whole = found
    indices = tuple(indices) if isinstance(indices, (tuple, list)) else (indices,)
    return Placed(base, indices, rows, adds, whole) if isinstance(rows, Node) and None not in indices[:1] else None


def of_rows(index: Any) -> Node | None:
    """i for i[:, None].expand(-1, D), which takes whole rows."""
    if not isinstance(index, Node) or op_name(index) not in ("expand", "expand_as", "repeat"):
        return None
    column = index.args[0]
    shape = sizes(column)
    if len(shape) != 2 or shape[1] != 1 or len(sizes(index)) != 2 or sizes(index)[0] != shape[0]:
        return None
    rows = column.args[0] if op_name(column) in ("view", "reshape", "unsqueeze", "getitem") else None
    return rows if rows is not None and sizes(rows) == shape[:1] else None


def summed(node: Node, k: int) -> Summed | None:
    """pairs.view(T, K, D).sum(1), or the same with `* weights[:, :, None]` before the sum."""
    dim = arg(node, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if op_name(node) != "sum" or dim not in (1, -2) or node.kwargs.get("keepdim") or len(node.args) > 2:
        return None
    value = _uncast(node.args[0])
    factors = value.args[:2] if op_name(value) == "mul" else (value, None)
    for view, factor in (factors, factors[::-1]):
        view = _uncast(view)
        if not isinstance(view, Node) or op_name(view) not in ("view", "reshape", "unflatten"):
            continue
        pairs, shape = view.args[0], sizes(view)
        if len(shape) != 3 or shape[1] != k or len(sizes(pairs)) != 2 or shape[2] != sizes(pairs)[1]:
            continue
        weights = None if factor is None else _weights(factor, shape)
        if (factor is None) == (weights is None):
            return Summed(pairs, edit.tensor_value(view).dtype, weights)
    return None


def _weights(factor: Any, shape: tuple) -> Node | None:
    """w [T, K] of w[:, :, None]."""
    if not isinstance(factor, Node) or sizes(factor) != (*shape[:2], 1):
        return None
    factor = _uncast(factor)
    if op_name(factor) not in ("unsqueeze", "getitem", "view", "reshape"):
        return None
    return factor.args[0] if sizes(factor.args[0]) == shape[:2] else None


def _uncast(node: Any) -> Any:
    while isinstance(node, Node) and op_name(node) in CASTS:
        node = node.args[0]
    return node
