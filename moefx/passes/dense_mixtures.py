"""Write experts that all compute every token, weighed by numbers of any origin, as chosen by every token.

Contract
    takes  CAPTURED   canonical; sums over stacked outputs are chains of additions
    gives  CAPTURED   a mixture without a top-k (a softmax over all experts, MMoE, gates of a ReLU) has a routing that
                      names every expert
    never  touches weights that come of a routing, branches that are not one function of different parameters, or
           fewer experts than there are ranks; nothing where there is no expert axis

Pseudo-code
    1. chains of additions of terms f(x, W_e) * G[.., e, None], maybe times a number, with every column of G once;
       what has the numbers of a column in every draw is that column, however it was taken
    2. ids = arange(E) for every token; G[.., e, None] -> (G * (ids == e)).sum(-1, keepdim=True)
    3. are the branches one function? else leave the graph as it was

    out = f(x, W_0) * g[:, 0:1] + f(x, W_1) * g[:, 1:2]
        ->  ids = arange(2).expand_as(g); out = f(x, W_0) * (g * (ids == 0)).sum(-1, keepdim=True) + ..
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition import additions, choices, loops
from moefx.analysis.recognition.meanings import MOST
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.names import op_name
from moefx.ir.op import decide_same, numel
from moefx.ir.shapes import sizes


@dataclass(frozen=True)
class _Mixture:
    """weights: [.., E]. columns: for every expert the product with its column, and the column [.., 1]."""

    weights: Node
    columns: dict[int, tuple[Node, Node]]


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    raising, ranks, tried = Raising(gm, ctx, result), ctx.mesh.size("ep"), set()
    while ranks > 1 and (found := next((m for m in _find(gm) if m.weights not in tried), None)) is not None:
        tried.add(found.weights)
        experts = len(found.columns)
        with raising.candidate(found.weights, doubtful=True) as check:
            if experts < ranks:
                raise RaiseError(f"{experts} experts that compute all tokens are fewer than {ranks} ranks")
            ids = _choose_all(gm, found)
            check.sweep()
            loops.check_experts(gm, choices.facts(gm), ids, experts)
            ctx.decisions.tentative.add(ids.name)
            result.changed(f"{found.weights.name}: every token chooses all {experts} experts")
    return result


def _find(gm: GraphModule) -> Iterator[_Mixture]:
    facts = choices.facts(gm)
    for node in gm.graph.nodes:
        if not _is_sum(node) or any(_is_sum(user) for user in node.users):
            continue
        columns: dict[tuple[Node, int], tuple[Node, Node]] = {}
        for product in _summands(node):
            for each in additions.behind_numbers(product):
                for column in each.args if isinstance(each, Node) and op_name(each) == "mul" else ():
                    if (found := _column(gm, column)) is not None:
                        columns.setdefault(found, (each, column))
        for weights in dict.fromkeys(w for w, _ in columns):
            mine = {e: found for (w, e), found in columns.items() if w is weights}
            every = len(mine) > 1 and sorted(mine) == list(range(len(mine)))
            if weights not in facts and every and decide_same(edit.tensor_value(weights).shape[-1], len(mine)):
                yield _Mixture(weights, mine)


def _summands(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        for each in stack.pop().args:
            if _is_sum(each):
                stack.append(each)
            elif isinstance(each, Node):
                yield each


def _is_sum(node: object) -> bool:
    adds = isinstance(node, Node) and op_name(node) in ("add", "iadd", "add_")
    return adds and len(node.args) == 2 and not node.kwargs


def _column(gm: GraphModule, column: object) -> tuple[Node, int] | None:
    """(G, e) of what is G[.., e, None, ..] in every draw, or its only number, and is computed of G."""
    fake = edit.tensor_value(column) if isinstance(column, Node) else None
    found = choices.drawn(gm, column) if fake is not None and sizes(column)[-1:] in ((), (1,)) else None
    for node in sorted(edit.ancestors([column]), reverse=True) if found is not None else ():
        whole = choices.drawn(gm, node) if edit.tensor_value(node) is not None else None
        if whole is None or not whole[0].dim() or not 1 < whole[0].shape[-1] <= MOST:
            continue
        if any(g.shape[-1] != whole[0].shape[-1] or not _fits(v, g[..., 0]) for g, v in zip(whole, found)):
            continue
        same = [(g.reshape(-1, g.shape[-1]) == v.reshape(-1, 1)).all(0) for g, v in zip(whole, found)]
        same = torch.stack(same).all(0)
        if same.sum() == 1:
            return node, int(same.nonzero())
    return None


def _fits(column: Tensor, of_one: Tensor) -> bool:
    """Whether a column has the dims of the weights of one expert, and some of size 1 behind them; or both are a
    number."""
    front = of_one.dim()
    alike = column.shape[:front] == of_one.shape and column.dim() > front
    return column.numel() == of_one.numel() and (alike or column.numel() == 1)


def _choose_all(gm: GraphModule, found: _Mixture) -> Node:
    weights, products = found.weights, [product for product, _ in found.columns.values()]
    with edit.at(min(products)):
        emit = ragged.Rows(gm, edit.tensor_value(weights).fake_mode, "")
        if numel(weights) == len(found.columns):
            weights = _for_each_token(emit, weights, found)
        every = emit.emit_call(torch.arange, len(found.columns), device=edit.tensor_value(weights).device)
        ids = emit.method("expand_as", every, weights)
    for e, (product, column) in found.columns.items():
        with edit.at(product):
            chosen = emit.emit_call(operator.mul, weights, emit.emit_call(operator.eq, ids, e))
            new = emit.emit_call(torch.sum, chosen, -1, keepdim=True)
            new = emit.with_ones(new, edit.tensor_value(column).dim() - edit.tensor_value(new).dim())
        product.replace_input_with(column, new)
    return ids


def _for_each_token(emit: ragged.Rows, weights: Node, found: _Mixture) -> Node:
    """Weights [E], or [1, E], of all tokens as [.., E], of each."""
    product, _ = found.columns[0]
    tokens = sizes(product)[:-1]
    like = min((n for n in edit.ancestors([product]) - {product} if tokens and sizes(n)[:-1] == tokens), default=None)
    if like is None:
        raise RaiseError("no tensor that experts read has a row for every token", where=edit.place(product))
    dims = [emit.method("size", like, dim) for dim in range(len(tokens))]
    return emit.method("expand", emit.method("reshape", weights, -1), *dims, -1)
