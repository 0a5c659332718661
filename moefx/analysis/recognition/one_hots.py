"""One form for masks of all experts at once, and for what one expert takes of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.recognition.indexing import CASTS, entry
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes
from moefx.ir.writes import is_written


def write(gm: GraphModule) -> list[tuple[Any, Tensor]]:
    """ids[..., None] == arange(E) becomes one_hot(ids, E).to(bool), and mask.unbind(dim)[e] becomes
    mask.select(dim, e).

    The numbers may be those that an input holds. Returns the Sources of these, and what this is right for."""
    held: list[tuple[Any, Tensor]] = []
    for node in list(gm.graph.nodes):
        if op_name(node) == "eq":
            held += _name(gm, node)
        elif op_name(node) == "unbind" and _is_integral(node.args[0]):
            _select(gm, node)
    return held


def _name(gm: GraphModule, node: Node) -> list[tuple[Any, Tensor]]:
    left, right = node.args[0], arg(node, 1, "other")
    for ids, numbers in ((left, right), (right, left)):
        counted, source = _counted(numbers), _more_axes(ids)
        is_last = source is not None and sizes(ids) == (*sizes(source), 1) and len(sizes(numbers)) <= len(sizes(ids))
        if counted is None or not is_last or not _is_integral(source):
            continue
        emit, count = ragged.Rows(gm, edit.tensor_value(node).fake_mode, ""), int(sizes(numbers)[-1])
        with edit.at(node):
            hot = emit.emit_call(torch.ops.moefx.one_hot.default, source, count)
            node.replace_all_uses_with(emit.method("to", hot, torch.bool))
        gm.graph.erase_node(node)
        return [(counted.meta["moefx"], torch.arange(count))] if counted.op == "placeholder" else []
    return []


def _counted(numbers: object) -> Node | None:
    """What has 0, 1, .. E - 1, which `numbers` has along its last axis, before those of size one."""
    shape, source = sizes(numbers), numbers
    if not shape or not shape[-1].is_Integer or any(size != 1 for size in shape[:-1]) or not _is_integral(numbers):
        return None
    while op_name(source) in _SAME_NUMBERS or _more_axes(source) is not None:
        source = source.args[0]
    count, origin = int(shape[-1]), source.meta.get("moefx")
    if op_name(source) == "arange":
        plain = source.kwargs.keys() <= {"dtype", "device", "layout", "pin_memory", "requires_grad"}
        is_counted = plain and source.args in ((count,), (0, count), (0, count, 1))
    else:
        kind = None if origin is None else origin.kind
        found = origin.key if kind == "constant" else source.meta.get("held") if kind == "buffer" else None
        is_known = found is not None and not found.is_meta
        is_counted = is_known and torch.equal(found.cpu().flatten().long(), torch.arange(count))
    return source if is_counted and not is_written(source) else None


_SAME_NUMBERS = ("to", "long", "int", "contiguous", "detach")


def _more_axes(x: object) -> Node | None:
    """y of y.unsqueeze(-1), y[..., None] or y.view(*y.shape, 1), which have the same entries in the same order."""
    source = x.args[0] if isinstance(x, Node) and x.args else None
    if not isinstance(source, Node) or not sizes(source):
        return None
    if op_name(x) == "getitem":
        item = x.args[1] if isinstance(x.args[1], tuple) else (x.args[1],)
        return source if all(i is None or i is Ellipsis or i == slice(None) for i in item) else None
    return source if op_name(x) in ("unsqueeze", "view", "reshape") else None


def _is_integral(node: object) -> bool:
    found = edit.tensor_value(node)
    return found is not None and not (found.is_floating_point() or found.is_complex())


def _select(gm: GraphModule, node: Node) -> None:
    for piece in [user for user in node.users if user.target is operator.getitem and user.args[1] >= 0]:
        emit = ragged.Rows(gm, edit.tensor_value(node.args[0]).fake_mode, "")
        with edit.at(piece):
            piece.replace_all_uses_with(emit.method("select", node.args[0], arg(node, 1, "dim", 0), piece.args[1]))
        gm.graph.erase_node(piece)
    edit.erase_unused([node])


def compare(gm: GraphModule) -> None:
    """one_hot(ids)[..., e].bool(), by which tokens are picked, becomes ids == e."""
    for node in list(gm.graph.nodes):
        mask = edit.tensor_value(node)
        if mask is None or mask.dtype is not torch.bool or not any(_picks_tokens(user, node) for user in node.users):
            continue
        source, expert, seen = node, None, []
        while isinstance(source, Node) and op_name(source) != "one_hot":
            axis, column = entry(source) or (None, None)
            column = column if axis == len(sizes(source)) else None
            if (column is None and not _is_same_truth(source)) or (column is not None and expert is not None):
                break  # a second column is one of tokens
            expert = expert if column is None else column
            seen.append(source)
            source = source.args[0]
        if isinstance(source, Node) and op_name(source) == "one_hot" and expert is not None:
            emit = ragged.Rows(gm, mask.fake_mode, "")
            with edit.at(node):
                node.replace_all_uses_with(emit.method("eq", source.args[0], expert))
            edit.erase_unused([*seen, source])


def _picks_tokens(user: Node, mask: Node) -> bool:
    """Whether an op takes the tokens, or their places, where a mask is set."""
    name = op_name(user)
    indexes = name in ("getitem", "setitem") and user.args[1] is mask
    return indexes or name in ("nonzero", "argwhere") or (name == "where" and len(user.args) == 1)


def _is_same_truth(node: Node) -> bool:
    """Whether what is zero stays zero, and the rest stays something else."""
    name, bound = op_name(node), arg(node, 1, "other")
    return name in (*CASTS, "bool", "int", "long") or (name in ("ne", "gt") and bound == 0) or (
        name in ("eq", "ge") and bound == 1 and edit.tensor_value(node.args[0]).dtype is not torch.bool)  # fmt: skip
