"""Write experts that all compute every token, weighed by numbers of any origin, as chosen by every token.

Contract
    takes  CAPTURED   canonical; sums over stacked outputs are chains of additions
    gives  CAPTURED   a mixture without a top-k (a softmax over all experts, MMoE, gates of a ReLU) has a routing that
                      names every expert
    never  touches weights that come of a routing, branches that are not one function of different parameters, or
           fewer experts than there are ranks; nothing where there is no expert axis

Pseudo-code
    1. chains of additions whose terms are f(x, W_e) * G[.., e, None], maybe times a number, with every column of G once
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
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition import additions, choices, loops
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import decide_same, value


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
            if (term := _term(product)) is not None:
                weights, e, column = term
                columns[weights, e] = product, column
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


def _term(node: Node) -> tuple[Node, int, Node] | None:
    """(weights, e, column) of a product with the column of e."""
    node = additions.product_of(node)
    if not isinstance(node, Node) or op_name(node) != "mul" or len(node.args) != 2:
        return None
    for column in node.args:
        tensor = edit.tensor_value(column)
        found = _column(column) if tensor is not None and tensor.dim() > 1 else None
        if found is not None and tensor.dim() == edit.tensor_value(found[0]).dim():
            return *found, column
    return None


def _column(node: Node) -> tuple[Node, int] | None:
    """(G, e) of G[.., e, None], or of another way to write it."""
    found = edit.tensor_value(node)
    if op_name(node) == "unsqueeze" and node.args[1] in (-1, found.dim() - 1):
        return _entry(node.args[0])
    if type(found.shape[-1]) is not int or found.shape[-1] != 1:
        return None
    if op_name(node) == "narrow" and arg(node, 1, "dim") in (-1, found.dim() - 1) and type(node.args[2]) is int:
        return node.args[0], node.args[2]
    if node.target is not operator.getitem:
        return None
    source, item = node.args
    if isinstance(item, int) and op_name(source) in ("split", "chunk") and _dim(source) == found.dim() - 1:
        return (source.args[0], item) if all(piece.shape[-1] == 1 for piece in value(source)) else None
    item = item if isinstance(item, tuple) else (item,)
    if item[-1] is None:
        return (source, item[-2]) if _is_last(item[:-1], source) else None
    part = item[-1]
    is_one = isinstance(part, slice) and type(part.start) is int and part.stop == part.start + 1
    return (source, part.start) if is_one and _is_last((*item[:-1], part.start), source) else None


def _entry(node: Node) -> tuple[Node, int] | None:
    """(G, e) of G[.., e]."""
    if op_name(node) == "select" and type(arg(node, 2, "index")) is int:
        dims = edit.tensor_value(node.args[0]).dim()
        return (node.args[0], arg(node, 2, "index")) if arg(node, 1, "dim") in (-1, dims - 1) else None
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    source, item = node.args
    if isinstance(item, int) and op_name(source) == "unbind" and _dim(source, 1) == edit.tensor_value(node).dim():
        return source.args[0], item
    item = item if isinstance(item, tuple) else (item,)
    return (source, item[-1]) if edit.tensor_value(source) is not None and _is_last(item, source) else None


def _dim(node: Node, position: int = 2) -> int:
    return arg(node, position, "dim", 0) % edit.tensor_value(node.args[0]).dim()


def _is_last(item: tuple, source: Node) -> bool:
    """Whether an index picks one entry of the last dim, and all of the others."""
    whole = all(i in (slice(None), Ellipsis) for i in item[:-1])
    reaches = Ellipsis in item or len(item) == edit.tensor_value(source).dim()
    return type(item[-1]) is int and whole and reaches


def _choose_all(gm: GraphModule, found: _Mixture) -> Node:
    weights = found.weights
    with edit.at(weights, after=True):
        emit = ragged.Rows(gm, edit.tensor_value(weights).fake_mode, "")
        every = emit.emit_call(torch.arange, len(found.columns), device=edit.tensor_value(weights).device)
        ids = emit.method("expand_as", every, weights)
    for e, (product, column) in found.columns.items():
        with edit.at(column, after=True):
            chosen = emit.emit_call(operator.mul, weights, emit.emit_call(operator.eq, ids, e))
            new = emit.emit_call(torch.sum, chosen, -1, keepdim=True)
        additions.product_of(product).replace_input_with(column, new)
    return ids
