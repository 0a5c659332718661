"""Gather parameters as what their readers cast them to: half of the bytes under autocast. A part of differentiate.

Contract
    takes  PLACED   the joint graph of forward and backward, with gathers of shards and sums of their gradients
    gives  PLACED   the same; what all readers cast to one dtype is cast before it is gathered, and gradients that are
                    cast back are summed as they are, in single precision, and cast behind that
    never  casts what anybody reads as it is

Pseudo-code
    a bucket falls apart by the dtypes of its readers; so does the sum of its gradients

    parts = gather_shards([w], .., None); y = mm(x, _to_copy(parts[0], bf16))
        ->  parts = gather_shards([w], .., bf16); y = mm(x, parts[0])
"""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import value

_aten, _ops = torch.ops.aten, torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for gather in gm.graph.find_nodes(op="call_function", target=_ops.gather_shards.default):
        parts = _parts(gather)
        dtypes = [_cast_to(parts.get(i)) for i in range(len(gather.args[0]))]
        if any(dtypes):
            _split(gather, dtypes, ctx)
            result.changed(f"{gather.name}: {sum(map(bool, dtypes))} parameters are cast before they are gathered")
    for scatter in gm.graph.find_nodes(op="call_function", target=_ops.scatter_shards.default):
        sums = [_cast_from(grad, scatter) for grad in scatter.args[0]]
        if any(each is not None for each in sums):
            _split_sum(scatter, sums, ctx)
    gm.graph.eliminate_dead_code()
    return result


def _parts(node: Node) -> dict[int, Node]:
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def _cast_to(part: Node | None) -> torch.dtype | None:
    """What all readers cast it to."""
    found = {_dtype(user) for user in part.users} if part is not None else set()
    return found.pop() if len(found) == 1 else None


def _dtype(node: Node) -> torch.dtype | None:
    is_cast = node.target is _aten._to_copy.default and node.kwargs.keys() <= {"dtype", "layout", "device"}
    is_here = is_cast and value(node).device == value(node.args[0]).device
    return node.kwargs.get("dtype") if is_here else None


def _cast_from(grad: Node, scatter: Node) -> Node | None:
    """What was cast to be summed, by nobody else's wish."""
    return grad.args[0] if _dtype(grad) is not None and [*grad.users] == [scatter] else None


def _split(gather: Node, dtypes: list[torch.dtype | None], ctx: PassContext) -> None:
    parts = _parts(gather)
    for dtype, members in _grouped(dtypes).items():
        new = _call(gather, gather.args[:3], members, dtype, ctx)
        for i, part in zip(members, new):
            for old in [*parts[i].users] if dtype and i in parts else [parts[i]] if i in parts else ():
                old.replace_all_uses_with(part)


def _split_sum(scatter: Node, sums: list[Node | None], ctx: PassContext) -> None:
    grads, *rest = scatter.args[:3]
    given = [grad if cast is None else cast for grad, cast in zip(grads, sums)]
    kinds = [cast and (value(cast).dtype, value(grad).dtype) for grad, cast in zip(grads, sums)]
    parts = _parts(scatter)
    for kind, members in _grouped(kinds).items():
        for i, part in zip(members, _call(scatter, (given, *rest), members, kind and kind[1], ctx)):
            parts[i].replace_all_uses_with(part)


def _call(old: Node, lists: tuple, members: list[int], dtype: torch.dtype | None, ctx: PassContext) -> list[Node]:
    """The results of the same op of some of its parameters."""
    with edit.at(old, after=True) as graph:
        chosen = ([each[i] for i in members] for each in lists)
        new = edit.valued(edit.call(graph, old.target, *chosen, *old.args[3:-1], dtype, name=old.name), ctx.fake_mode)
        parts = [edit.valued(edit.call(graph, operator.getitem, new, place), ctx.fake_mode)
                 for place in range(len(members))]  # fmt: skip
    for node, like in [(new, old), *zip(parts, (_parts(old).get(i, old) for i in members))]:
        node.meta |= {key: found for key, found in like.meta.items() if key not in node.meta}
    return parts


def _grouped(kinds: list[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        found.setdefault(kind, []).append(i)
    return found
