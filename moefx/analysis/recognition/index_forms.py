"""One form for each of the ways to index: what canonicalize does to the indices of a graph."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx.analysis.recognition.host_numbers import is_number, readers
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import value
from moefx.ir.shapes import sizes
from moefx.ir.writes import root, storage, users_of_memory, writes


def shorten(gm: GraphModule) -> None:
    """x[i, :] and x[i, ...] become x[i], x[i, None] becomes x[i].unsqueeze(1), and so does x[i, 3:4]:
    x[i, 3].unsqueeze(1). x.unsqueeze(0)[:, i] becomes x[i].unsqueeze(0)."""
    for node in list(gm.graph.nodes):
        if node.target is operator.getitem and _is_behind_one(node):
            with edit.at(node):
                rows = edit.valued(edit.call(gm.graph, operator.getitem, node.args[0].args[0], node.args[1][1:]))
                wide = gm.graph.call_method("unsqueeze", (rows, 0))
            wide.meta["val"] = edit.tensor_value(node)
            node.replace_all_uses_with(wide)
            gm.graph.erase_node(node)
    for node in list(gm.graph.nodes):
        item = node.args[1] if node.target in (operator.getitem, operator.setitem) else None
        if not isinstance(item, tuple) or not any(isinstance(i, Node) for i in item):
            continue
        while len(item) > 1 and item[-1] in _ALL_OF_IT:
            item = item[:-1]
        node.update_arg(1, item[0] if len(item) == 1 else item)
        if node.target is operator.getitem and len(item) == 2 and _takes_one(node) and _rows_taken(node) == 1:
            with edit.at(node):
                narrow = item[0] if item[1] is None else (item[0], item[1].start or 0)
                rows = edit.call(gm.graph, operator.getitem, node.args[0], narrow)
                wide = gm.graph.call_method("unsqueeze", (rows, 1))
            wide.meta["val"] = edit.tensor_value(node)
            rows.meta["val"] = edit.tensor_value(node).select(1, 0)
            node.replace_all_uses_with(wide)
            gm.graph.erase_node(node)


def _is_behind_one(node: Node) -> bool:
    """Whether x.unsqueeze(0)[:, i, ..] picks rows of x."""
    x, item = node.args
    picks = isinstance(item, tuple) and len(item) > 1 and item[0] == slice(None) and isinstance(item[1], Node)
    return picks and isinstance(x, Node) and op_name(x) == "unsqueeze" and arg(x, 1, "dim") == 0


def on_one_axis(gm: GraphModule) -> None:
    """x[i] of places [n, 1], as nonzero() gives them, becomes x[i.squeeze(1)].unsqueeze(1), and x[i] = y, with y
    [n, 1, ..], x[i.squeeze(1)] = y.squeeze(1)."""
    flat: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        item = node.args[1] if node.target in (operator.getitem, operator.setitem) else None
        found = edit.tensor_value(item) if isinstance(item, Node) else None
        if found is None or found.dtype is not torch.int64 or sizes(item)[1:] != (1,):
            continue
        puts = node.target is operator.setitem
        if puts and (edit.tensor_value(node.args[2]) is None or sizes(node.args[2])[:2] != sizes(item)):
            continue
        if item not in flat:
            with edit.at(item, after=True):
                flat[item] = edit.valued(gm.graph.call_method("squeeze", (item, 1)))
        with edit.at(node):
            if puts:
                rows = edit.valued(gm.graph.call_method("squeeze", (node.args[2], 1)))
                node.args = (node.args[0], flat[item], rows)
                continue
            rows = edit.valued(edit.call(gm.graph, operator.getitem, node.args[0], flat[item]))
            wide = gm.graph.call_method("unsqueeze", (rows, 1))
        wide.meta["val"] = edit.tensor_value(node)
        node.replace_all_uses_with(wide)
        gm.graph.erase_node(node)


def _takes_one(node: Node) -> bool:
    """Whether the second index of a read makes an axis of one entry."""
    second, found = node.args[1][1], edit.tensor_value(node)
    if not isinstance(second, slice):
        return second is None
    start, stop = second.start or 0, second.stop
    is_one = type(start) is int and type(stop) is int and 0 <= start == stop - 1 and second.step in (None, 1)
    return is_one and type(found.shape[1]) is int and found.shape[1] == 1


def _rows_taken(node: Node) -> int:
    """How many dims the first index of a read gives."""
    return _dims_of(node.args[1][0])


def _dims_of(index: Node) -> int:
    found = edit.tensor_value(index)
    return 0 if found is None else 1 if found.dtype is torch.bool else found.dim()


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
        dtype = edit.tensor_value(x).dtype
        fits = isinstance(rows, Node) and torch.promote_types(edit.tensor_value(rows).dtype, dtype) == dtype
        checks = readers(old, but=total)
        if fits and checks is not None and not _is_written(old, node, (x, mask)):
            with edit.at(node):
                rows = ragged.Rows(gm, edit.tensor_value(x).fake_mode, "").cast(rows, dtype)
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
        if writes(node) and isinstance(node.args[0], Node) and storage(node.args[0]) in memory:
            return True
        node = node.next
    return False


def _read_at_once(gm: GraphModule) -> None:
    """w[tokens][:, c] becomes w[tokens, c]."""
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        rows, item = node.args
        inner = rows.args[1] if isinstance(rows, Node) and rows.target is operator.getitem else None
        front = inner if isinstance(inner, tuple) else (inner,)
        of_column = isinstance(item, tuple) and len(item) > 1 and item[0] == slice(None) and type(item[1]) is int
        if not of_column or edit.tensor_value(rows) is None or None in (dims := list(map(_index_dims, front))):
            continue
        whole = rows.args[0]
        if sum(dims) + 1 == edit.tensor_value(whole).dim() and not any(
                is_written for each in (whole, *front) for is_written in users_of_memory(root(each)).values()):
            node.args = (whole, (*front, *item[1:]))
            edit.erase_unused([rows])


def _index_dims(index: object) -> int | None:
    """How many axes an index of whole rows takes; None: it is another one."""
    found = edit.tensor_value(index)
    if found is None or (found.dtype is not torch.bool and found.dim() != 1):
        return None
    return found.dim()


def columns(gm: GraphModule) -> None:
    """w[tokens, c], or w[tokens][:, c], of one column c for several experts becomes w[.., c][tokens]."""
    _read_at_once(gm)
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
            of_one = edit.valued(gm.graph.call_method("select", (x, -1, column)))
        for node, front, rest in found:
            item = (*front, *rest)
            node.args = (of_one, item[0] if len(item) == 1 else item)


def of_tokens(gm: GraphModule, node: Node) -> None:
    """where(numbers) becomes where(numbers != 0), and where of [1, T] that of [T]: the place on the other axis is 0."""
    picked, found = node.args[0], edit.tensor_value(node.args[0])
    single = [dim for dim, size in enumerate(found.shape) if type(size) is int and size == 1]
    as_tuple = isinstance(value(node), tuple) and all(u.target is operator.getitem for u in node.users)
    axes = single if as_tuple and 0 < len(single) < found.dim() else []
    if not axes and found.dtype is torch.bool:
        return
    emit = ragged.Rows(gm, found.fake_mode, "")
    with edit.at(node):
        mask = picked if found.dtype is torch.bool else emit.emit_call(operator.ne, picked, 0)
        for dim in reversed(axes):
            mask = emit.method("squeeze", mask, dim)
    node.update_arg(0, mask)
    if not axes:
        return
    left = [dim for dim in range(found.dim()) if dim not in axes]
    node.meta["val"] = tuple(value(node)[dim] for dim in left)
    for part in list(node.users):
        dim = part.args[1] % found.dim()
        if dim in left:
            part.args = (node, left.index(dim))
        else:
            _read_at_zero(part, emit)


def _read_at_zero(place: Node, emit: ragged.Rows) -> None:
    for user in list(place.users):
        item = user.args[1] if user.target is operator.getitem else None
        if isinstance(item, tuple) and place in item[1:] and place is not user.args[0]:
            user.args = (user.args[0], tuple(0 if i is place else i for i in item))
    if place.users:
        with edit.at(place):
            other = emit.emit_call(operator.getitem, place.args[0], 0)
            zeros = emit.emit_call(torch.zeros_like, other)
        place.replace_all_uses_with(other, delete_user_cb=is_number)
        place.replace_all_uses_with(zeros)
        edit.erase_unused([zeros])
    place.graph.erase_node(place)


def masked_rows(gm: GraphModule) -> None:
    """x.masked_select(mask[:, None]).view(-1, D) becomes x[mask], zeros.masked_scatter(mask[:, None], rows) becomes
    zeros.index_put((mask,), rows), of rows that were picked themselves: of others there may be more than are put."""
    for node in list(gm.graph.nodes):
        name = op_name(node)
        select = node.args[0] if name in ("view", "reshape", "unflatten") else None
        is_select = isinstance(select, Node) and op_name(select) == "masked_select"
        if not is_select and name != "masked_scatter":
            continue
        x, mask = (select if is_select else node).args[:2]
        rows, width = _mask_of_rows(mask), sizes(x)[1:]
        source = None if is_select else arg(node, 2, "source")
        fits = sizes(node)[1:] == width if is_select else bool(free_unbacked_symbols(value(source)))
        if rows is None or len(width) != 1 or not width[0].is_Integer or sizes(rows) != sizes(x)[:1] or not fits:
            continue
        with edit.at(node):
            if is_select:
                new = edit.call(gm.graph, operator.getitem, x, rows)
            else:
                emit = ragged.Rows(gm, edit.tensor_value(node).fake_mode, "")
                source = source if sizes(source)[1:] == width else emit.method("view", source, -1, int(width[0]))
                new = gm.graph.call_method("index_put", (x, (rows,), source))
        new.meta["val"] = edit.tensor_value(node)
        node.replace_all_uses_with(new)
        edit.erase_unused([node, *([select] if is_select else [])])


def _mask_of_rows(mask: Node) -> Node | None:
    """m of m[:, None], expanded or not."""
    column = mask.args[0] if op_name(mask) in ("expand", "expand_as") else mask
    is_column = op_name(column) in ("unsqueeze", "getitem", "view", "reshape") and sizes(column)[1:] == (1,)
    return column.args[0] if is_column and sizes(column.args[0]) == sizes(column)[:1] else None
