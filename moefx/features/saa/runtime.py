"""The return of static blocks in phases, see `transport`. n ranks on the axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefx.features.saa import transport as plan
from moefx.runtime.collectives import exchange_rows
from moefx.runtime.groups import Axes
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session


def return_phase_start(
    session: Session, x: Tensor, sizes: tuple[int, ...], *, axis: Axes, expert_dim: int, row_dim: int, region: str,
    places: int, phases: int, phase: int,
) -> Handle[Tensor]:  # fmt: skip
    """x [.., S, .., sum(C), ..] -> [.., S * ranks, .., C_own, ..] of the ranks that this one hears of in a phase, by
    distance. `sizes` [n] are the ranks' C. What stays at home is not sent."""
    n, me = session.size(axis), session.index(axis)
    to, of = (plan.peers(n, places, phases, phase, me, sends=sends) for sends in (True, False))
    text = f"all_to_all back of {region}, phase {phase}"
    parts = x.split(sizes, row_dim)
    if to == [me]:
        return Handle(session, text, axis, lambda: parts[me])
    own, shape = parts[me].numel(), parts[me].shape
    sent = [part.numel() if rank in to else 0 for rank, part in enumerate(parts)]
    received = [own if rank in of else 0 for rank in range(n)]
    source = torch.cat([parts[rank].reshape(-1) for rank in sorted(to)])
    result = source.new_zeros(sum(received)) if session.is_fake else source.new_empty(sum(received))
    work = exchange_rows(session, result, source, axis, text, splits=(received, sent))
    session.record("all_to_all", axis, region, (sum(sent) - sent[me]) * source.element_size())

    def finish() -> Tensor:
        arrived = result.split(received)
        return torch.cat([arrived[rank].view(shape) for rank in of], expert_dim)

    return Handle(session, text, axis, finish, work=work, owned=(source, result))


def join_phases(session: Session, slabs: Sequence[Tensor], *, expert_dim: int, axis: Axes) -> Tensor:
    """What the phases brought, in the order of the places along `axis`."""
    return plan.joined(slabs, expert_dim, session.size(axis), session.index(axis))
