"""Delimit the expert side of a region once its grouped ops stand in the graph: the moe level's markers.

Used by every raise pass. The expert side is the convex hull of the ops that use per-expert parameters. What enters it
from the token side is marked `enter_experts`, what leaves it `leave_experts`, and its parameters `expert_parameter`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.ops import regions as markers

_TAG = "moefx_region"
_KEEPS_DIM_0 = {
    "to", "float", "half", "bfloat16", "double", "contiguous", "clone", "type_as", "mul", "add", "sub", "truediv",
    "div", "neg", "detach",
}  # fmt: skip
_VIEWS = ("view", "reshape")


def region_of(node: Node) -> int | None:
    """The number of the region that a node belongs to, also behind differentiation; None: to none."""
    return node.meta.get("custom", {}).get(_TAG)


def tag(nodes: Iterable[Node], region: int) -> None:
    """Let nodes say which region they belong to. Tracing hands this on, also to the nodes of their backward."""
    for node in nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), _TAG: region}


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
        _mark_parameter(param, region, experts)
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
            raise RaiseError(f"{value.name} leaves the experts and is no tensor", where=edit.place(value))
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


def _mark_parameter(param: Node, region: int, experts: int) -> Node:
    """Mark the root of a parameter; every op between root and use must keep the expert dim in front."""
    root, rows = param, experts  # rows: how many the tensor has in front, some for every expert
    while not (root.op == "placeholder" or root.target in (markers.stack_experts, "narrow")):
        if root.target is markers.expert_parameter:
            return root
        _check_keeps_experts(root, rows)
        tensors = [a for a in root.all_input_nodes if edit.tensor_value(a) is not None]
        if len(tensors) != 1:
            raise RaiseError(
                f"the per-expert parameter {param.name} is computed from several tensors",
                where=edit.place(root),
                hint="give experts plain parameters",
            )
        if _name(root) in _VIEWS:
            _leave_first_size_open(root)
            rows = edit.tensor_value(tensors[0]).shape[0]
        root = tensors[0]
    value = edit.tensor_value(root)
    if value.shape[0] != rows or rows % experts:
        raise RaiseError(f"{root.name} has {value.shape[0]} rows for {experts} experts", where=edit.place(param))
    for user in root.users:
        if user.target is markers.expert_parameter and user.args[1] == region:
            return user
    with edit.at(root, after=True):
        marker = edit.call(root.graph, markers.expert_parameter, root, region, name=f"r{region}_{_short(root)}")
    marker.meta["val"] = value
    users = [u for u in root.users if u is not marker and u.target is not markers.expert_parameter]
    for user in users:
        user.replace_input_with(root, marker)
    return marker


def _leave_first_size_open(view: Node) -> None:
    """A rank has fewer experts than the user's code says."""
    if view.args[1] != -1:
        view.args = (view.args[0], (-1, *edit.tensor_value(view).shape[1:]))
        view.kwargs = {}


def _short(node: Node) -> str:
    source = node.meta.get("moefx")
    return str(source.key).rsplit(".", 1)[-1] if source is not None else node.name


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0]


def _check_keeps_experts(node: Node, rows: int) -> None:
    """Refuse an op that could mix or move experts: only elementwise ops, and views that keep their order in front, may
    stand between a parameter and its use."""
    name = _name(node)
    value = edit.tensor_value(node)
    rank = value.dim() if value is not None else 0
    ok = (
        value is not None
        and value.shape[0] == rows
        and (
            name in _KEEPS_DIM_0
            or (name in ("transpose", "swapaxes") and all(a % rank != 0 for a in node.args[1:3]))
            or (name in ("permute",) and _permutation(node, rank)[0] == 0)
            or (name == "unsqueeze" and node.args[1] % rank != 0)
            or name in _VIEWS  # of rows of one expert after the other; that their number fits is checked at the root
            or (name in ("mT",) or (node.target is getattr and node.args[1] == "mT"))
            or (node.target is operator.getitem and _keeps_first(node.args[1]))
        )
    )
    if not ok:
        raise RaiseError(
            f"{node.name} ({name}) may mix experts of a parameter",
            where=edit.place(node),
            hint="between a parameter of all experts and its use only views behind the expert dim and "
            "elementwise ops are understood",
        )


def _permutation(node: Node, rank: int) -> list[int]:
    order = node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = order[0]
    return [d % rank for d in order]


def _keeps_first(item: object) -> bool:
    items = item if isinstance(item, tuple) else (item,)
    return bool(items) and items[0] in (slice(None), Ellipsis)
