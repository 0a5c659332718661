"""Write results of experts that are added all at once as a loop that adds them one by one.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   the sum became a chain of additions, in which raise-loop sees a dense loop over experts
    never  touches sums whose weights come from a routing whose choices may be the same; nor, if they come from none,
           sums of what is not one function of different parameters, or cannot be spread over the ranks

Pseudo-code
    1. y = stack([f_e(x)], dim), or a cat of which a view is that, and what is computed of y alone until it has the
       shape of one output
    2. that is run on drawn numbers: is it the sum of c_e * y_e? The shares c [.., E] are its derivatives
    3. c are weights [T, E] that are zero where an expert was not chosen, or w [T, K] at the experts idx: emit
       out = out + f_e(x) * (w * (idx == e)).sum(-1, keepdim=True) for every e; or weights of all experts; or ones, for
       what was weighed before it is stacked, stack([f_e(x) * w_e]).sum(0)

    einsum("te,ted->td", zeros.scatter(1, idx, w), stack([f_0(x), f_1(x)], 1))
        ->  f_0(x) * (w * (idx == 0)).sum(-1, keepdim=True) + f_1(x) * (w * (idx == 1)).sum(-1, keepdim=True)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.checking.evaluate import run_here
from moefx.analysis.recognition import additions, choices, routings
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import Scattered
from moefx.analysis.recognition.host_numbers import is_number
from moefx.analysis.recognition.indexing import JOINS
from moefx.analysis.recognition.roles import Slices, Stack
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.dims import is_reshape
from moefx.ir.names import arg, op_name
from moefx.ir.shapes import sizes
from moefx.ir.writes import users_of_memory


@dataclass(frozen=True)
class _Sum:
    """outputs: [.., D] of every expert. idx, w: [.., K]; idx is None where w [.., E] weighs all experts, both are where
    nothing does. times: by what the sum is multiplied."""

    outputs: tuple[Node, ...]
    idx: Node | None = None
    w: Node | None = None
    times: float = 1.0


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    _stack_joined(gm)
    for stack in [node for node in gm.graph.nodes if op_name(node) in ("stack", *JOINS)]:
        outputs, axis = _stacked(stack)
        for chain in _chains(stack, outputs):
            facts = choices.facts(gm)
            shares = _shares(gm, stack, axis, chain)
            found = None if shares is None else (_weights(gm, facts, chain, shares, outputs)
                                                 or _means(gm, facts, chain, shares, outputs))  # fmt: skip
            if found is None or (found.idx is None and found.w is not None and not _may_spread(found, facts, ctx)):
                continue
            _rewrite(gm, chain[-1], found)
            result.changed(f"{chain[-1].name}: {len(outputs)} stacked experts added one by one")
    return result


def _stack_joined(gm: GraphModule) -> None:
    """cat([a, b], -1).view(.., 2, D) is stack([a, b], -2)."""
    for node in [n for n in gm.graph.nodes if is_reshape(n) and op_name(n.args[0]) in JOINS]:
        outputs = arg(node.args[0], 0, "tensors")
        shapes = {sizes(each) for each in outputs}
        if len(shapes) > 1 or len(outputs) == 1 or any(users_of_memory(node.args[0]).values()):
            continue
        (shape,) = shapes
        axis = arg(node.args[0], 1, "dim", 0) % len(shape)
        if sizes(node) == (*shape[:axis], len(outputs), *shape[axis:]):
            with edit.at(node):
                emit = ragged.Rows(gm, edit.tensor_value(node).fake_mode, "")
                node.replace_all_uses_with(emit.stacked(outputs, axis))
            edit.erase_unused([node, node.args[0]])


def _stacked(y: Node) -> tuple[tuple[Node, ...], int]:
    """(outputs [.., D], the axis on which they are stacked); no outputs if `y` is no stack."""
    rank, outputs = len(sizes(y)), arg(y, 0, "tensors")
    if rank < 3 or not isinstance(outputs, (tuple, list)):
        return (), 0
    axis = arg(y, 1, "dim", 0) % rank
    if op_name(y) != "stack":
        outputs = [_before_axis(each, axis) for each in outputs]
    return (tuple(outputs), axis) if None not in outputs and len(outputs) > 1 else ((), 0)


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


def _adds_axes(item: Any) -> bool:
    return item is None or (isinstance(item, tuple) and all(i in (slice(None), Ellipsis, None) for i in item))


def _chains(stack: Node, outputs: tuple[Node, ...]) -> Iterator[list[Node]]:
    """What each reader makes of what is stacked, up to where it has the shape of one output."""
    for node in list(stack.users) if outputs else ():
        chain = [node]
        while edit.tensor_value(node) is not None and sizes(node) != sizes(outputs[0]):
            readers = [user for user in node.users if not is_number(user)]
            if len(readers) != 1:
                break
            chain += readers
            (node,) = readers
        if edit.tensor_value(node) is not None and sizes(node) == sizes(outputs[0]):
            yield chain


def _shares(gm: GraphModule, stack: Node, axis: int, chain: list[Node]) -> list[Tensor] | None:
    """[.., E], draw by draw: by what the end of a chain multiplies every output before it adds them; None: it does
    something else."""
    reads = [n for n in dict.fromkeys(n for each in chain for n in each.all_input_nodes) if n not in (stack, *chain)]
    drawn, dims = {n: choices.drawn(gm, n) for n in reads}, edit.tensor_value(stack).shape
    shapes = [choices.drawn_size(gm, size) for size in dims]
    if None in drawn.values() or None in shapes:
        return None
    found = []
    for draw, shape in enumerate(zip(*shapes)):
        with torch.enable_grad():
            y = torch.rand(shape, generator=torch.Generator().manual_seed(draw)).requires_grad_()
            values = {stack: y} | {n: each[draw] for n, each in drawn.items()}
            try:
                for node in chain:
                    values[node] = run_here(node, values)
                out = values[chain[-1]]
                (grad,) = torch.autograd.grad(out[..., 0].sum(), y)
            except (RuntimeError, IndexError, TypeError, ValueError):  # of any op, on numbers of no meaning
                return None
        share = grad.movedim(axis, 0)[..., 0]
        total = (share[..., None] * y.detach().movedim(axis, 0)).sum(0)
        if total.shape != out.shape or not torch.allclose(total, out.detach().float(), rtol=1e-3, atol=1e-4):
            return None
        found.append(share.movedim(0, -1))
    return found


def _means(gm: GraphModule, facts: dict, chain: list[Node], shares: list[Tensor],
           outputs: tuple[Node, ...]) -> _Sum | None:  # fmt: skip
    """The same, where a mean is taken for a sum."""
    found = _weights(gm, facts, chain, [share * len(outputs) for share in shares], outputs)
    return None if found is None else replace(found, times=1 / len(outputs))


def _weights(gm: GraphModule, facts: dict, chain: list[Node], shares: list[Tensor],
             outputs: tuple[Node, ...]) -> _Sum | None:  # fmt: skip
    """What the shares are by what a chain reads."""
    if all(torch.allclose(share, torch.ones_like(share)) for share in shares):
        weighed = all(op_name(additions.product_of(output)) == "mul" for output in outputs)
        return _Sum(outputs) if weighed else None
    behind = sorted(edit.ancestors(chain) - edit.descendants(outputs), reverse=True)  # the nearest first
    drawn = {node: values for node in behind if (values := choices.drawn(gm, node)) is not None}
    floats = [node for node in drawn if edit.tensor_value(node) is not None and not choices.is_integral(node)]
    for node in floats:
        fact = facts.get(node)
        if (fact is None or isinstance(fact, Scattered)) and _are_close(*_of_samples(drawn[node], shares)):
            return _Sum(outputs, None, node) if fact is None else _Sum(outputs, fact.idx, fact.w)
    for idx in [node for node in drawn if choices.is_integral(node) and routings.is_distinct(node)]:
        for w in [node for node in floats if sizes(node) == sizes(idx) and node not in facts]:
            if all(map(_spreads_to, drawn[idx], drawn[w], shares)):
                return _Sum(outputs, idx, w)
    return None


def _of_samples(found: list[Tensor], shares: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Shares [.., L, E] of tokens as those [.., E] of samples, or as [E], if so many weights are to be compared with
    them and the tokens have the same."""
    weights, share = found[0], shares[0]
    front = 0 if weights.numel() == share.shape[-1] else weights.dim() - 1
    inside = tuple(range(front, share.dim() - 1))
    if not inside or not all(torch.allclose(each.amax(inside), each.amin(inside)) for each in shares):
        return found, shares
    return [each.squeeze(0) if front == 0 else each for each in found], [each.amax(inside) for each in shares]


