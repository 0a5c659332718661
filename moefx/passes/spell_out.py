"""Write ops through which entries cannot be followed as others through which they can. A part of the step
place-experts, for meshes with `mp`.

Contract
    takes  MOE   any graph
    gives        the same; a view like another tensor names its sizes, and what is written to a slice of a tensor makes
                 a new one
    never  touches a tensor that may be a view, of which a view is read after a write that came later, or that anything
           but single entries and slices is written to

Pseudo-code
    y = view_as(x, like); y = view(x, like.size())
                                    ->  y = view(x, (like.size(0), 4, 8))
    a[..., i, :4] = b; y = f(a)     ->  a1 = select_scatter(a, slice_scatter(a[..., i], b, -1, 0, 4), -2, i); y = f(a1)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.dim_indexing import items
from moefx.ir.names import op_name
from moefx.ir.op import decide_same
from moefx.ir.shapes import LIKE, name_sizes
from moefx.ir.writes import may_be_view, users_of_memory, writes


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if ctx.mesh.size("mp") == 1:
        return result
    for node in list(gm.graph.nodes):
        if op_name(node) in (*LIKE, *LIKE.values()) and name_sizes(node):
            result.changed(f"{node.name} names its sizes")
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for base in order:
        puts = [u for u in base.users if u.target is operator.setitem and u.args[0] is base]
        if puts and _is_by_itself(base, puts, order) and all(_fits(put) for put in puts):
            _make_new(base, sorted(puts, key=order.__getitem__), order)
            result.changed(f"{len(puts)} writes to slices of {base.name} make new tensors")
    return result


def _is_by_itself(base: Node, puts: list[Node], order: dict[Node, int]) -> bool:
    """Whether nobody else has the memory, or writes to it, and views are read before the next write."""
    found = users_of_memory(base)
    writers = {user for user, is_write in found.items() if is_write}
    if not base.op.startswith("call") or may_be_view(base) or writers != {*puts}:
        return False
    for view in (base, *found):
        if view is not base and may_be_view(view) and not writes(view):
            last = max((order[u] for u in view.users), default=0)
            if any(order[view] < order[put] < last for put in puts):
                return False
    return True


def _fits(put: Node) -> bool:
    """Whether what is written is as large as its place, and of its type."""
    base, item, given = put.args
    x, new = edit.tensor_value(base), edit.tensor_value(given)
    item = item if isinstance(item, tuple) else (item,)
    bounds = [each for i in item for each in ((i.start, i.stop, i.step) if isinstance(i, slice) else (i,))]
    if new is None or put.users or not all(each in (None, Ellipsis) or type(each) is int for each in bounds):
        return False
    place = x[item]
    return new.dtype == x.dtype and new.dim() == place.dim() and all(map(decide_same, place.shape, new.shape))


def _make_new(base: Node, puts: list[Node], order: dict[Node, int]) -> None:
    current = base
    for put in puts:
        _, item, given = put.args
        places = [(dim, i) for dim, i in items(item, edit.tensor_value(base).dim()) if i != slice(None)]
        with edit.at(put):
            new = _with(current, places, given)
        for user in [u for u in current.users if order.get(u, -1) > order[put]]:
            user.replace_input_with(current, new)
        base.graph.erase_node(put)
        current = new


def _with(x: Node, places: list[tuple[int, Any]], given: Node) -> Node:
    """x with something else at a place: (dim, number or slice) each."""
    if not places:
        return given
    (dim, i), *rest = places
    graph = x.graph
    args = (dim, i.start, i.stop, i.step or 1) if isinstance(i, slice) else (dim, i)
    taking, putting = (torch.ops.aten.slice.Tensor, torch.slice_scatter) if isinstance(i, slice) else (
        torch.select, torch.select_scatter)  # fmt: skip
    if rest:
        rest = [(d - (type(i) is int and d > dim), each) for d, each in rest]
        given = _with(edit.valued(edit.call(graph, taking, x, *args)), rest, given)
    return edit.valued(edit.call(graph, putting, x, given, *args))
