"""Let the rows of a region go where a plan of their true counts says. A part of the step place-experts.

Contract
    takes  the graph behind `place_regions`: regions whose rows go by tables and shares that are inputs
    gives  the same, in which regions that are to be balanced exactly make both after the gate
    never  changes values, or how rows travel: only who computes which of them

Pseudo-code
    counts of all chunks are exchanged at once; the plan follows from them on every rank, and from the plan the traffic
    of every chunk: no counts are exchanged again, and the host knows sizes before it knows them of the device
    weights of copies start on their way right behind the plan, before the rows; where copies that were planned before
    the call are only corrected, what comes is added to them

    quota = shared_rows(idx, ends); perm, counts = route(idx, N, table, quota); traffic = exchange_counts(counts)
    host = counts_to_host(traffic); slots = slot_counts(traffic)
        ->  moves, rows = plan_exact(exchange_loads([idx]), homes)
            perm, counts = route(idx, N, planned_table(moves), planned_quota(rows))
            host = planned_traffic(counts, moves, rows); slots = planned_slots(host)

    w = gather_experts([p], r0_moves, 2, 3)
        ->  moves, rows, added = plan_calibrated(loads, r0_moves)
            w = add_experts([gather_experts([p], r0_moves, 2, 3).detach()], [p], added, moves, 2, 3)
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.context.region_facts import Slots
from moefx.ir import edit, regions
from moefx.ir.regions import TABLES, region_of, table_of

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for number, slots in sorted(ctx.decisions.slots.items()):
        if slots.spare and ctx.plans_in_call(number):
            _plan(gm, number, slots, ctx)
            result.changed(f"region {number} is balanced after the gate, with up to {slots.spare} copies on a rank")
    if result.changes:
        edit.move_in_order(gm)
    return result


def _plan(gm: GraphModule, number: int, slots: Slots, ctx: PassContext) -> None:
    facts = [each for each in ctx.decisions.regions.values() if ctx.uncut(each.number) == number]
    axis, experts = facts[0].way.axis, facts[0].experts
    n, per_node = ctx.mesh.nodes_of(axis)
    routes = [_in_region(gm, each.number, _ops.route.default) for each in facts]
    choices = [route.args[0] for route in routes]
    homes = table_of(gm, number, "moves")
    op = _ops.plan_calibrated if ctx.corrects else _ops.plan_exact
    gathers = [user for user in homes.users if user.target is _ops.gather_experts.default]
    with edit.at(routes[0]) as graph:
        loads = edit.call(graph, _ops.exchange_loads.default, choices, experts, n, axis, name=f"r{number}_loads")
        plan = edit.call(graph, op.default, loads, homes, slots.room, slots.spare, per_node or 1,
                         name=f"r{number}_exact")  # fmt: skip
        moves = edit.call(graph, operator.getitem, plan, 0, name=f"r{number}_exact_moves")
        rows = edit.call(graph, operator.getitem, plan, 1, name=f"r{number}_exact_rows")
        table = edit.call(graph, _ops.planned_table.default, moves, edit.tensor_value(choices[0]).device.type,
                          name=f"r{number}_exact_table")  # fmt: skip
    table_of(gm, number).replace_all_uses_with(table)
    for gather in gathers:
        if ctx.corrects:
            _add_copies(gather, plan, moves)
        else:
            gather.replace_input_with(homes, moves)
            rows.append(gather)
    for chunk, (each, route) in enumerate(zip(facts, routes)):
        _follow(route, (moves, rows, chunk, n, axis), slots.cap, ctx, each.number)
        ctx.decisions.regions[each.number] = replace(
            each, load=None if chunk else loads, choices=() if chunk else tuple(choices))  # fmt: skip
    edit.erase_unused(table_of(gm, number, kind) for kind in TABLES)


def _add_copies(gather: Node, plan: Node, moves: Node) -> None:
    """Behind the plan, let copies that it adds come to those that a gather brings."""
    slots = sorted(gather.users, key=lambda each: each.args[1])
    users = {each: list(each.users) for each in slots}
    params, _, *sizes, _ = gather.args
    with edit.at(moves.next) as graph:
        added = edit.call(graph, operator.getitem, plan, 2, name=f"{plan.name}_added")
        held = [graph.create_node("call_method", "detach", (each,), name=f"{each.name}_held") for each in slots]
        more = edit.call(graph, _ops.add_experts.default, held, list(params), added, moves, *sizes,
                         name=f"{gather.name}_more")  # fmt: skip
        for place, each in enumerate(slots):
            found = edit.call(graph, operator.getitem, more, place, name=f"{each.name}_more")
            for user in users[each]:
                user.replace_input_with(each, found)
    more.meta.pop("recompute", None)  # as of the gather
    regions.tag([more], regions.region_of(gather))


def _follow(route: Node, plan: tuple, cap: int, ctx: PassContext, number: int) -> None:
    """Let a chunk go by the plan."""
    idx, num_slots, table, shares = route.args
    moves, rows, chunk, n, axis = plan
    device = edit.tensor_value(idx).device.type
    with edit.at(route) as graph:
        quota = edit.call(graph, _ops.planned_quota.default, rows, chunk, n, axis, device,
                          name=ctx.name_in(number, "exact_quota"))  # fmt: skip
    route.args = idx, num_slots, table, quota
    counts = next(user for user in route.users if user.args[1] == 1)
    traffic = next(user for user in counts.users if user.target is _ops.exchange_counts.default)
    known = {user.target: user for user in traffic.users}
    with edit.at(traffic) as graph:
        host = edit.call(graph, _ops.planned_traffic.default, counts, moves, rows, chunk, cap, n, axis,
                         name=ctx.name_in(number, "exact_host"))  # fmt: skip
        held = edit.call(graph, _ops.planned_slots.default, host, n, axis, device,
                         name=ctx.name_in(number, "exact_slots"))  # fmt: skip
    known[_ops.counts_to_host.default].replace_all_uses_with(host)
    known[_ops.slot_counts.default].replace_all_uses_with(held)
    edit.erase_unused([shares, traffic, *known.values()])


def _in_region(gm: GraphModule, number: int, op: object) -> Node:
    return next(node for node in gm.graph.find_nodes(op="call_function", target=op) if region_of(node) == number)

