"""Write results of experts that are added all at once as a loop that adds them one by one.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   the sum became a chain of additions, in which raise-loop sees a dense loop over experts
    never  touches sums whose weights come from a routing whose choices may be the same; nor, if they come from none,
           sums of what is not one function of different parameters, or cannot be spread over the ranks

Pseudo-code
    1. find y = stack([f_e(x)], dim) and its weighted sum over the experts: with weights [T, E] that are zero where an
       expert was not chosen, by mul and sum or by einsum; or a gather of the chosen experts' outputs, times w [T, K]
       what is weighed before it is stacked, stack([f_e(x) * w_e]).sum(0): the sum of its parts
       results that are collected in lists, out.index_add(0, cat([t_e]), cat([y_e])): out.index_add(0, t_e, y_e)
    2. emit out = out + f_e(x) * (w * (idx == e)).sum(-1, keepdim=True) for every e

    einsum("te,ted->td", zeros.scatter(1, idx, w), stack([f_0(x), f_1(x)], 1))
        ->  f_0(x) * (w * (idx == 0)).sum(-1, keepdim=True) + f_1(x) * (w * (idx == 1)).sum(-1, keepdim=True)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from moefx.analysis.recognition import additions, choices, routings
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import Scattered
from moefx.analysis.recognition.roles import Slices, Stack
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes


@dataclass(frozen=True)
class _Sum:
    """outputs: [.., D] of every expert. idx, w: [.., K]; idx is None where w [.., E] weighs all experts. axis: of size
    one, that the sum has and the outputs do not."""

    outputs: tuple[Node, ...]
    idx: Node | None
    w: Node
    axis: int | None = None


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if not any(op_name(node) in ("stack", "cat", "concat") for node in gm.graph.nodes):
        return result
    facts = choices.facts(gm)
    for node in list(gm.graph.nodes):
        if _add_one_by_one(gm, node):
            result.changed(f"{node.name}: collected rows added one by one")
            continue
        if _add_products(gm, node):
            result.changed(f"{node.name}: stacked products added one by one")
            continue
        found = _match(node, facts)
        if found is not None and found.idx is None:
            ranks, experts = ctx.mesh.size("ep"), len(found.outputs)
            spread = 1 < ranks <= experts
            found = found if spread and _are_experts(found.outputs, facts, ctx) else None
        if found is not None:
            _rewrite(gm, node, found)
            result.changed(f"{node.name}: {len(found.outputs)} stacked experts added one by one")
    return result


def _add_one_by_one(gm: GraphModule, node: Node) -> bool:
    if op_name(node) not in ("index_add", "index_add_") or arg(node, 1, "dim") != 0 or node.kwargs:
        return False
    indices, sources = _pieces(arg(node, 2, "index")), _pieces(arg(node, 3, "source"))
    if len(indices) != len(sources) or len(indices) < 2:
        return False
    if any(sizes(i)[0] != sizes(s)[0] for i, s in zip(indices, sources)):
        return False
    total = node.args[0]
    with edit.at(node):
        for index, source in zip(indices, sources):
            total = gm.graph.call_method("index_add", (total, 0, index, source))
            total.meta["val"] = edit.tensor_value(node)
    node.replace_all_uses_with(total)
    edit.erase_unused([node, node.args[2], node.args[3]])
    return True


def _add_products(gm: GraphModule, node: Node) -> bool:
    """stack([f_e(x) * w_e]).sum(0)"""
    stacked, dim = (node.args[0], _summed_dim(node)) if node.args else (None, None)
    outputs, axis = _stacked(stacked)
    if len(outputs) < 2 or dim is None or dim % len(sizes(stacked)) != axis or set(node.kwargs) - {"dim"}:
        return False
    if any(op_name(additions.product_of(output)) != "mul" for output in outputs):
        return False
    total = outputs[0]
    with edit.at(node):
        for output in outputs[1:]:
            total = edit.call(gm.graph, operator.add, total, output)
            total.meta["val"] = edit.tensor_value(node)
    _replace(node, total, outputs)
    return True


def _summed_dim(node: Node) -> int | None:
    """The one dim that is summed over, and goes."""
    dim = arg(node, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    goes = op_name(node) == "sum" and type(dim) is int and not arg(node, 2, "keepdim", False)
    return dim if goes else None


def _pieces(joined: Any) -> tuple[Node, ...]:
    """What was joined along the first dim."""
    if not isinstance(joined, Node) or op_name(joined) not in ("cat", "concat") or arg(joined, 1, "dim", 0) != 0:
        return ()
    return tuple(arg(joined, 0, "tensors"))


def _match(node: Node, facts: dict) -> _Sum | None:
    name = op_name(node)
    if name in ("einsum", "bmm", "matmul"):
        return _einsum(node, facts) if name == "einsum" else _product(node, facts)
    dim = _summed_dim(node)
    product = node.args[0] if dim is not None else None
    if not isinstance(product, Node) or op_name(product) != "mul" or not all(isinstance(a, Node) for a in product.args):
        return None
    for y, factor in (product.args, product.args[::-1]):
        found = _gathered(y, factor, dim, facts) or _weighed(y, factor, dim, facts)
        if found is not None:
            return found
    return None


def _weighed(y: Node, factor: Node, dim: int, facts: dict) -> _Sum | None:
    """(y * full).sum(experts), full [.., E] with an axis of size one for D."""
    outputs, axis = _stack(y)
    full = _weights(_without_axes(factor), outputs, facts)
    rank = len(sizes(y))
    if full is None or dim % rank != axis or len(sizes(factor)) != rank:
        return None
    same_tokens = sizes(factor)[: rank - 2] == sizes(y)[: rank - 2]
    fits = same_tokens and sizes(factor)[axis] == len(outputs) and sizes(factor)[_other(axis, rank)] == 1
    return full if fits else None


def _gathered(y: Node, factor: Node, dim: int, facts: dict) -> _Sum | None:
    """(y.gather(experts, idx) * w).sum(choices)."""
    w, rank = _without_axes(factor), len(sizes(y))
    found, axis = _chosen(y, w, facts)
    if found is None or dim % rank != axis or len(sizes(factor)) != rank:
        return None
    fits = sizes(factor)[axis] == sizes(w)[-1] and sizes(factor)[_other(axis, rank)] == 1
    return found if fits else None


def _chosen(y: Node, w: Node, facts: dict) -> tuple[_Sum | None, int]:
    """y [.., K, D]: what the chosen experts gave, of all that was stacked, w [.., K] its weights; the axis of K."""
    if op_name(y) == "gather":
        along, index = arg(y, 1, "dim"), arg(y, 2, "index")
    elif op_name(y) == "take_along_dim":
        along, index = arg(y, 2, "dim"), arg(y, 1, "indices")
    elif op_name(y) == "getitem" and _is_of_every_row(y):
        along, index = 1, y.args[1][1]
    else:
        return None, 0
    outputs, axis = _stack(y.args[0])
    idx, rank = _without_axes(index), len(sizes(y))
    if not outputs or not isinstance(along, int) or along % rank != axis or w in facts:
        return None, axis
    pairs = len(sizes(idx)) == rank - 1 and sizes(idx) == sizes(w) and routings.is_distinct(idx)
    whole = sizes(y)[_other(axis, rank)] == sizes(outputs[0])[-1] and sizes(y)[axis] == sizes(w)[-1]
    return (_Sum(outputs, idx, w) if pairs and whole else None), axis


def _is_of_every_row(y: Node) -> bool:
    """y[torch.arange(T)[:, None], idx]"""
    item = y.args[1]
    if not isinstance(item, tuple) or len(item) != 2 or not all(isinstance(i, Node) for i in item):
        return False
    numbers = _without_axes(item[0])
    if op_name(numbers) in ("view", "reshape"):
        numbers = numbers.args[0]
    tokens = sizes(y.args[0])[0]
    every = op_name(numbers) == "arange" and numbers.args[:-1] in ((), (0,)) and sizes(numbers) == (tokens,)
    return every and sizes(item[0]) == (tokens, 1) and len(sizes(item[1])) == 2


def _einsum(node: Node, facts: dict) -> _Sum | None:
    """einsum("te,ted->td", full, y), in any order and with any letters."""
    equation, *operands = node.args
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    for (letters, factor), (stacked, y) in (pair := list(zip(left.split(","), operands)), pair[::-1]):
        outputs, axis = _stack(y)
        full, rank = _weights(factor, outputs, facts), len(sizes(y))
        if full is None and isinstance(y, Node):
            full, axis = _chosen(y, factor, facts)
        if full is None or not len(stacked) == len(set(stacked)) == rank:
            continue
        tokens = stacked[: rank - 2]
        if letters == tokens + stacked[axis] and out == tokens + stacked[_other(axis, rank)]:
            return full
    return None


def _product(node: Node, facts: dict) -> _Sum | None:
    """full [.., 1, E] @ y [.., E, D], or y [.., D, E] @ full [.., E, 1]."""
    left, right = node.args[0], arg(node, 1, "mat2" if op_name(node) == "bmm" else "other")
    rank = len(sizes(node))
    for y, factor, axis in ((right, left, rank - 2), (left, right, rank - 1)):
        outputs, found = _stack(y)
        inner = _before_axis(factor, axis) if outputs and found == axis and isinstance(factor, Node) else None
        full = _weights(inner, outputs, facts)
        if full is not None and len(sizes(y)) == rank and sizes(inner)[:-1] == sizes(y)[: rank - 2]:
            return replace(full, axis=axis)
    return None


def _weights(full: Node, outputs: tuple[Node, ...], facts: dict) -> _Sum | None:
    """full: [.., E], zero where an expert was not chosen, or of all experts."""
    if not outputs or not isinstance(full, Node):
        return None
    fact = facts.get(full)
    if isinstance(fact, Scattered):
        return _Sum(outputs, fact.idx, fact.w)
    return _Sum(outputs, None, full) if fact is None and sizes(full)[-1:] == (len(outputs),) else None


def _are_experts(outputs: tuple[Node, ...], facts: dict, ctx: PassContext) -> bool:
    """Whether outputs are one function of the same tokens, with parameters that differ."""
    try:
        branches = Branches(facts, outputs, dense=True, row_dims=len(sizes(outputs[0])) - 1)
    except RaiseError as error:
        ctx.report.nearly.append(error.what)
        return False
    return any(isinstance(role, (Stack, Slices)) for role in branches.roles.values())


def _stack(y: Any) -> tuple[tuple[Node, ...], int]:
    """(outputs [.., D], axis of the experts: the last but one, or the last); no outputs if `y` is no such stack."""
    outputs, axis = _stacked(y)
    return (outputs, axis) if axis >= len(sizes(y)) - 2 else ((), 0)


def _stacked(y: Any) -> tuple[tuple[Node, ...], int]:
    """(outputs [.., D], the axis on which they are stacked); no outputs if `y` is no stack."""
    if not isinstance(y, Node) or op_name(y) not in ("stack", "cat", "concat"):
        return (), 0
    rank, outputs = len(sizes(y)), arg(y, 0, "tensors")
    if rank < 3 or not isinstance(outputs, (tuple, list)):
        return (), 0
    axis = arg(y, 1, "dim", 0) % rank
    if op_name(y) != "stack":
        outputs = [_before_axis(each, axis) for each in outputs]
    return (tuple(outputs), axis) if None not in outputs else ((), 0)


def _before_axis(node: Node, axis: int) -> Node | None:
    """The tensor that got an axis of size one at this place."""
    if op_name(node) == "unsqueeze":
        return node.args[0] if arg(node, 1, "dim") % len(sizes(node)) == axis else None
    if op_name(node) != "getitem" or not _adds_axes(node.args[1]):
        return None
    item, rank = list(node.args[1] or (None,)), len(sizes(node))
    if Ellipsis in item:
        at = item.index(Ellipsis)
        item[at : at + 1] = [slice(None)] * (rank - len(item) + 1)
    return node.args[0] if [i for i, each in enumerate(item) if each is None] == [axis] else None


def _other(axis: int, rank: int) -> int:
    """Of the last two axes of a stack, the one that is not that of the experts."""
    return 2 * rank - 3 - axis


def _without_axes(node: Any) -> Any:
    """The tensor before axes of size one, casts and expansions."""
    while isinstance(node, Node) and op_name(node) in ("unsqueeze", "expand", "expand_as", "to", "type_as", "getitem"):
        if op_name(node) == "getitem" and not _adds_axes(node.args[1]):
            break
        node = node.args[0]
    return node


def _adds_axes(item: Any) -> bool:
    return item is None or (isinstance(item, tuple) and all(i in (slice(None), Ellipsis, None) for i in item))


def _rewrite(gm: GraphModule, node: Node, found: _Sum) -> None:
    emit = ragged.Rows(gm, edit.tensor_value(found.w).fake_mode, "")
    with edit.at(node):
        total = None
        for expert, output in enumerate(found.outputs):
            if found.idx is None:
                score = emit.method("unsqueeze", emit.method("select", found.w, -1, expert), -1)
            else:
                mine = emit.emit_call(operator.mul, found.w, emit.emit_call(operator.eq, found.idx, expert))
                score = emit.method("sum", mine, -1, keepdim=True)
            rows = emit.emit_call(operator.mul, output, score)
            total = rows if total is None else emit.emit_call(operator.add, total, rows)
        if found.axis is not None:
            total = emit.method("unsqueeze", total, found.axis)
    _replace(node, total, [*found.outputs, found.w, *(() if found.idx is None else (found.idx,))])


def _replace(node: Node, total: Node, read: Iterable[Node]) -> None:
    """By what is computed of the nodes that are `read`."""
    node.replace_all_uses_with(total)
    edit.erase_unused(n for n in edit.ancestors([node]) - edit.ancestors(read) if n.op != "placeholder")
