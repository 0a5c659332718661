"""One form for each of the ways to index: what canonicalize does to the indices of a graph."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.host_numbers import readers
from moefx.analysis.indexing import of_rows
from moefx.analysis.names import arg, op_name
from moefx.ir import edit
from moefx.ir.op import expr


def shorten(gm: GraphModule) -> None:
    """x[i, :] and x[i, ...] become x[i]."""
    for node in gm.graph.nodes:
        item = node.args[1] if node.target in (operator.getitem, operator.setitem) else None
        if not isinstance(item, tuple) or not any(isinstance(i, Node) for i in item):
            continue
        while len(item) > 1 and item[-1] in _ALL_OF_IT:
            item = item[:-1]
        node.update_arg(1, item[0] if len(item) == 1 else item)


_ALL_OF_IT = (slice(None), Ellipsis)


def add_to_masked(gm: GraphModule, node: Node) -> None:
    """x[mask] = x[mask] + y becomes x.index_put_(mask, y, accumulate=True): a mask names no place twice. Not where x or
    the mask changes between the read and the assignment."""
    if node.target is not operator.setitem:
        return
    x, mask, total = node.args
    found = edit.tensor_value(mask) if isinstance(mask, Node) else None
    if found is None or found.dtype is not torch.bool or not isinstance(total, Node):
        return
    if op_name(total) not in ("add", "iadd") or total.kwargs or len(total.args) != 2 or len(total.users) != 1:
        return
    for old, rows in (total.args, total.args[::-1]):
        if not isinstance(old, Node) or old.target is not operator.getitem or old.args != (x, mask):
            continue
        same = isinstance(rows, Node) and edit.tensor_value(rows).dtype == edit.tensor_value(x).dtype
        checks = readers(old, but=total)
        if same and checks is not None and not _is_written(old, node, (x, mask)):
            with edit.at(node):
                new = gm.graph.call_method("index_put_", (x, (mask,), rows, True))
            new.meta["val"] = edit.tensor_value(x)
            for dead in (node, total, *checks, old):
                gm.graph.erase_node(dead)
            return


def _is_written(start: Node, end: Node, tensors: tuple[Node, ...]) -> bool:
    """Whether an op between two nodes writes to what one of the tensors, or a view of it, stands on."""
    memory = {storage(tensor) for tensor in tensors}
    node = start.next
    while node is not end:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        writes = node.target is operator.setitem or name.endswith("_") or node.target in INPLACE_OPERATORS
        if writes and node.args and isinstance(node.args[0], Node) and storage(node.args[0]) in memory:
            return True
        node = node.next
    return False


def storage(node: Node) -> int | None:
    """What tensors over one memory have in common; None: the node is no tensor."""
    found = edit.tensor_value(node)
    return None if found is None else found.untyped_storage()._cdata


INPLACE_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}


def columns(gm: GraphModule) -> None:
    """w[tokens, c] of one column c for several experts becomes w[.., c][tokens]."""
    reads: dict[tuple[Node, int], list[tuple[Node, tuple, tuple]]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        x, item = node.args
        item = item if isinstance(item, tuple) else ()
        front = tuple(i for i in item if isinstance(i, Node))
        rest = item[len(front) :]
        if not front or item[: len(front)] != front or not rest or type(rest[0]) is not int:
            continue
        masks = [edit.tensor_value(i).dim() if edit.tensor_value(i).dtype is torch.bool else 1 for i in front]
        if sum(masks) + 1 == edit.tensor_value(x).dim() and all(i is None for i in rest[1:]):
            reads.setdefault((x, rest[0]), []).append((node, front, rest[1:]))
    for (x, column), found in reads.items():
        if len({front for _, front, _ in found}) < 2:  # scores of all experts are read so, each by its own tokens
            continue
        with edit.at(x, after=True):
            of_one = gm.graph.call_method("select", (x, -1, column))
        with compat.faking(edit.tensor_value(x).fake_mode):
            of_one.meta["val"] = edit.tensor_value(x).select(-1, column)
        for node, front, rest in found:
            item = (*front, *rest)
            node.args = (of_one, item[0] if len(item) == 1 else item)


def whole_rows(gm: GraphModule) -> None:
    """gather and scatter_add whose index [N, D] says one row for all columns become index_select and index_add."""
    for node in list(gm.graph.nodes):
        if op_name(node) not in ("gather", "scatter_add") or arg(node, 1, "dim") != 0:
            continue
        x, index = node.args[0], arg(node, 2, "index")
        rows, source = of_rows(index), arg(node, 3, "src")
        whole = sizes(index)[1:] == sizes(x)[1:] and (source is None or sizes(source) == sizes(index))
        if rows is None or not whole:
            continue
        with edit.at(node):
            name, more = ("index_select", ()) if source is None else ("index_add", (source,))
            new = gm.graph.call_method(name, (x, 0, rows, *more))
        new.meta["val"] = edit.tensor_value(node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


def sizes(node: Node) -> tuple:
    found = edit.tensor_value(node)
    return () if found is None else tuple(expr(size) for size in found.shape)
