"""Rows that are cut into one piece per expert, or put at once where several indices say: each piece gets its own index.

    parts = x[t].split(n); out.index_add(0, t, cat([f_e(part) for part in parts]) * g[:, None])
        ->  t_e = t.split(n)[e]; out.index_add(0, t_0, f_0(x[t_0]) * g.split(n)[0][:, None]).index_add(0, t_1, ..)

    out.index_add(0, cat([t_0, ..]), cat([f_0(x[t_0]), ..]))
        ->  out.index_add(0, t_0, f_0(x[t_0])).index_add(0, t_1, ..)

An index of pairs that are sorted by expert is left alone: all its rows are raised at once.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.recognition import choices
from moefx.analysis.recognition.indexing import CASTS, JOINS, placed, taken
from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes
from moefx.ir.writes import storage, writes

_CUTS = ("split", "split_with_sizes", "tensor_split")
_APART = ("mul", "truediv", "div", "add", "sub", "neg", "where", *CASTS)  # of every row alone


def cut_indices(gm: GraphModule) -> int:
    """Of how many indices each piece has its own now."""
    facts, done = choices.facts(gm), 0
    written = {storage(node.args[0]) for node in gm.graph.nodes if writes(node)} - {None}
    for node in list(gm.graph.nodes):
        pieces = _pieces(node)
        if pieces is None or pieces.index in facts or not written.isdisjoint(map(storage, pieces.read)):
            continue
        puts = [user for user in pieces.index.users if _is_put(user, pieces.index)]
        if puts and all(pieces.are_rows_of(put, written) for put in puts):
            for put in puts:
                pieces.put(put)
            pieces.take()
            done += 1
    return done


def _pieces(node: Node) -> _Pieces | None:
    """Of an index that is a cat, or of one that takes the rows which are cut."""
    if op_name(node) in JOINS:
        index, parts, cut = node, dict(enumerate(node.args[0])), None
    elif op_name(node) in _CUTS and arg(node, 2, "dim", 0) == 0:
        index, cut = _index_of(node.args[0]), node
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    else:
        return None
    is_read = index is not None and len(sizes(index)) == 1 and (cut is None or len(parts) == len(cut.users))
    return _Pieces(index, parts, cut) if is_read and all(map(sizes, parts.values())) else None


def _index_of(rows: Node) -> Node | None:
    _, index = taken(rows) or (None, None)
    is_direct = index in rows.all_input_nodes and edit.tensor_value(index) is not None
    return index if is_direct else None


def _is_put(node: Node, index: Node) -> bool:
    found = placed(node)
    return found is not None and found.index is index and {index, found.rows} <= {*node.all_input_nodes}


def _is_apart(node: Node) -> bool:
    return op_name(node) in _APART or _adds_axis(node)


def _adds_axis(node: Node) -> bool:
    return op_name(node) == "unsqueeze" or (node.target is operator.getitem and node.args[1] == (slice(None), None))


class _Pieces:
    """The pieces of what has a row for each place of an index. parts: by number, what has as many rows as a piece. cut:
    of which the parts come; None: the parts are pieces of the index."""

    def __init__(self, index: Node, parts: dict[int, Node], cut: Node | None) -> None:
        self.index, self.parts, self.cut = index, parts, cut
        self.all = sizes(index)[0], sum(sizes(part)[0] for part in parts.values())
        self.computed = edit.descendants(parts.values())
        self.read = {index, *parts.values()} if cut is None else {index, cut.args[0], *cut.args[0].all_input_nodes}
        self._cuts = {} if cut is not None else {index: parts}

    def are_rows_of(self, put: Node, written: set[Any]) -> bool:
        """Whether what is put is computed of all pieces, joined in their order, and row by row after that."""
        rows, base = placed(put).rows, placed(put).base
        todo, seen, is_joined = [rows], set(), False
        if 1 in self.all or len(sizes(rows)) != len(sizes(base)):
            return False
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            if storage(node) in written:
                return False
            seen.add(node)
            if self._joins(node):
                is_joined = True
            elif node not in self.computed:
                if {*self.all}.isdisjoint(sizes(node)):
                    continue
                if self.cut is None or not self._has_all(node):
                    return False
            elif _is_apart(node) and self._has_all(node) and self._is_aligned(node):
                todo += node.all_input_nodes
            else:
                return False
        return is_joined

    def _is_aligned(self, node: Node) -> bool:
        """Whether rows meet rows, and not entries of which there are as many."""
        rows = [each for each in node.all_input_nodes if not {*self.all}.isdisjoint(sizes(each))]
        return _adds_axis(node) or all(len(sizes(each)) == len(sizes(node)) for each in rows)

    def _has_all(self, node: Node) -> bool:
        shape = sizes(node) if edit.tensor_value(node) is not None else ()
        return shape[:1] in ((each,) for each in self.all)

    def _joins(self, node: Node) -> bool:
        if op_name(node) not in JOINS or arg(node, 1, "dim", 0) != 0 or not self._has_all(node):
            return False
        parts = node.args[0]
        return sorted(self.parts) == [*range(len(parts))] and all(
            sizes(part)[:1] == sizes(self.parts[e])[:1] for e, part in enumerate(parts))  # fmt: skip

    def put(self, put: Node) -> None:
        """Every piece is put by itself."""
        found, last = placed(put), placed(put).base
        if self.cut is not None:
            with edit.at(self.cut):
                self._pieces_of(self.index)
        with edit.at(put) as graph:
            for e, index in self._pieces_of(self.index).items():
                new = {self.index: index, found.rows: self._piece(found.rows, e), found.base: last}
                added = edit.valued(graph.node_copy(put, lambda node, new=new: new.get(node, node)))
                last = added if found.whole is put else last
        if found.whole is put:
            put.replace_all_uses_with(last)
        put.graph.erase_node(put)
        edit.erase_unused({self.index, *self.computed} & edit.ancestors([self.index, found.rows]))

    def take(self) -> None:
        """The rows of every piece are taken by its index."""
        if self.cut is None:
            return
        rows = self.cut.args[0]
        with edit.at(self.cut) as graph:
            for e, part in self.parts.items():
                mine = self._pieces_of(self.index)[e]
                read = graph.node_copy(rows, lambda node, mine=mine: mine if node is self.index else node)
                part.replace_all_uses_with(edit.valued(read))
        edit.erase_unused([*self.parts.values(), self.cut, rows])

    def _piece(self, node: Node, e: int) -> Node:
        if self._joins(node):
            return node.args[0][e]
        if not self._has_all(node):
            return node
        if node not in self.computed:
            return self._pieces_of(node)[e]
        return edit.valued(node.graph.node_copy(node, lambda each: self._piece(each, e)))

    def _pieces_of(self, node: Node) -> dict[int, Node]:
        """Emitted when first asked for."""
        if node not in self._cuts:
            graph, rows, whole = node.graph, self.cut.args[0], edit.tensor_value(node)
            cut = graph.node_copy(self.cut, lambda each: node if each is rows else each)
            self._cuts[node] = {e: edit.call(graph, operator.getitem, cut, e) for e in self.parts}
            for e, piece in self._cuts[node].items():  # as many rows as that of the rows, whose size may have a symbol
                shape = edit.tensor_value(self.parts[e]).shape[:1] + whole.shape[1:]
                fake = compat.fake_like(whole.fake_mode, whole, shape)
                piece.meta["val"] = fake.requires_grad_(whole.requires_grad)
            cut.meta["val"] = tuple(piece.meta["val"] for piece in self._cuts[node].values())
        return self._cuts[node]
