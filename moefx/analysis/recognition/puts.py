"""Rows of experts that are put into a tensor which holds something: `out = x.clone(); out[mask] = expert(x[mask])`; or
into zeros of their own that are added up: `out = out + zeros.index_copy(0, rows, expert(x[rows]))`."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.recognition import choices, indexing
from moefx.analysis.recognition.additions import is_nothing, names_once
from moefx.analysis.recognition.facts import tokens_of
from moefx.analysis.recognition.indexing import ZEROS
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes
from moefx.ir.writes import storage, users_of_memory, written_after_reads


def put_into_zeros(gm: GraphModule) -> int:
    """out[mask_e] = y_e becomes rows[mask_e] = y_e of new zeros, and out behind it where(any mask, rows, out). Returns
    how many tensors are written to no more."""
    puts: dict[Node, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        puts.setdefault(node.args[0], []).append(node)
    found = 0
    for out, writes in puts.items():
        if out.op == "placeholder" or _is_viewed(gm, out, writes[-1]):
            continue
        masks = [mask_of(node.args[1], edit.tensor_value(out).dim()) for node in writes]
        reads = any(writes[0] < user < writes[-1] for user in out.users if user not in writes)
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


def _is_viewed(gm: GraphModule, out: Node, last: Node) -> bool:
    """Whether another node than `out` shows what is written to it."""
    memory = storage(out)
    return any(storage(node) == memory for node in gm.graph.nodes if node is not out and node < last)


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


# ---- zeros of their own


@dataclass(frozen=True)
class _Put:
    """`rows` at `places` of `zeros`, which `node` puts there and `whole` has then. sums: what adds them to zeros."""

    zeros: Node
    places: tuple[Node, ...]
    rows: Node
    node: Node
    whole: Node
    sums: tuple[Node, ...]


def add_without_zeros(gm: GraphModule) -> list[Node]:
    """out + zeros.index_add(0, rows, y) becomes out.index_add(0, rows, y) where a mask says which rows; so do
    index_copy, index_put and zeros[rows] = y, if no row is named twice. Returns the new sums."""
    facts, changing = choices.facts(gm), written_after_reads(gm)
    found = []
    for node in list(gm.graph.nodes):
        if op_name(node) not in ("add", "iadd") or len(node.args) != 2 or node.kwargs:
            continue
        puts = [_own_put(part, node, facts) for part in node.args]
        rest = [part for part, put in zip(node.args, puts) if put is None and part != 0]
        puts = [put for put in puts if put is not None]
        reads = {storage(n) for put in puts for n in (*put.places, put.rows)}
        parts = [*rest, *(put.whole for put in puts)]
        if puts and not reads & changing and all(_is_alike(part, node) for part in parts):
            total = rest[0] if rest else puts[0].zeros
            for put in puts:
                total = _added(gm, total, put, node)
            node.replace_all_uses_with(total)
            for dead in (node, *(put.node for put in puts)):
                gm.graph.erase_node(dead)
            edit.erase_unused({dead for put in puts for dead in (put.zeros, *put.sums)})
            found.append(total)
    return found


def _is_alike(part: object, total: Node) -> bool:
    found, whole = edit.tensor_value(part), edit.tensor_value(total)
    return found is not None and found.dtype == whole.dtype and sizes(part) == sizes(total)


def _own_put(whole: object, reader: Node, facts: dict) -> _Put | None:
    """What was put into zeros of which `reader` alone reads what they are then."""
    if not isinstance(whole, Node) or not whole.args:
        return None
    node = whole
    if op_name(whole) in ZEROS:
        node = next((user for user in whole.users if user.target is operator.setitem), whole)
    put = indexing.put(node)
    if put is None or put.whole is not whole or (node is not whole and not node < reader):
        return None
    zeros, places, (rows, *sums) = put.base, put.indices, _rows_put(node) if node is not whole else (put.rows,)
    is_own = set(whole.users) - set(sums) == {node, reader} - {whole}
    if not isinstance(rows, Node) or op_name(zeros) not in ZEROS or not is_own:
        return None
    if zeros is not whole and any(users_of_memory(zeros).values()):
        return None
    once = _names_once(places, edit.tensor_value(zeros).dim(), facts)
    return _Put(zeros, places, rows, node, whole, tuple(sums)) if once or (put.adds and once is not None) else None


def _rows_put(put: Node) -> tuple[object, ...]:
    """What is put: of zeros[rows] += y, which is zeros[rows] = zeros[rows] + y, that is y. Then what adds it."""
    zeros, places, total = put.args
    is_sum = isinstance(total, Node) and op_name(total) in ("add", "iadd") and len(total.args) == 2
    for old, new in (total.args, total.args[::-1]) if is_sum else ():
        is_old = isinstance(old, Node) and old.target is operator.getitem and old.args == (zeros, places)
        if is_old and isinstance(new, Node) and sizes(new) == sizes(total) and min(zeros.users) is old:
            return new, total, old
    return (total,)


def _names_once(places: tuple, dims: int, facts: dict) -> bool | None:
    """Whether an index into a tensor of so many dims, which a mask gives, has no place twice. None: it is no such."""
    mask, rest = tokens_of(facts, places)
    if mask is not None:
        return None if rest else names_once(mask, places)
    if len(places) == 1:
        return None if mask_of(places[0], dims) is None else True
    picks = {place.args[0] for place in places if isinstance(place, Node) and place.target is operator.getitem}
    mask = picks.pop().args[0] if len(picks) == 1 and all(map(_is_picked, picks)) else None
    return None if mask is None else {place.args[1] for place in places} == set(range(edit.tensor_value(mask).dim()))


def _is_picked(places: Node) -> bool:
    """Whether it is the places where a mask is set, a tensor for every axis."""
    is_tuple = op_name(places) == "where" or (op_name(places) == "nonzero" and arg(places, 1, "as_tuple") is True)
    return is_tuple and edit.tensor_value(places.args[0]).dtype is torch.bool


def _added(gm: GraphModule, total: Node, put: _Put, node: Node) -> Node:
    """What `node` adds to a sum, without the zeros."""
    with edit.at(node):
        old = edit.tensor_value(node)
        rows = ragged.Rows(gm, old.fake_mode, "").cast(put.rows, old.dtype)
        if len(put.places) == 1 and edit.tensor_value(put.places[0]).dtype is not torch.bool:
            new = gm.graph.call_method("index_add", (total, 0, *put.places, rows))
        else:
            new = gm.graph.call_method("index_put", (total, put.places, rows, True))
    new.meta["val"] = edit.tensor_value(put.whole if put.node is put.whole else node)
    return new
