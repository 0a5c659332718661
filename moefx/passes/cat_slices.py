"""Write an empty tensor that is filled slice by slice as one concatenation. A part of the step place-experts, for
meshes with `mp`: entries of a concatenation can be followed.

Contract
    takes  MOE   any graph
    gives        the same; a tensor that copies to slices of one dim fill, before anybody reads it, is a cat
    never  touches a tensor whose slices overlap, leave a gap, are given another type or shape, or come from what is
           written to

Pseudo-code
    y = new_empty(x, n, 8); copy_(y[:, :4], a); copy_(y[:, 4:], b)  ->  y = cat((a, b), 1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import expr
from moefx.ir.writes import may_be_view, users_of_memory


class _Fill(NamedTuple):
    """dim, start and stop of a slice, what is copied there, the slice and the copy."""

    dim: int
    start: int
    stop: int
    given: Node
    place: Node
    copy: Node


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for node in list(gm.graph.nodes):
        if ctx.mesh.size("mp") > 1 and op_name(node) in ("new_empty", "empty", "empty_like"):
            fills = _fills(node)
            if fills:
                _join(gm, node, fills)
                result.changed(f"{node.name} is a concatenation of {len(fills)}")
    return result


def _fills(node: Node) -> list[_Fill]:
    """What fills a tensor, in the order of its slices; none if anything else happens to it."""
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    places = [u for u in node.users if op_name(u) == "getitem" and any(op_name(w) == "copy_" for w in u.users)]
    found = [fill for place in places if (fill := _fill(node, place)) is not None]
    last = max((order[fill.copy] for fill in found), default=0)
    readers = [order[u] for u in node.users if u not in places]
    if len(found) < max(len(places), 2) or min(readers, default=last) < last or len({fill.dim for fill in found}) > 1:
        return []
    found.sort(key=lambda fill: fill.start)
    ends = [0, *(fill.stop for fill in found)]
    size = edit.tensor_value(node).shape[found[0].dim]
    return found if [fill.start for fill in found] == ends[:-1] and ends[-1] == size else []


def _fill(node: Node, place: Node) -> _Fill | None:
    (copy, *others), whole = place.users, edit.tensor_value(node)
    item = place.args[1] if isinstance(place.args[1], tuple) else (place.args[1],)
    if others or copy.users or op_name(copy) != "copy_" or copy.args[0] is not place or len(copy.args) != 2:
        return None
    given = copy.args[1]
    if not isinstance(given, Node) or _kind(given) != _kind(place):
        return None
    if any(any(users_of_memory(root).values()) for root in _memory_of(given)):
        return None  # it might be another by the time that all slices are there
    if Ellipsis in item:
        at = item.index(Ellipsis)
        item = (*item[:at], *[slice(None)] * (whole.dim() - len(item) + 1), *item[at + 1 :])
    cut = [(dim, each) for dim, each in enumerate(item) if each != slice(None)]
    if len(cut) != 1 or not isinstance(cut[0][1], slice) or cut[0][1].step not in (None, 1):
        return None
    dim, bounds, size = *cut[0], whole.shape[cut[0][0]]
    if not all(bound is None or type(bound) is int for bound in (bounds.start, bounds.stop, size)):
        return None
    start, stop, _ = bounds.indices(size)
    return _Fill(dim, start, stop, given, place, copy)


def _kind(node: Node) -> tuple:
    found = edit.tensor_value(node)
    return found.dtype, *map(expr, found.shape)


def _memory_of(node: Node) -> list[Node]:
    """The values that a value may be a view of, and itself."""
    found = [node]
    while may_be_view(found[-1]) and isinstance(found[-1].args[0], Node):
        found.append(found[-1].args[0])
    return found


def _join(gm: GraphModule, node: Node, fills: list[_Fill]) -> None:
    last = max((fill.copy for fill in fills), key=list(gm.graph.nodes).index)
    with edit.at(last, after=True):
        joined = gm.graph.call_function(torch.cat, (tuple(fill.given for fill in fills), fills[0].dim))
    edit.inherit(joined, node)
    joined.meta["val"] = edit.tensor_value(node)
    for fill in fills:
        gm.graph.erase_node(fill.copy)
        gm.graph.erase_node(fill.place)
    node.replace_all_uses_with(joined)
    gm.graph.erase_node(node)
