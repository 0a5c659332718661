"""Delimit the expert side of a region once its grouped ops stand in the graph: the moe level's markers.

Used by every raise pass. The expert side is the convex hull of the ops that use per-expert parameters. What enters it
from the token side is marked `enter_experts`, what leaves it `leave_experts`, and its parameters `expert_parameter`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.expert_weights import leave_experts_open, roots
from moefx.ir.names import common_name, op_name
from moefx.ir.op import argument, lookup
from moefx.ir.ops import regions as markers
from moefx.ir.writes import writes

_TAG = "moefx_region"
_MARKERS = (markers.enter_experts, markers.leave_experts, markers.expert_parameter)
_NAMED = re.compile(r"r(\d+)_(.*?)(_\d+)?$")


def region_of(node: Node) -> int | None:
    """The number of the region that a node belongs to, also behind differentiation; None: to none."""
    return node.meta.get("custom", {}).get(_TAG)


def num_experts(enter: Node) -> int:
    """E of the region that a marker `enter_experts` belongs to, which has not been placed yet."""
    counts = enter.args[1]
    return int(edit.tensor_value(enter).shape[enter.args[2]]) if counts is None else counts.args[0].args[1]


TABLES = ("table", "ends", "moves")
"""Kinds of inputs that say where the experts of a region are, see `passes.assign_slots`. Their key is the region."""


def table_of(gm: GraphModule, region: int, kind: str = "table") -> Node:
    """The input of this kind, one of `TABLES`, of a region that is no chunk of another one."""
    inputs = ((node, node.meta["moefx"]) for node in gm.graph.find_nodes(op="placeholder"))
    return next(node for node, source in inputs if (source.kind, source.key) == (kind, region))


def tag(nodes: Iterable[Node], region: int) -> None:
    """Let nodes say which region they belong to. Tracing hands this on, also to the nodes of their backward."""
    for node in nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), _TAG: region}


def per_token(node: Node) -> tuple[Node, ...]:
    """Arguments of an op of a dropless region with one entry per token on dim 0: what reaches the region from outside
    and is cut where tokens are."""
    op = lookup(node)
    found = [] if op is None else [argument(node, name) for name in op.per_token]
    return tuple(each for each in found if each is not None)


@dataclass(frozen=True)
class Layout:
    """How values of a region carry their experts: counts for rows in expert order, dims for static blocks."""

    counts: Node | None = None
    expert_dim: int = -1
    row_dim: int = -1


def next_region(gm: GraphModule) -> int:
    """The first number that no region of the graph has."""
    used = [n.args[-1] for n in gm.graph.find_nodes(op="call_function", target=markers.enter_experts)]
    return max(used, default=-1) + 1


def marked(node: Node) -> int | None:
    """The number of the region that a marker belongs to; None: it is none."""
    return node.args[-1] if node.target in _MARKERS else None


def renumber(nodes: Iterable[Node], numbers: Mapping[int, int]) -> None:
    """Give regions other numbers, in markers and in names. Values keep theirs where nobody says another one."""
    for node in nodes:
        number = marked(node)
        if number in numbers:
            node.args = (*node.args[:-1], numbers[number])
        named = _NAMED.match(node.name)
        if named and int(named[1]) in numbers:
            node._rename(f"r{numbers[int(named[1])]}_{named[2]}")


def number(gm: GraphModule) -> None:
    """Number regions in the order of the graph."""
    found = dict.fromkeys(n.args[-1] for n in gm.graph.nodes if n.target is markers.enter_experts)
    renumber(gm.graph.nodes, {old: new for new, old in enumerate(found) if old != new})


def hull(core: Iterable[Node]) -> set[Node]:
    """The core and everything between two of its members."""
    core = set(core)
    return (edit.descendants(core) & edit.ancestors(core)) | core


def mark(gm: GraphModule, inside: set[Node], layouts: dict[Node, Layout], params: Iterable[Node], experts: int) -> int:
    """Put the markers around the expert side `inside` and return the region's number.

    layouts: the layout of every value that crosses, in or out, by node. params: the nodes (inside or not) that are
    per-expert parameters as the ops use them; their roots must be parameters of `experts` rows.
    Raises RaiseError where a value crosses that has no layout.
    """
    region = next_region(gm)
    for param in list(dict.fromkeys(params)):
        _mark_parameter(param, region, experts, inside)
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    entering = {a for n in inside for a in n.all_input_nodes if a not in inside and a in layouts}
    for value in sorted(entering, key=order.__getitem__):
        users = [u for u in value.users if u in inside]
        with edit.at(min(users, key=order.__getitem__)):
            marker = edit.call(
                gm.graph, markers.enter_experts, value, *_arguments(layouts[value], region), name=f"r{region}_enter"
            )
        marker.meta["val"] = edit.tensor_value(value)
        for user in users:
            user.replace_input_with(value, marker)
    leaving = [n for n in inside if any(u not in inside for u in n.users)]
    for value in sorted(leaving, key=order.__getitem__):
        users = [u for u in value.users if u not in inside]
        if edit.tensor_value(value) is None:
            if all(u.target in (torch.ops.aten.sym_size.int, "size") for u in users):
                continue
            raise RaiseError(f"{value.name} leaves the experts and is not a tensor", where=edit.place(value))
        if value not in layouts:
            raise RaiseError(
                f"{value.name} is used outside of the experts, but is not one value per row",
                where=edit.place(value),
                hint="use only the experts' outputs outside of them",
            )
        with edit.at(value, after=True):
            marker = edit.call(
                gm.graph, markers.leave_experts, value, *_arguments(layouts[value], region), name=f"r{region}_leave"
            )
        marker.meta["val"] = edit.tensor_value(value)
        for user in users:
            user.replace_input_with(value, marker)
    return region


def _arguments(layout: Layout, region: int) -> tuple:
    return layout.counts, layout.expert_dim, layout.row_dim, region


def _mark_parameter(param: Node, region: int, experts: int, inside: set[Node]) -> None:
    """Mark where the weight `param` of the ops `inside` begins: a rank has its own experts of it from there on. Ops
    outside still read what the user's code has."""
    found, between = roots(param, experts)
    mine = between.keys() | inside
    others = {u for n in (*found, *between) for u in n.users if u not in mine}
    dead = edit.descendants(u for u in others if u.target is not markers.expert_parameter)
    edit.erase_unused(n for n in dead if n.op.startswith("call") and "assert" not in op_name(n) and not writes(n))
    if any(u not in mine for n in between for u in n.users):
        between = _twice(param, between, inside)
    leave_experts_open(between)
    for root in found:
        known = [u for u in root.users if u.target is markers.expert_parameter and u.args[1] == region]
        marker = known[0] if known else _marker(root, region)
        for user in [u for u in root.users if root in between.get(u, ()) or u in inside]:
            user.replace_input_with(root, marker)


