"""What placement weighs in a region of a program, by a machine: see `placement.score.Costs`.

    work of a row     the experts' products and what lies between them, forward and backward, by the rows of a rank
    bytes             of a row in an exchange; of an expert on its way to a copy, and of its gradients on their way home
    links             what an all-to-all takes per message and per byte
    what hides        an equal share of what is computed outside of regions, for every region

All of it at the sizes that the program is compiled for, and balanced routing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from torch.fx import Node

from moefx import rooms
from moefx.analysis.sizes import typical_sizes
from moefx.analysis.tasks import stage_of
from moefx.axes import MeshSpec
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import Slots
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import at
from moefx.costmodel.machine import Machine
from moefx.ir import edit
from moefx.ir.op import Stage, nbytes
from moefx.ir.ops.order import unsplit
from moefx.ir.ops.placement import adds
from moefx.ir.regions import region_of
from moefx.placement import score
from moefx.placement.decide import plan
from moefx.placement.score import Costs
from moefx.planning.pieces import seconds_outside, stages_of
from moefx.planning.pricing import on_mesh


def costs_of(graphs: StepGraphs, ctx: PassContext) -> dict[int, Costs]:
    """{region with copies, by its number before it was cut: what placement weighs}; nothing without a machine. graphs:
    as they are scheduled."""
    placed = {number: slots for number, slots in ctx.decisions.slots.items() if slots.spare}
    if ctx.machine is None or not placed:
        return {}
    machine, sizes = on_mesh(ctx.machine, ctx.mesh), typical_sizes(graphs.graphs.values(), ctx)
    stages = {name: stages_of(gm.graph.nodes, ctx) for name, gm in graphs.graphs.items()}
    axis = ctx.mesh.axis("ep")
    byte, message = _links(machine, ctx.mesh.nodes_of(axis))
    hidden = {name: seconds_outside(gm.graph.nodes, ctx, machine, sizes, ctx.decisions.slots) / len(placed)
              for name, gm in graphs.graphs.items()}  # fmt: skip
    found = {}
    for number in placed:
        mine = [each[number].pieces for each in stages.values() if number in each]
        sent = [piece for piece in mine[0]["A1"] if piece.width]
        row_bytes = max(piece.width * piece.itemsize for piece in sent)
        rows = sum(at(piece.amounts.payload, sizes) for piece in sent) / row_bytes
        seconds = sum(machine.time_of(piece.amounts, sizes, ctx.mesh.root)
                      for pieces in mine for kind in ("E", "W") for piece in pieces[kind])  # fmt: skip
        moved = {name: sum(_bytes_per_expert(node, number, sizes) for node in gm.graph.nodes)
                 for name, gm in graphs.graphs.items()}  # fmt: skip
        out = sum(machine.time_of(piece.amounts, sizes, ctx.mesh.root) for piece in mine[0]["A1"])
        costs = Costs(
            seconds / max(rows, 1.0), row_bytes, moved["forward"], moved.get("backward", 0.0), byte, message,
            per_card=max(1, machine.ranks_per_node // machine.nics_per_node),
            hidden=(hidden["forward"], hidden.get("backward", 0.0)), rows=rows, out=out,
            chunks=ctx.choice(number).chunks,
        )  # fmt: skip
        found[number] = costs.after_gate() if ctx.plans_in_call(number) and not ctx.corrects else costs
    return found


def planned_late(graphs: StepGraphs, ctx: PassContext) -> set[int]:
    """Regions whose copies had better be planned after the gate. graphs: of a program that plans all of them before."""
    n, per_node = ctx.mesh.nodes_of("ep")
    return {number for number, costs in costs_of(graphs, ctx).items() if _waits(costs, n, per_node)}


def _waits(costs: Costs, n: int, per_node: int | None) -> bool:
    """Whether copies of a region are planned after the gate, where somebody plans there."""
    return rooms.plan_in_call() and costs.waits(n, per_node or 1)


def skewed_seconds(costs: Mapping[int, Costs], slots: Mapping[int, Slots], spare: int, mesh: MeshSpec) -> float:
    """What experts, their exchanges and copies take in a step of these regions, with room for `spare` copies on a rank
    and the best use of it. costs: with the chunks that they run in. Nobody knows the routing while a program is
    made: loads are those of Zipf's law with exponent 1, the experts in turn from all ranks.
    """
    n, per_node = mesh.nodes_of("ep")
    total = 0.0
    for number, each in costs.items():
        owners, seen, turns = slots[number].owners, Counter[int](), []
        for owner in owners:
            turns.append((seen[owner], owner))
            seen[owner] += 1
        weights = np.empty(len(owners))
        weights[sorted(range(len(owners)), key=turns.__getitem__)] = 1 / np.arange(1, len(owners) + 1)
        loads = np.tile(np.floor(each.rows * weights / weights.sum()).astype(np.int64), (n, 1))
        each = each.after_gate() if _waits(each, n, per_node) else each
        found = plan("auto", loads, owners, (slots[number].room, spare), each, per_node or 1)
        total += score.of(found, loads, slots[number].room + spare, each, per_node or 1)
    return total


def _links(machine: Machine, axis: tuple[int, int | None]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds per byte and per message, within a node and between nodes. axis: its ranks, and those on each node."""
    n, local = axis
    used = {"intra": local != 1, "inter": local != n}
    curves = [machine.curve("all_to_all", link, "direct").at(float("inf")) if is_used else None
              for link, is_used in used.items()]  # fmt: skip
    return (tuple(curve.beta_s_per_byte if curve else 0.0 for curve in curves),
            tuple(curve.alpha_s if curve else 0.0 for curve in curves))  # fmt: skip


def _bytes_per_expert(node: Node, number: int, sizes: Mapping[str, float]) -> float:
    """What an expert, or its gradients, weigh in an exchange of copies of this region; 0 for other nodes."""
    if stage_of(node) not in (Stage.WEIGHTS, Stage.COPIES) or region_of(node) != number:
        return 0.0
    call = unsplit(node)[1]
    if adds(call):  # of the same experts, and few or none
        return 0.0
    return sum(at(nbytes(each), sizes) / edit.tensor_value(each).shape[0] for each in call.args[0])
