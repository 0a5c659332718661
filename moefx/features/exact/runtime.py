"""Exact balance: the rows of a region are counted after the gate, and where they go is planned from that.

n ranks on the axis, E experts, P places that an expert may have, C chunks of a region, S slots of every rank. All of a
plan lies on the host and is the same on all ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.features.exact import transport
from moefx.placement import tables
from moefx.runtime.collectives import exchange_counts_start
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session, Step


def exchange_loads_start(session: Session, step: Step, choices: Sequence[Tensor], experts: int, *, axis: Axes,
                         region: str, learner: str | None = None) -> Handle[Tensor]:  # fmt: skip
    """choices [T_c, K] int of every chunk -> loads [n, C, E] int64 on the host, rows per rank, chunk and expert; ids
    outside 0..E-1 count nowhere. With a header, as `exchange_counts_start` has."""
    counts = torch.cat([_rows_per_expert(ids, experts) for ids in choices])
    gathered = exchange_counts_start(session, step, counts, axis=axis, region=region)

    def finish() -> Tensor:
        loads = gathered.wait()
        if session.is_fake:
            loads = counts.expand(session.size(axis), -1)
        copy = session.to_host(loads)
        if copy is not None:
            copy.wait(session.timeout)
            session.headers.check_arrived()
            loads = copy.host
        loads = loads.reshape(-1, len(choices), experts)
        if learner is not None:
            session.placements.count(learner, loads.sum(1).numpy())
        return loads

    return Handle(session, f"exchange_loads of {region}", axis, finish, behind=gathered)


def _rows_per_expert(ids: Tensor, experts: int) -> Tensor:
    """[E] int64, without a host read: bincount would read the size of its result."""
    ids = ids.reshape(-1).to(torch.int64)
    ids = ids.masked_fill((ids < 0) | (ids >= experts), experts)
    return ids.new_zeros(experts + 1).scatter_add_(0, ids, torch.ones_like(ids))[:experts]


def plan_exact(session: Session, loads: Tensor, homes: Tensor, *, room: int, spare: int, per_node: int,
               learner: str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """loads [n, C, E], homes [E, ..] -> (table [E, P], rows [n, C, E, P]), see `transport.plan`, all on the host.
    learner: the region, for what its placement weighs."""
    costs, in_call = session.placements.weighed(learner), session.placements.in_call
    moves, rows = transport.plan(loads.numpy(), homes.numpy(), (room, spare), per_node, costs, in_call)
    return torch.from_numpy(moves), torch.from_numpy(rows)


def plan_calibrated(session: Session, loads: Tensor, moves: Tensor, *, room: int, spare: int, per_node: int,
                    learner: str | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """loads [n, C, E], moves [E, P] -> (table [E, P], rows [n, C, E, P], added [E, P]), see `calibration`;
    all on the host. learner: as of `plan_exact`."""
    before = moves.numpy()
    table, rows = plan_exact(session, loads, moves, room=room, spare=spare, per_node=per_node, learner=learner)
    return table, rows, torch.from_numpy(transport.added(before, table.numpy()))


def planned_table(session: Session, moves: Tensor) -> Tensor:
    """[E, P] on the device."""
    return _on_device(session, moves)


def planned_quota(session: Session, rows: Tensor, *, chunk: int, axis: Axes) -> Tensor:
    """What `kernels.route` takes: rows [n, C, E, P] -> those of this rank and a chunk [E, P], on the device."""
    return _on_device(session, rows[session.index(axis), chunk])


def planned_traffic(session: Session, moves: Tensor, rows: Tensor, *, chunk: int, slots: int, axis: Axes) -> RoutePlan:
    """What this rank sends and receives in a chunk, as the plan says."""
    found = tables.traffic(moves.numpy(), rows[:, chunk].numpy(), session.size(axis) * slots)
    return RoutePlan.of(found, session.index(axis))


def planned_slots(session: Session, plan: RoutePlan) -> Tensor:
    """[S] int64 on the device, rows that all ranks send to each slot of this rank."""
    return _on_device(session, torch.tensor(plan.receive_rows).sum(0))


def _on_device(session: Session, x: Tensor) -> Tensor:
    return x if session.device.type == "cpu" else x.pin_memory().to(session.device, non_blocking=True)
