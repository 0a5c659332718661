"""Make one op of a whole layer of gated experts, for which there is a kernel.

Contract
    takes  PLACED   before differentiation, with activations as ops
    gives  PLACED   the same numbers, up to rounding; the backward is one op, too, and keeps tokens and the results of
                    the first product
    never  does anything where PyTorch's form would run (`PassContext.has_kernel`), where ranks share experts or
           their tokens, or where something else reads what is between; where rows are not to be kept for the backward,
           or a planner may choose so, ops stay apart, and where it may spread the experts over ranks

Pseudo-code
    for every combine with weights: combine <- product <- gated activation of one tensor <- product <- dispatch
        both products have weights [S, O, I], no biases, and train; one routing

    y = combine(linear(gated([linear(dispatch(x, p, 2), u, c)]), d, c), p, 2, w)
        ->   y = expert_layer(x, w, u, d, p, c)[0]
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from moefx import rooms
from moefx.analysis.restorables import Class
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.op import argument, value
from moefx.ir.regions import region_of

_ops = torch.ops.moefx
_ROLES = ("T_DI", "T_M", "T_DO", "R")


class _Layer(NamedTuple):
    """From the last op to the first."""

    combine: Node
    second: Node
    gated: Node
    first: Node
    dispatch: Node


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if ctx.has_kernel is None or ctx.mesh.size("ep+esp+mp") > 1:
        return result
    for combine in gm.graph.find_nodes(op="call_function", target=_ops.combine.default):
        layer = _layer_of(combine)
        if layer is None:
            continue
        why = _why_not(layer, ctx)
        if why is None and not _replace(layer, ctx, result):
            why = "no kernel takes it"
        if why is not None:
            result.skip(combine, f"its layer stays several ops: {why}")
    return result


def _layer_of(combine: Node) -> _Layer | None:
    found = [combine]
    for target in (_ops.grouped_linear.default, _ops.gated.default, _ops.grouped_linear.default,
                   _ops.dispatch.default):  # fmt: skip
        before = found[-1]
        given = argument(before, "halves")[0] if before.target is _ops.gated.default else argument(before, "rows")
        if given.target is not target:
            return None
        found.append(given)
    return _Layer(*found)


def _why_not(layer: _Layer, ctx: PassContext) -> str | None:
    combine, second, gated, first, dispatch = layer
    weights = argument(combine, "weights")
    may_restore = ctx.options.memory_limit is not None or ctx.options.formula in rooms.formulas()
    if ctx.machine is not None and ctx.mesh.size(ctx.mesh.everyone) > 1:
        return "its experts may be spread over ranks"
    if (ctx.machine is not None and may_restore) or any(ctx.way_of(_class(combine, role)) != "keep" for role in _ROLES):
        return "what is kept of its rows is chosen one by one"
    if any(len(node.users) != 1 for node in layer[1:]):
        return "something else reads what is between"
    if weights is None or len(argument(gated, "halves")) != 1:
        return "rows are not weighed" if weights is None else "gates and ups are two products"
    routes = {(argument(each, "perm"), argument(each, "k")) for each in (combine, dispatch)}
    if len(routes) != 1 or argument(first, "counts") is not argument(second, "counts"):
        return "it has two routings"
    if argument(dispatch, "rows") is not None or value(dispatch).dim() != 2:
        return "not all rows are there, or they are matrices"
    if any(argument(each, "transposed") or argument(each, "bias") is not None for each in (first, second)):
        return "a weight lies transposed, or has a bias"
    trained = [value(argument(each, "weight")).requires_grad for each in (first, second)]
    return None if all(trained) or not ctx.grad else "a weight is frozen"


def _class(combine: Node, role: str) -> Class:
    region = region_of(combine)
    return Class(f"{region}.{role}", region, role, 0, "")


def _replace(layer: _Layer, ctx: PassContext, result: PassResult) -> bool:
    combine, second, gated, first, dispatch = layer
    how = (argument(gated, name) for name in ("interleaved", "limit", "alpha"))
    weights, perm = argument(combine, "weights"), argument(combine, "perm")
    with edit.at(combine) as graph:
        new = edit.call(graph, _ops.expert_layer.default, argument(gated, "kind"), argument(dispatch, "x"), weights,
                        argument(first, "weight"), argument(second, "weight"), perm, argument(first, "counts"), *how,
                        name=f"{combine.name}_layer")  # fmt: skip
        out = edit.call(graph, operator.getitem, new, 0, name=combine.name)
    if not ctx.has_kernel(edit.valued(new)):
        graph.erase_node(out)
        graph.erase_node(new)
        return False
    combine.replace_all_uses_with(out)
    edit.erase_unused(layer)
    result.changed(f"{new.name} is a whole layer of experts")
    return True
