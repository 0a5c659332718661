"""Write lists of the gates that are not zero, sorted by expert, as a sort of the choices.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   tokens, experts, scores and places whose number depends on data, and that in every draw are those
                      of the choices [T, K] in the order of their experts, or as they stand, are computed of the
                      choices; no size depends on data for it
    never  touches gates that may be zero or negative where an expert was chosen. Scores that underflow to zero count as
           chosen, which adds nothing to the output

Pseudo-code
    1. routings whose scores are all positive, or that are known by a map [T, E] of bools
    2. what is T*K numbers in every draw, as many as data says, and is one of: 0, 1, .. T*K; the order that sorts the
       choices; in that order, their tokens, experts, scores
    3. emit these; count their rows where the number of such was asked for
    4. compare what the tokens' rows are added to with the original
    5. before all this: sorts by choice before token become sorts by token (choice_order.py)

    pairs = nonzero(gates); order = pairs.sort(0)[1][:, 1]; x[pairs[order, 0]]
        ->  order = idx.flatten().argsort(stable); x[order // K]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition import choice_order, choices
from moefx.analysis.recognition.draws import same
from moefx.analysis.recognition.facts import Flat, Scattered, Tally
from moefx.analysis.recognition.indexing import Placed, placed
from moefx.analysis.recognition.signs import is_positive
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit, ragged
from moefx.ir.infer import update
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for ids, order in choice_order.by_token(gm):
        result.changed(f"{order.name}: the choices of {ids.name} are sorted by token")
    raising = Raising(gm, ctx, result)
    for idx, scores in _routings(choices.facts(gm)).items() if any(map(_is_list, gm.graph.nodes)) else ():
        if choices.drawn(gm, idx) is None:
            continue
        lists = _Lists(gm, idx, scores)
        found = {node: role for node in gm.graph.nodes if _is_list(node) and (role := lists.role(node)) is not None}
        if not found:
            continue
        puts = [put for node in found for user in node.users if (put := placed(user)) is not None and put.index is node]
        ends = list(filter(None, map(_read_after, puts)))
        with raising.candidate(idx) as check:
            lists.write(found, ctx)
            check.sweep()
            for end in ends:
                check.compare(end, end, idx, scores, max(lists.experts, 1), by_token=False)
            result.changed(f"{idx.name}: lists of nonzero places are the {lists.k} choices of every token")
    return result


def _read_after(put: Placed) -> Node | None:
    """What shows the rows that were put: itself, or the first that reads what they were written to."""
    if put.whole is not put.base:
        return put.whole
    wrote = next(user for user in put.base.users if put.rows in user.args)
    later = (user for user in put.base.users if user > wrote and edit.tensor_value(user) is not None)
    return min(later, default=None)


def _is_list(node: Node) -> bool:
    """Whether there are as many numbers as data says."""
    shape = sizes(node) if edit.tensor_value(node) is not None else ()
    return shape[1:] in ((), (1,)) and bool(shape) and bool(free_unbacked_symbols(shape[0]))


def _routings(facts: dict) -> dict[Node, list[Node]]:
    """Their scores by the ids [T, K]."""
    found: dict[Node, list[Node]] = {}
    for node, fact in facts.items():
        if isinstance(fact, Scattered) and edit.tensor_value(node).dim() == 2 and is_positive(fact.w):
            found.setdefault(fact.idx, []).append(fact.w)
        elif isinstance(fact, Tally) and edit.tensor_value(node).dtype is torch.bool:
            found.setdefault(fact.ids.of, [])
    flat = dict.fromkeys(fact.of for fact in facts.values() if isinstance(fact, Flat))
    for w in filter(is_positive, flat):
        for idx in [each for each in flat if choices.is_integral(each) and sizes(each) == sizes(w)]:
            found.setdefault(idx, []).append(w)
    return {idx: list(dict.fromkeys(scores)) for idx, scores in found.items() if edit.tensor_value(idx).dim() == 2}


class _Lists:
    """What the choices of a routing are in an order of their experts, which is that of the first list that has one."""

    def __init__(self, gm: GraphModule, idx: Node, scores: list[Node]) -> None:
        self.gm, self.idx, self.scores = gm, idx, scores
        ids, self.k = choices.drawn(gm, idx), int(sizes(idx)[1])
        self.flat = [each.flatten() for each in ids]
        self.experts = 1 + max(int(each.max()) for each in ids)
        self.order: list[Tensor] | None = None

    def role(self, node: Node) -> str | Node | None:
        """Of scores, it is what they are."""
        found = choices.computed(self.gm, node)
        if found is None or any(each.numel() != len(ids) for each, ids in zip(found, self.flat)):
            return None
        found = [each.flatten() for each in found]
        self.order = self._ordered(found) if self.order is None else self.order
        role = next((role for role, wanted in self._known() if same(found, wanted)), None)
        is_read = not isinstance(role, Node) or role in edit.ancestors([node])  # else it has the same numbers by chance
        return role if is_read else None

    def _ordered(self, found: list[Tensor]) -> list[Tensor] | None:
        """The order of the choices, if these are it, or the tokens in it."""
        orders = []
        for rows, ids in zip(found, self.flat) if not found[0].dtype.is_floating_point else ():
            in_order, choices_of = ids.sort().values, ids.view(-1, self.k)
            if not same([rows.sort().values], [torch.arange(len(ids))]) or not same([ids[rows]], [in_order]):
                if rows.min() < 0 or rows.max() >= len(choices_of):
                    return None
                rows = rows * self.k + (choices_of[rows] == in_order[:, None]).int().argmax(-1)
                if not same([rows.sort().values], [torch.arange(len(ids))]) or not same([ids[rows]], [in_order]):
                    return None
            orders.append(rows)
        return orders or None

    def _known(self) -> Iterator[tuple[str | Node, list[Tensor]]]:
        yield "places", [torch.arange(len(ids)) for ids in self.flat]
        yield "experts", [ids.sort().values for ids in self.flat]
        if self.order is not None:
            yield "order", self.order
            yield "tokens", [p // self.k for p in self.order]
            for w in self.scores:
                yield w, [v.flatten()[p] for v, p in zip(choices.drawn(self.gm, w), self.order)]

    def write(self, found: dict[Node, str | Node], ctx: PassContext) -> None:
        last = max([self.idx, *(role for role in found.values() if isinstance(role, Node))])
        with edit.at(last, after=True):
            new = dict(self._emitted({*found.values()}))
        counted = {sizes(node)[0] for node in found}
        for size in [n for n in self.gm.graph.nodes if _counts(n) and sizes(n.args[0])[0] in counted]:
            with edit.at(size):
                size.replace_all_uses_with(edit.valued(self.gm.graph.call_method("size", (new["order"], 0))))
            self.gm.graph.erase_node(size)
        changed = [new["order"]]
        for node, role in found.items():
            one = new[role]
            if edit.tensor_value(node).dim() == 2:
                with edit.at(one, after=True):
                    one = edit.valued(self.gm.graph.call_method("unsqueeze", (one, -1)))
            node.replace_all_uses_with(one)
            changed.append(one)
        for node in dict.fromkeys(changed):
            update(node, ctx.autocast)

    def _emitted(self, roles: set[str | Node]) -> Iterator[tuple[str | Node, Node]]:
        emit = ragged.Rows(self.gm, edit.tensor_value(self.idx).fake_mode, "")
        flat = emit.method("reshape", self.idx, -1)
        order = emit.emit_call(torch.argsort, flat, stable=True)
        yield "order", order
        for role in sorted(roles - {"order"}, key=str):
            if role == "places":
                yield (
                    role,
                    emit.emit_call(torch.arange, emit.method("size", order, 0), device=edit.tensor_value(order).device),
                )
            elif role == "tokens":
                yield role, emit.emit_call(operator.floordiv, order, self.k)
            else:
                of = flat if role == "experts" else emit.method("reshape", role, -1)
                yield role, emit.emit_call(operator.getitem, of, order)


def _counts(node: Node) -> bool:
    """Whether it is how many rows a tensor has."""
    tensor = edit.tensor_value(node.args[0]) if node.args else None
    return (
        op_name(node) in ("sym_size", "size") and tensor is not None and tensor.dim() > 0 and arg(node, 1, "dim") == 0
    )
