"""Decide how many slots a rank has in every region, and where its experts live. A part of the step place-experts.

Contract
    takes  MOE   regions between enter_experts and leave_experts, with marked parameters, behind `shard_experts`
    gives  MOE   the same with inputs for the tables of regions; `Decisions.slots` has the regions whose rows travel
    never  touches what was there

Pseudo-code
    an expert lives where an earlier program, or a move, has put it; other experts live in order
    room: for as many as live on any rank; where they will move, for some even shares
    spare: for copies, where experts may have some
    static blocks, experts that are cut, those that every rank gathers (r=0), and routings that are nested need even
    homes without copies
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from moefx import rooms
from moefx.analysis.recognition.kept_whole import why_whole
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext, PassResult
from moefx.context.region_facts import Slots, homes_of
from moefx.errors import MeshError, UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.ops.regions import enter_experts, expert_parameter
from moefx.ir.regions import TABLES, num_experts
from moefx.placement.tables import contiguous

Owners = tuple[int, ...]


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    spread = {ctx.uncut(enter.args[-1]): enter for enter in reversed(enters)} if ctx.mesh.size("ep+esp") > 1 else {}
    regions = {number: enter for number, enter in sorted(spread.items()) if ctx.mesh.size(_axes(number, ctx)) > 1}
    params: dict[int, dict[Any, int]] = {number: {} for number in spread}  # {key: rows} of those that are spread
    for marker in gm.graph.find_nodes(op="call_function", target=expert_parameter) if spread else ():
        root, number = marker.args[0], ctx.uncut(marker.args[1])
        if number in spread and why_whole(root, ctx.whole_before) is None:
            keys = [node.meta["moefx"].key for node in ([root] if root.op == "placeholder" else root.args[0])]
            params[number][keys[0] if root.op == "placeholder" else tuple(keys)] = edit.tensor_value(root).shape[0]
    homes = _homes(params, {number: num_experts(enter) for number, enter in spread.items()}, ctx)
    for number, enter in spread.items():
        if number not in regions and ctx.mesh.axis("ep"):
            _check_gathered(number, enter, homes.get(number), ctx)
    for number, enter in regions.items():
        slots = _slots(homes.get(number) or contiguous(num_experts(enter), ctx.mesh.size("ep")), ctx)
        ctx.decisions.slots[number] = slots._replace(params=tuple(params[number]))
        if ctx.slots(number) is not None:
            _check(number, enter, ctx)
        if enter.args[1] is None:
            del ctx.decisions.slots[number]  # static blocks know no slots
        else:
            _add_tables(gm, number, enter.args[1].args[0], ctx)
    return PassResult()


def _axes(number: int, ctx: PassContext) -> str:
    """The axes of ranks among which the rows of a region travel."""
    return f"{ctx.places_over(number)}+{'' if ctx.gathers_tokens(number) else ctx.tokens_over(number)}"


def _slots(owners: Owners, ctx: PassContext) -> Slots:
    even = -(-len(owners) // ctx.mesh.size("ep"))
    room = min(len(owners), rooms.homes(ctx.options) * even)
    return Slots(max(room, *Counter(owners).values()), ctx.spare, owners)


def _homes(params: Mapping[int, Mapping[Any, int]], experts: Mapping[int, int], ctx: PassContext) -> dict[int, Owners]:
    """Where the experts of regions live, as far as parameters have a layout. Regions that share one share homes."""
    known: dict[Any, Owners] = {}
    for number, keys in params.items():
        for key, rows in keys.items():
            owners = homes_of(key, rows, experts[number], ctx.layouts_before, ctx.mesh.root)
            known |= {} if owners is None else {key: owners}
    found: dict[int, Owners] = {}
    for _ in params:  # from region to region, as often as there are any
        for number, keys in params.items():
            owners = next((known[key] for key in keys if key in known), None)
            if owners is not None:
                found[number] = owners
                known |= dict.fromkeys(keys, owners)
    return found


def _add_tables(gm: GraphModule, number: int, route: Node, ctx: PassContext) -> None:
    """Inputs of the region, all [E, P] int64 and given with every call, so that experts move, and have copies, without
    a new program (`placement.tables.Plan`): "table", the slots of every expert; where there are spare ones, "ends", how
    this rank shares out its rows, and "moves", the table on the host. P is the number of ranks, without copies 1."""
    slots, inputs = ctx.slots(number), gm.graph.find_nodes(op="placeholder")
    has_copies = slots is not None and slots.spare > 0
    shape = route.args[1], ctx.mesh.size("ep") if has_copies else 1
    for kind in TABLES if has_copies else TABLES[:1]:
        with gm.graph.inserting_after(inputs[-1]):
            inputs.append(gm.graph.placeholder(f"r{number}_{kind}"))
        inputs[-1].meta["moefx"] = Source(kind, number)
        device = "cpu" if kind == "moves" else edit.tensor_value(route.args[0]).device
        with ctx.fake_mode:
            inputs[-1].meta["val"] = torch.empty(shape, dtype=torch.int64, device=device)


def _check_gathered(number: int, enter: Node, owners: Owners | None, ctx: PassContext) -> None:
    """Experts that all ranks gather live in order, as many on every rank, and stay there."""
    slots = _slots(owners or contiguous(num_experts(enter), ctx.mesh.size("ep")), ctx)
    if not slots.are_plain(ctx.mesh.size("ep")):
        _refuse(number, enter, "r=0 gathers them", ctx)


def _check(number: int, enter: Node, ctx: PassContext) -> None:
    """Refuse what needs as many experts on every rank, in order."""
    why = ""
    if enter.args[1] is None:
        why = "they compute static blocks of rows"
    elif ctx.mesh.size("esp") > 1 and number not in ctx.report.whole_over_esp:
        why = f"they are cut over '{ctx.mesh.axis('esp')}'"
    elif (nesting := rooms.nesting(ctx.options.alltoall.algorithm)) is not None:
        why = nesting.fixed
    if why:
        _refuse(number, enter, why, ctx)


def _refuse(number: int, enter: Node, why: str, ctx: PassContext) -> NoReturn:
    experts, n = num_experts(enter), ctx.mesh.size("ep")
    if experts % n:
        divisors = [d for d in range(1, experts + 1) if experts % d == 0]
        raise MeshError(
            f"{experts} experts do not divide over the axis '{ctx.mesh.axis('ep')}' of size {n}, and {why}",
            where=edit.place(enter),
            hint=f"use an axis of size {', '.join(map(str, divisors))}",
        )
    if not ctx.options.placement.policy:
        raise UnsupportedUse(f"experts have moved, and {why}", where=module_path(enter),
                             hint="move them back: each rank has as many, in order")  # fmt: skip
    raise UnsupportedUse(f"placement={ctx.options.placement.policy!r} moves experts, or copies them, and {why}",
                         where=module_path(enter), hint="leave it out")  # fmt: skip
