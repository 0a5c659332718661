"""Ops of exact balance: where the rows of a region go is planned after the gate, from the rows that there are.

Shapes: n ranks on the axis, E experts, P places that an expert may have, one on each rank; C chunks of the region; S
slots of every rank, `room` of them for experts that live there, `spare` for copies. Of what follows from a plan, every
rank knows all: rows travel without another exchange of counts, and the host waits once for all chunks. Sources:
MoonEP and LLEP plan every micro-batch from its real routing; the plan itself is `placement.exact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moefx.errors import VerifyError
from moefx.features.exact import calibration, transport
from moefx.features.exact.rules import of_loads
from moefx.ir import world
from moefx.ir.meaning import meaning
from moefx.ir.op import VALUES, Along, Stage, Tokens, Volume, define, free, nbytes
from moefx.ir.redistribute import redistribute
from moefx.placement import tables


@meaning(lambda choices, experts, n, *_: torch.empty((n, len(choices), experts), dtype=torch.int64))
def exchange_loads(choices: Sequence[Tensor], experts: int, n: int, axis: str) -> Tensor:
    """All-gather of every rank's rows per expert, to the host: choices [T_c, K] of every chunk -> [n, C, E].

    Constraints: ids outside [0, E) are dropped pairs, counted nowhere.
    """
    counts = [torch.bincount(ids[(ids >= 0) & (ids < experts)].long(), minlength=experts) for ids in choices]
    return world.current().all_gather(torch.stack(counts)[None], axis).cpu()


@meaning(
    lambda loads, *_: (
        loads.new_empty((loads.shape[2], loads.shape[0])),
        loads.new_empty((*loads.shape, loads.shape[0])),
    )
)
def plan_exact(loads: Tensor, homes: Tensor, room: int, spare: int, per_node: int) -> tuple[Tensor, Tensor]:
    """Who takes which rows, so that all ranks have equally many: loads [n, C, E] -> table [E, P], rows per (source,
    chunk, expert, place) [n, C, E, P], all on the host. Column 0 of `homes` [E, ..] says where experts live.

    Constraints: as few copies as an optimal transport needs, at most `spare` on a rank.
    """
    found = transport.plan(loads.numpy(), homes.numpy(), (room, spare), per_node)
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


@meaning(
    lambda loads, moves, *_: (
        torch.empty_like(moves),
        loads.new_empty((*loads.shape, moves.shape[1])),
        torch.empty_like(moves),
    )
)
def plan_calibrated(loads: Tensor, moves: Tensor, room: int, spare: int,
                    per_node: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same where experts have copies already, moves [E, P], which stay: -> table [E, P], rows [n, C, E, P], and
    added [E, P], the homes and the copies that came, all on the host.

    Constraints: at most `spare` copies on a rank, those of `moves` among them.
    """
    counts, before = loads.sum(1).numpy(), moves.numpy()
    table, quota = calibration.plan(counts, before, (room, spare), per_node, is_weighed=False)
    rows = transport.by_chunk(loads.numpy(), quota)
    return torch.from_numpy(table.copy()), torch.from_numpy(rows), torch.from_numpy(transport.added(before, table))


@meaning(lambda moves, device: torch.empty_like(moves, device=device))
def planned_table(moves: Tensor, device: str) -> Tensor:
    """The table of a plan [E, P] in the memory of this rank's `device`, whose type is given."""
    return moves.to(device, copy=True)


@meaning(lambda rows, chunk, n, axis, device: rows.new_empty(rows.shape[2:], device=device))
def planned_quota(rows: Tensor, chunk: int, n: int, axis: str, device: str) -> Tensor:
    """The `quota` [E, P] of `route`, of this rank and a chunk, on its `device`: rows [n, C, E, P] of a plan."""
    return rows[world.current().coordinate(axis), chunk].to(device, copy=True)


@meaning(lambda counts, moves, rows, chunk, slots, n, *_: moves.new_empty((n, n * slots)))
def planned_traffic(counts: Tensor, moves: Tensor, rows: Tensor, chunk: int, slots: int, n: int, axis: str) -> Tensor:
    """The traffic of a chunk, on the host, as its plan says: [n, n*S]. It need not wait for `counts` [n*S], which this
    rank's routing found.

    Constraints: `counts` are this rank's row of it.
    """
    found = torch.from_numpy(tables.traffic(moves.numpy(), rows[:, chunk].numpy(), n * slots))
    if not torch.equal(found[world.current().coordinate(axis)], counts.cpu()):
        raise VerifyError("rows do not go where their plan says")
    return found


@meaning(lambda host, n, axis, device: host.new_empty(host.shape[1] // n, device=device))
def planned_slots(host: Tensor, n: int, axis: str, device: str) -> Tensor:
    """Rows per slot of this rank, over all sources, on its `device`: [n, n*S] -> [S]."""
    me = world.current().coordinate(axis)
    return torch.as_tensor(host).view(n, n, -1)[:, me].sum(0).to(device)


def _copied(node) -> Volume:
    return Volume(hbm_bytes=nbytes(node))


_ops, _runtime = torch.ops.moefx, "moefx.features.exact.runtime"
VALUES.update({"loads", "plan"})
_planned = partial(define, again=False, drawn="routing")  # the backward goes by the forward's plan
redistribute(
    _ops.exchange_loads.default, "V", "I", again=False, stage=Stage.COUNTS, tokens=Tokens(gives="loads", rule=of_loads),
    runtime=f"{_runtime}.exchange_loads_start(session, step_state, choices, experts, axis=axis, region=region, "
            "learner=learner)",
)  # fmt: skip
_planned(
    _ops.plan_exact.default, volume=free,
    tokens=Tokens({"loads": "loads", "homes": "moves"}, ("moves", "plan")),
    runtime=f"{_runtime}.plan_exact(session, loads, homes, room=room, spare=spare, per_node=per_node, "
            "learner=learner)",
)  # fmt: skip
_planned(
    _ops.plan_calibrated.default, volume=free,
    tokens=Tokens({"loads": "loads", "moves": "moves"}, ("moves", "plan", "added")),
    runtime=f"{_runtime}.plan_calibrated(session, loads, moves, room=room, spare=spare, per_node=per_node, "
            "learner=learner)",
)  # fmt: skip
_planned(
    _ops.planned_table.default, volume=_copied, tokens=Tokens({"moves": "moves"}, "table"),
    runtime=f"{_runtime}.planned_table(session, moves)",
)  # fmt: skip
_planned(
    _ops.planned_quota.default, volume=_copied, along=Along("I", "V", dim=None),
    tokens=Tokens({"rows": "plan"}, "quota"),
    runtime=f"{_runtime}.planned_quota(session, rows, chunk=chunk, axis=axis)",
)  # fmt: skip
_planned(
    _ops.planned_traffic.default, volume=free, along=Along("I", "I", of="rows"),
    tokens=Tokens({"rows": "plan", "moves": "moves", "counts": "counts"}, "host"),
    runtime=f"{_runtime}.planned_traffic(session, moves, rows, chunk=chunk, slots=slots, axis=axis)",
)  # fmt: skip
_planned(
    _ops.planned_slots.default, volume=_copied, along=Along("I", "V", dim=None),
    tokens=Tokens({"host": "host"}, "slots"), runtime=f"{_runtime}.planned_slots(session, host)",
)  # fmt: skip
