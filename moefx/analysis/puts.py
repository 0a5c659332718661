"""Rows of experts that are put into a tensor which holds something: `out = x.clone(); out[mask] = expert(x[mask])`."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.additions import is_nothing
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.writes import storage


def put_into_zeros(gm: GraphModule) -> int:
    """out[mask_e] = y_e becomes rows[mask_e] = y_e of new zeros, and out behind it where(any mask, rows, out). Returns
    how many tensors are written to no more."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    puts: dict[Node, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        puts.setdefault(node.args[0], []).append(node)
    found = 0
    for out, writes in puts.items():
        if out.op == "placeholder" or _is_viewed(out, writes[-1], order):
            continue
        masks = [mask_of(node.args[1], edit.tensor_value(out).dim()) for node in writes]
        first, last = order[writes[0]], order[writes[-1]]
        reads = any(first < order[user] < last for user in out.users if user not in writes)
        if len(writes) < 2 or is_nothing(out) or None in masks or len(set(masks)) < len(masks) or reads:
            continue
        if not all(isinstance(node.args[2], Node) for node in writes):
            continue
        found += 1
        emit = ragged.Rows(gm, edit.tensor_value(out).fake_mode, "")
        with edit.at(writes[0]):
            rows = emit.emit_call(torch.zeros_like, out)
        for node in writes:
            node.update_arg(0, rows)
        with edit.at(writes[-1], after=True):
            put = masks[0]
            for mask in masks[1:]:
                put = emit.emit_call(operator.or_, put, mask)
            for _ in range(edit.tensor_value(out).dim() - edit.tensor_value(put).dim()):
                put = emit.method("unsqueeze", put, -1)
            total = emit.emit_call(torch.where, put, rows, out)
        edit.rewrite_uses(out, total, after=total)
    return found


def _is_viewed(out: Node, last: Node, order: dict[Node, int]) -> bool:
    """Whether another node than `out` shows what is written to it."""
    memory = storage(out)
    return any(storage(node) == memory for node in order if node is not out and order[node] < order[last])


def mask_of(index: object, dims: int) -> Node | None:
    """The mask of tokens by which rows of a tensor of so many dims are picked: itself, or the source of its places."""
    found = edit.tensor_value(index)
    while found is not None and found.dtype is not torch.bool:
        name, source = op_name(index), index.args[0] if index.args else None
        if name in ("where", "nonzero", "argwhere"):
            as_one = edit.tensor_value(source).dim() == 1 and edit.tensor_value(source).dtype is torch.bool
            return source if as_one else None
        if not isinstance(source, Node) or not (name in _SAME or (name == "getitem" and index.args[1] in (0, _FIRST))):
            return None
        index, found = source, edit.tensor_value(source)
        if op_name(index) == "where" or (op_name(index) == "nonzero" and arg(index, 1, "as_tuple")):
            return mask_of(index.args[0], dims)
    return index if found is not None and found.dim() < dims else None


_FIRST = (slice(None), 0)
_SAME = ("squeeze", "flatten", "view", "reshape")
