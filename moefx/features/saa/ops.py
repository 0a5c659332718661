"""The return of static blocks in phases: what one brings is gathered over `mp` while the next one is on its way.

Shapes: n ranks along the axis, in `places` places of neighbours; E experts, C the ranks' capacities. See
`transport`. Both ops are made behind differentiation, for values and gradients alike.
Source: Parm's SAA (section III-D and Fig. 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor

from moefx.features.saa import transport as plan
from moefx.features.saa.rules import joined
from moefx.ir import world
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import MOVED, Sent, Stage, Tokens, Volume, argument, define, nbytes


@meaning(
    lambda x, sizes, out_rows, expert_dim, row_dim, n, axis, m, places, phases, phase: sized(
        sized(x, row_dim, out_rows),
        expert_dim,
        x.shape[expert_dim] * (n // places) * len(plan.distances(places, phases, phase)),
    )
)
def return_phase(
    x: Tensor, sizes: Tensor, out_rows: int, expert_dim: int, row_dim: int, n: int, axis: str, m: int, places: int,
    phases: int, phase: int,
) -> Tensor:  # fmt: skip
    """One phase of the way back of blocks, from d of the places: [.., E/n, .., sum(C), ..] ->
    [.., d*E/places, .., C_own, ..], by distance. m: ranks of the axis on a node, n if nobody knows."""
    here = world.current()
    me, parts = here.coordinate(axis), x.split(torch.as_tensor(sizes).tolist(), row_dim)
    to, of = (plan.peers(n, places, phases, phase, me, sends=sends) for sends in (True, False))
    sent = [part.numel() if rank in to else 0 for rank, part in enumerate(parts)]
    received = [parts[me].numel() if rank in of else 0 for rank in range(n)]
    moved = here.all_to_all(torch.cat([parts[rank].reshape(-1) for rank in sorted(to)]), sent, received, axis)
    arrived = moved.split(received)
    return torch.cat([arrived[rank].view(parts[me].shape) for rank in of], expert_dim)


@meaning(lambda slabs, expert_dim, *_: sized(slabs[0], expert_dim, sum(slab.shape[expert_dim] for slab in slabs)))
def join_phases(slabs: Sequence[Tensor], expert_dim: int, n: int, axis: str) -> Tensor:
    """What the phases brought, in the order of the n places along `axis`: d/n of E each, by distance -> [.., E, ..]."""
    return plan.joined(slabs, expert_dim, n, world.current().coordinate(axis))


def _peers(node, rank: int) -> list[int]:
    how = (argument(node, name) for name in ("n", "places", "phases", "phase"))
    return [peer for peer in plan.peers(*how, rank, sends=True) if peer != rank]


def _sent(node) -> tuple[Sent, ...]:
    """Of the rank of a node that sends most to other nodes."""
    n, m, x = (argument(node, name) for name in ("n", "m", "x"))
    each = [_peers(node, rank) for rank in range(m if m < n else 1)]
    far = max(sum(peer >= m for peer in peers) for peers in each)
    found = {"intra": len(each[0]) - far, "inter": far}
    return tuple(Sent(link, count, nbytes(x) * sympy.Rational(count, n)) for link, count in found.items() if count)


def _volume(node) -> Volume:
    sent, axis = _sent(node), argument(node, "axis")
    return Volume(wire_bytes={axis: sum((each.nbytes for each in sent), start=sympy.S.Zero)},
                  messages={axis: sympy.Integer(sum(each.messages for each in sent))})  # fmt: skip


def _check_phase(node) -> str | None:
    n, m, places, phases, phase = (argument(node, name) for name in ("n", "m", "places", "phases", "phase"))
    if n % places or n % m:
        return f"{n} ranks are not {places} places, on nodes of {m}"
    return None if phase in range(phases) and phases <= places else f"there is no phase {phase} of {phases}"


_ops, _runtime = torch.ops.moefx, "moefx.features.saa.runtime"
define(
    _ops.return_phase.default, volume=_volume, check=_check_phase, along=MOVED, stage=Stage.BACK,
    collective="all_to_all", payload="x", sent=_sent,
    workspace=nbytes,
    tokens=Tokens({"sizes": "capacities"}, rule="block", moves=True),
    runtime=f"{_runtime}.return_phase_start(session, x, sizes, axis=axis, expert_dim=expert_dim, row_dim=row_dim, "
            "region=region, places=places, phases=phases, phase=phase)",
)  # fmt: skip
define(
    _ops.join_phases.default, volume=lambda node: Volume(hbm_bytes=2 * nbytes(node)),
    tokens=Tokens(rule=joined, moves=True),
    runtime=f"{_runtime}.join_phases(session, slabs, expert_dim=expert_dim, axis=axis)",
)  # fmt: skip
