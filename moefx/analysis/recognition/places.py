"""Experts that take their tokens by an index of any origin: a cut list, a piece of an order, a sample.

An index [n] that names n different tokens is the places of a mask, in another order. Which order does not matter where
rows are computed apart, which is asked of numbers; those that are one of each row go with it.

    out.index_add_(0, t, f(x[t]) * g[:, None])
        ->  t' = where(zeros(T).index_fill(0, t, True))[0]; g' = zeros(T).index_put(t, g)[t']
            out.index_add_(0, t', f(x[t']) * g'[:, None])

Where these are all tokens that chose an expert, and their scores, they are computed of the ids at once, and the index
is not needed.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.row_order import keeps_rows_apart
from moefx.analysis.recognition import choices
from moefx.analysis.recognition.facts import Flat, Mask, Weighed
from moefx.analysis.recognition.host_numbers import is_number, readers
from moefx.analysis.recognition.indexing import placed
from moefx.analysis.recognition.puts import mask_of
from moefx.ir import edit, ragged
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import arg, op_name
from moefx.ir.randomness import is_random
from moefx.ir.shapes import sizes
from moefx.ir.writes import storage, writes, written_after_reads


def as_masks(gm: GraphModule) -> int:
    """Give every such index a mask; how many."""
    facts, changing, found, seen = choices.facts(gm), written_after_reads(gm), {}, {}
    for index in list(gm.graph.nodes):
        fake = edit.tensor_value(index)
        if fake is None or fake.dim() != 1 or fake.dtype is not torch.int64 or storage(index) in changing:
            continue
        if not isinstance(facts.get(index, Flat(index)), Flat) or mask_of(index, 2) is not None:
            continue
        branch = _branch(gm, index, seen)
        if branch is not None:
            found[index] = _give_mask(gm, index, branch)
    facts = choices.facts(gm) if found else {}
    for node in itertools.chain.from_iterable(found.values()):
        _read_ids(gm, node, facts.get(node))
    return len(found)


@dataclass(frozen=True)
class _Branch:
    """What reads rows by an index, what puts rows by it, and (node, argument) of numbers of each row in between."""

    reads: list[Node]
    puts: list[Node]
    numbers: list[tuple[Node, Node]]


def _branch(gm: GraphModule, index: Node, seen: dict[str, bool]) -> _Branch | None:
    """None: the index is no such, or something else depends on its order."""
    reads = [user for user in index.users if _taken_by(user, index)]
    puts = [user for user in index.users if (put := placed(user)) is not None and put.index is index]
    if not reads or not puts or not _names_some_once(gm, index, min(reads).args[0]):
        return None
    computed, between, numbers = edit.descendants(reads), set(), set()
    todo = [(put, placed(put).rows) for put in puts]
    while todo:
        user, node = todo.pop()
        if not _is_of_rows(node, index) or node in between:
            continue
        if node not in computed:
            numbers.add((user, node))
            continue
        between.add(node)
        todo += [(node, each) for each in node.all_input_nodes if node not in reads]
    users = {user for node in (*reads, *between) for user in node.users if not is_number(user)}
    if not users <= between.union(puts) or not all(_is_number_of_rows(node) for _, node in numbers):
        return None
    rows = [placed(put).rows for put in puts]
    if not keeps_rows_apart(rows, {*reads, *(node for _, node in numbers)}, computed, seen):
        return None
    return _Branch(sorted(reads), sorted(puts), sorted(numbers))


def _is_number_of_rows(node: Node) -> bool:
    """Whether there is one number for each row."""
    return sizes(node)[1:] in ((), (1,))


def _taken_by(user: Node, index: Node) -> bool:
    if op_name(user) == "index_select":
        is_read = arg(user, 1, "dim") == 0 and arg(user, 2, "index") is index
    else:
        item = user.args[1] if user.target is operator.getitem else None
        front, *rest = item if isinstance(item, tuple) else (item,)
        is_read = front is index and not any(isinstance(each, Node) for each in rest)
    return is_read and edit.tensor_value(user.args[0]) is not None and not is_weight(user.args[0])


def _is_of_rows(node: Node, index: Node) -> bool:
    shape = sizes(node) if edit.tensor_value(node) is not None else ()
    return bool(shape) and shape[0] == sizes(index)[0]


def _names_some_once(gm: GraphModule, index: Node, source: Node) -> bool:
    """Whether an index names different rows, and not all of them, in every draw."""
    found = choices.drawn(gm, index)
    rows = choices.drawn_size(gm, edit.tensor_value(source).shape[0])
    if found is None or rows is None or choices.may_name_twice(gm, index):
        return False
    inside = all(not v.numel() or (v.min() >= 0 and v.max() < n) for v, n in zip(found, rows))
    return inside and all(len(v.unique()) == len(v) for v in found) and any(len(v) < n for v, n in zip(found, rows))


def _give_mask(gm: GraphModule, index: Node, branch: _Branch) -> list[Node]:
    """The mask, and what holds the numbers of each row where their tokens are."""
    first, changing = min(branch.reads), written_after_reads(gm)
    source = min((read.args[0] for read in branch.reads), key=lambda x: storage(x) in changing)
    emit = ragged.Rows(gm, edit.tensor_value(index).fake_mode, "")
    device = edit.tensor_value(index).device
    with edit.at(first):
        tokens = emit.method("size", source, 0)
        none = emit.emit_call(torch.zeros, tokens, dtype=torch.bool, device=device)
        mask = emit.method("index_fill", none, 0, index, True)
        where = edit.call(gm.graph, torch.where, mask)
        places = edit.call(gm.graph, operator.getitem, where, 0)
    places.meta["val"] = edit.tensor_value(index)
    where.meta["val"] = (places.meta["val"],)
    for user in (*branch.reads, *branch.puts):
        user.replace_input_with(index, places)
    for put in branch.puts:
        _choose_rows(gm, put, mask)
    new = [mask]
    for user, number in branch.numbers:
        with edit.at(user):
            wide = len(sizes(number)) == 2
            of_row = emit.method("squeeze", number, 1) if wide else number
            whole = emit.emit_call(torch.zeros, tokens, dtype=edit.tensor_value(number).dtype, device=device)
            whole = emit.method("index_put", whole, (index,), of_row)
            read = edit.call(gm.graph, operator.getitem, whole, places)
            read.meta["val"] = edit.tensor_value(of_row)
            read = emit.method("unsqueeze", read, 1) if wide else read
        user.replace_input_with(number, read)
        new.append(whole)
    return new


def _choose_rows(gm: GraphModule, put: Node, mask: Node) -> None:
    """x[t] put at t as it is becomes a choice between x and what was there."""
    found = placed(put)
    read = found.rows
    if found.adds or read.target is not operator.getitem or read.args[1] is not found.index or (
            sizes(read.args[0]) != sizes(found.base) or storage(read.args[0]) in written_after_reads(gm)):  # fmt: skip
        return
    emit = ragged.Rows(gm, edit.tensor_value(mask).fake_mode, "")
    with edit.at(put, after=True):
        of_rows = mask
        for _ in sizes(found.base)[1:]:
            of_rows = emit.method("unsqueeze", of_rows, -1)
        rows = emit.cast(read.args[0], edit.tensor_value(found.base).dtype)
        chosen = emit.emit_call(torch.where, of_rows, rows, found.base)
    edit.rewrite_uses(found.whole, chosen, after=chosen)
    gm.graph.erase_node(put)


def _read_ids(gm: GraphModule, node: Node, fact: object) -> None:
    """Compute a mask, or scores, of one expert of the routing itself; not of scores that are equal, but have no part in
    these, or whose gradients were cut off."""
    mask = fact.mask if isinstance(fact, Weighed) else fact
    if not isinstance(mask, Mask) or not fact.is_of_tokens or mask.idx > node:
        return
    if isinstance(fact, Weighed) and (fact.w not in edit.ancestors([node]) or (
            edit.tensor_value(fact.w).requires_grad != edit.tensor_value(node).requires_grad)):  # fmt: skip
        return
    emit = ragged.Rows(gm, edit.tensor_value(node).fake_mode, "")
    with edit.at(node):
        new = emit.emit_call(operator.eq, mask.idx, mask.expert)
        if isinstance(fact, Weighed):
            w = fact.w if sizes(fact.w) == sizes(mask.idx) else emit.method("view_as", fact.w, mask.idx)
            new = emit.emit_call(operator.mul, w, new)
        new = emit.method("any" if fact is mask else "sum", new, -1)
        new = emit.cast(emit.method("flatten", new), edit.tensor_value(node).dtype)
    node.replace_all_uses_with(new)
    _erase(gm, node)


def _erase(gm: GraphModule, node: Node) -> None:
    """With what only it was computed of, and checks of such."""
    found, todo = set(), [node]
    while todo:
        node = todo.pop()
        checks = readers(node) if node not in found and node.op.startswith("call") and not is_random(node) else None
        if checks is not None and not writes(node):
            found |= {node, *checks}
            todo += node.all_input_nodes
            for each in (*checks, node):
                gm.graph.erase_node(each)