def _twice(param: Node, between: dict[Node, list[Node]], inside: set[Node]) -> dict[Node, list[Node]]:
    """Copies of the ops that compute a weight, which `inside` reads from now on."""
    copies: dict[Node, Node] = {}
    users = [u for u in param.users if u in inside]
    with edit.at(param, after=True) as graph:
        for node in [n for n in graph.nodes if n in between]:
            own = {n: copies[n] for n in between[node] if n in copies}
            copies[node] = graph.node_copy(node, lambda n, own=own: own.get(n, n))
    for user in users:
        user.replace_input_with(param, copies[param])
    return {copies[node]: [copies.get(n, n) for n in carried] for node, carried in between.items()}


def _marker(root: Node, region: int) -> Node:
    with edit.at(root, after=True):
        marker = edit.call(root.graph, markers.expert_parameter, root, region, name=f"r{region}_{_short(root)}")
    marker.meta["val"] = edit.tensor_value(root)
    return marker


def _short(node: Node) -> str:
    if node.target is markers.stack_experts:
        keys = [p.meta["moefx"].key for p in node.args[0] if "moefx" in p.meta]
        return "_".join(common_name(list(map(str, keys)))[-2:]) or node.name
    source = node.meta.get("moefx")
    return str(source.key).rsplit(".", 1)[-1] if source is not None else node.name