def _spreads_to(ids: Tensor, w: Tensor, share: Tensor) -> bool:
    fits = ids.shape[:-1] == share.shape[:-1] and ids.min() >= 0 and ids.max() < share.shape[-1]
    return fits and _are_close([torch.zeros_like(share).scatter_add(-1, ids, w.float())], [share])


def _are_close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.allclose(a.float(), b, rtol=1e-3, atol=1e-5)
               for a, b in zip(found, wanted))  # fmt: skip


def _may_spread(found: _Sum, facts: dict, ctx: PassContext) -> bool:
    """Whether there are enough outputs, all of one function of the same tokens, with parameters that differ."""
    if not 1 < ctx.mesh.size("ep") <= len(found.outputs):
        return False
    try:
        branches = Branches(facts, found.outputs, dense=True, row_dims=len(sizes(found.outputs[0])) - 1)
    except RaiseError as error:
        ctx.report.nearly.append(error.what)
        return False
    return any(isinstance(role, (Stack, Slices)) for role in branches.roles.values())


def _rewrite(gm: GraphModule, node: Node, found: _Sum) -> None:
    emit = ragged.Rows(gm, edit.tensor_value(node).fake_mode, "")
    with edit.at(node):
        total = None
        for expert, output in enumerate(found.outputs):
            rows = output
            if found.idx is not None:
                mine = emit.emit_call(operator.mul, found.w, emit.emit_call(operator.eq, found.idx, expert))
                rows = emit.emit_call(operator.mul, output, emit.method("sum", mine, -1, keepdim=True))
            elif found.w is not None:
                ones = len(sizes(output)) - len(sizes(found.w)) + 1 if len(sizes(found.w)) > 1 else 0
                score = emit.with_ones(emit.method("select", found.w, -1, expert), ones)
                rows = emit.emit_call(operator.mul, output, score)
            total = rows if total is None else emit.emit_call(operator.add, total, rows)
        if found.times != 1:
            total = emit.emit_call(operator.mul, total, found.times)
    _replace(node, total, [*found.outputs, *(n for n in (found.w, found.idx) if n is not None)])


def _replace(node: Node, total: Node, read: Iterable[Node]) -> None:
    """By what is computed of the nodes that are `read`."""
    node.replace_all_uses_with(total)
    edit.erase_unused(n for n in edit.ancestors([node]) - edit.ancestors(read) if n.op != "placeholder")
