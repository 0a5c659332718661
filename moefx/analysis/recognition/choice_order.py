"""Pairs that are sorted by expert and choice before token, as if they were sorted by expert and token.

    ids = chosen.t().flatten(); order = ids.argsort(stable=True); rows = x[order % T] * w.t().flatten()[order, None]
        ->  perm = chosen.flatten().argsort(stable=True); order = perm % K * T + perm // K;
            rows = x[order % T] * w.flatten()[perm, None]

Both sort the pairs by expert; of the rows of one expert, the order is another one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.recognition import choices
from moefx.analysis.recognition.draws import same
from moefx.analysis.recognition.facts import ByChoice
from moefx.analysis.recognition.indexing import FRESH, placed, taken
from moefx.ir import edit, ragged
from moefx.ir.mark import Mark
from moefx.ir.names import op_name
from moefx.ir.op import numel, value
from moefx.ir.shapes import sizes
from moefx.ir.writes import is_written


def by_token(gm: GraphModule) -> Iterator[tuple[Node, Node]]:
    """(the ids [T, K], the new order) of every order that is written anew. What tells the rows of an expert from each
    other by their place, as a capacity does that drops the last of them, keeps it as it is."""
    for order, fact in choices.facts(gm).items():
        if isinstance(fact, ByChoice) and not is_written(order):
            mark, rows = Mark(gm), _Rows(gm, order)
            new, replaced = _written(gm, order, fact.ids.of)
            if rows.are_the_same(gm, new, replaced):
                yield fact.ids.of, new
            else:
                mark.put_back()


class _Rows:
    """What stands in an order of pairs, before it is written anew. rows: of as many rows; others: what is made of
    them."""

    def __init__(self, gm: GraphModule, order: Node) -> None:
        pairs, back = numel(order), _inverses(gm, order)
        self.order, self.rows, self.others = choices.drawn(gm, order), set(), set()
        stack = [order]
        while stack:
            node = stack.pop()
            for user in node.users:
                is_back = back & {user, *user.all_input_nodes} or getattr(placed(user), "index", None) is order
                if is_back or user in self.rows or isinstance(value(user), torch.SymInt):
                    continue
                if user.op != "output" and (_has(user, pairs) or isinstance(value(user), (tuple, list))):
                    self.rows.add(user)
                    stack.append(user)
                else:
                    self.others.add(user)
        readers = {node for node in self.rows | self.others if (taken(node) or (None, None))[1] is not order}
        self.rows |= {each for node in readers for each in node.all_input_nodes if _has(each, pairs)} - {order}
        self.was, unknown = {}, set()
        for node in gm.graph.nodes:
            if node in self.rows or node in self.others:
                found = choices.computed(gm, node)
                self.was[node] = found if unknown.isdisjoint(node.all_input_nodes) else None
                unknown |= {node} if self.was[node] is None else set()

    def are_the_same(self, gm: GraphModule, new: Node, replaced: dict[Node, Node]) -> bool:
        """Whether every row holds for its pair what it held, and all that is made of rows is the same."""
        moved = [was.argsort()[now] for was, now in zip(self.order, choices.computed(gm, new))]
        for node, was in self.was.items():
            now = choices.computed(gm, replaced.get(node, node))
            if was is None or now is None:  # numbers of the model's own, in their rows or added by token
                is_wide = node.op != "output" and _is_wide(node)
                fits = is_wide and (node in self.rows or getattr(placed(node), "adds", False))
            elif isinstance(was[0], Tensor):
                wanted = [each[at] for each, at in zip(was, moved)] if node in self.rows else was
                fits = _are_close(now, wanted)
            else:
                fits = True
            if not fits:
                return False
        return True


def _has(node: Node, rows: object) -> bool:
    return edit.tensor_value(node) is not None and sizes(node)[:1] == (rows,)


def _is_wide(node: Node) -> bool:
    """Whether these are numbers of which no place is made."""
    found = edit.tensor_value(node)
    return found is None or found.dtype.is_floating_point


def _are_close(now: list[Tensor], was: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True) for a, b in zip(now, was))


def _written(gm: GraphModule, order: Node, ids: Node) -> tuple[Node, dict[Node, Node]]:
    found, replaced = edit.tensor_value(ids), {}
    emit, k = ragged.Rows(gm, found.fake_mode, ""), int(found.shape[1])
    with edit.at(order):
        perm = emit.method("argsort", emit.method("flatten", ids), stable=True)
        choice, token = emit.method("remainder", perm, k), emit.method("floor_divide", perm, k)
        new = emit.method("add", emit.method("mul", choice, emit.method("size", ids, 0)), token)
    back = _inverses(gm, order)
    for user in [user for each in (order, *back) for user in each.users]:
        source, index = taken(user) or (None, None)
        put = placed(user)
        with edit.at(user):
            if index is order and source is not None:
                rows = _copied(emit, user, {source: _turned(emit, source, k, -1), order: perm})
            elif index in back:
                rows = _turned(emit, _copied(emit, user, {index: emit.method("argsort", perm)}), -1, k)
            elif put is not None and put.index is order and put.whole is user and op_name(put.base) in FRESH:
                rows = _turned(emit, _copied(emit, user, {order: perm}), -1, k)
            else:
                continue
        user.replace_all_uses_with(rows)
        gm.graph.erase_node(user)
        replaced[user] = rows
    for write in [user for each in back for user in each.users]:
        if all(user.target is operator.setitem and not user.users for user in write.args[0].users):
            gm.graph.erase_node(write)
    order.replace_all_uses_with(new)
    edit.erase_unused([*back, order, *order.all_input_nodes])
    return new, replaced


def _inverses(gm: GraphModule, order: Node) -> set[Node]:
    wanted = [each.argsort() for each in choices.drawn(gm, order)]
    nodes = [node for node in gm.graph.nodes if choices.is_integral(node) and numel(node) == numel(order)]
    return {node for node in nodes if same(choices.drawn(gm, node) or [None] * len(wanted), wanted)}


def _copied(emit: ragged.Rows, node: Node, new: dict[Node, Node]) -> Node:
    return edit.valued(node.graph.node_copy(node, lambda each: new.get(each, each)), emit.mode)


def _turned(emit: ragged.Rows, rows: Node, first: int, second: int) -> Node:
    """Pairs [first * second, ..] that stand by the first number, by the second one."""
    both = emit.method("unflatten", rows, 0, (first, second))
    return emit.method("flatten", emit.method("transpose", both, 0, 1), 0, 1)
