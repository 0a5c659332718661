"""Where user code adds up the counts of all experts, which gives the number of the rows that it has anyway.

torchtitan's loop takes rows for padded: those that it leaves out, and gives back as zeros, are none on one device.

    total = sum(counts.tolist()); parts = rows[:total].split(..)         ->   parts = rows.split(..)
    vstack((cat(outs), outs.new_zeros((rows.shape[0] - total, D))))      ->   cat(outs)
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch.fx import Node

from moefx.analysis.recognition.facts import Flat, Span
from moefx.analysis.recognition.indexing import JOINS
from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value

_ZEROS = ("zeros", "new_zeros", "empty", "new_empty", "full", "new_full", "ones", "new_ones")


def drop_padding(nodes: list[Node], found: dict[Node, Any], counts: dict[Flat, Node]) -> int:
    """Rewrite what cuts rows to their own number, or adds no rows to them; returns how many nodes went.

    found: the facts of `slices`; counts: of every routing."""
    padding: set[Any] = set()  # numbers that are zero, and tensors of so many rows
    gone = []
    for node in nodes:
        is_none = op_name(node) in ("sub", "isub") and _is_all(node.args[1], node.args[0], found, counts)
        if is_none or (op_name(node) in _ZEROS and node.all_input_nodes and _first_size(node) in padding):
            padding.add(node)
        elif op_name(node) in JOINS and arg(node, 1, "dim", 0) == 0:
            rest = [part for part in arg(node, 0, "tensors") if part not in padding]
            if len(rest) == 1 and len(arg(node, 0, "tensors")) > 1 and _dims(rest[0]) == _dims(node):
                gone.append((node, rest[0]))
        elif node.target is operator.getitem and _is_cut(node, found, counts):
            gone.append((node, node.args[0]))
    for node, same in gone:
        node.replace_all_uses_with(same)
    edit.erase_unused([*(node for node, _ in gone), *padding])
    return len(gone)


def _is_all(number: Any, rows: Any, found: dict, counts: dict) -> bool:
    """Whether a number counts what all experts got together, and there are as many rows."""
    fact = found.get(number) if isinstance(number, Node) else None
    if not isinstance(fact, Span) or fact.ids not in counts or fact.start != 0:
        return False
    pairs = math.prod(edit.tensor_value(fact.ids.of).shape)
    size = value(rows) if isinstance(rows, Node) else rows
    return fact.stop == edit.tensor_value(counts[fact.ids]).shape[0] and expr(size) == expr(pairs)


def _is_cut(node: Node, found: dict, counts: dict) -> bool:
    """rows[:number of all rows]."""
    rows, item = edit.tensor_value(node.args[0]), node.args[1]
    first, *rest = item if isinstance(item, tuple) else (item,)
    if rows is None or rows.dim() == 0 or not isinstance(first, slice) or first.start or first.step:
        return False
    return all(i in (slice(None), Ellipsis) for i in rest) and _is_all(first.stop, rows.shape[0], found, counts)


def _first_size(node: Node) -> Any:
    sizes = node.args[1:] if op_name(node).startswith("new_") else node.args
    sizes = sizes or (node.kwargs.get("size"),)
    return sizes[0][0] if isinstance(sizes[0], (tuple, list)) and sizes[0] else sizes[0]


def _dims(node: Node) -> int:
    return edit.tensor_value(node).dim()
