"""Ops of expert sharding, where several ranks hold parts of every expert: rows go to all of them, and what these
compute is summed.

Shapes: P rows sorted by expert, E experts, `places` places of different experts, each of them n ranks along `axis`.
Source: Parm's Dump and Combine around its EP&ESP-AlltoAll (sections 3.2 and 4). S3 dumps nothing, and needs no more of
the exchanged counts than these: rows go to one rank of a place, which shares them with the others (`gathers`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefx.ir import world
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import MOVED, Along, Stage, Tokens, Volume, argument, define, free, nbytes
from moefx.transport import dumps


@meaning("traffic [p s?] -> [p s*n]")
def dump_counts(traffic: Tensor, places: int, n: int, axis: str) -> Tensor:
    """Rows per (source, expert) [sources, E] -> rows per (source, slot) [sources, E*n], once rows are dumped."""
    return dumps.dump_counts(traffic, places, n).contiguous()


@meaning(
    lambda rows, counts, places, n, expert_dim, _: sized(
        rows, _place(counts, expert_dim), rows.shape[_place(counts, expert_dim)] * n
    ),
    gradient=lambda grad, rows, *how: local_combine(grad.contiguous(), *how),
)
def dump(rows: Tensor, counts: Tensor | None, places: int, n: int, expert_dim: int, axis: str) -> Tensor:
    """A copy of every row for each rank along `axis` that holds a part of its expert: [P, ..] -> [P*n, ..].

    Blocks have no counts, and the experts on `expert_dim`: [.., E, ..] -> [.., E*n, ..].
    """
    return dumps.dump(rows, counts, places, n, expert_dim).contiguous()


@meaning(
    lambda rows, counts, places, n, expert_dim, _: sized(
        rows, _place(counts, expert_dim), rows.shape[_place(counts, expert_dim)] // n
    ),
    gradient=lambda grad, rows, *how: dump(grad.contiguous(), *how),
)
def local_combine(rows: Tensor, counts: Tensor | None, places: int, n: int, expert_dim: int, axis: str) -> Tensor:
    """The transpose of `dump`: the sum of what came back for a row, [P*n, ..] -> [P, ..]."""
    return dumps.local_combine(rows, counts, places, n, expert_dim)


@meaning("host [p~ s~] -> [p//n s//n]")
def across_places(host: Tensor, n: int, axis: str) -> Tensor:
    """What places have for one another, of rows that come from this rank's place along `axis` and go there: traffic
    [places*n, places*n*S] of dumped rows -> [places, places*S]."""
    me = world.current().coordinate(axis)
    places = host.shape[0] // n
    return torch.as_tensor(host).view(places, n, places, n, -1)[:, me, :, me].reshape(places, -1).clone()


@meaning("host [p~ s~] -> [p//n s//n]")
def within_place(host: Tensor, n: int, axis: str) -> Tensor:
    """What ranks of this place have for one another once the rows of all n places along `axis` have arrived: traffic
    [n*m, n*m*S] of dumped rows -> [m, m*S]."""
    me = world.current().coordinate(axis)
    m = host.shape[0] // n
    return torch.as_tensor(host).view(n, m, n, -1)[:, :, me].sum(0)


def _place(counts: Tensor | None, expert_dim: int) -> int:
    return 0 if counts is not None else expert_dim


def _moved(node) -> Volume:
    return Volume(hbm_bytes=nbytes(argument(node, "rows")) + nbytes(node))


_ops, _dumps = torch.ops.moefx, "moefx.transport.dumps"
_part_of_traffic = partial(define, volume=free, along=Along("I", "V", dim=None), drawn="routing",
                           again=False, stage=Stage.COUNTS)  # fmt: skip
_part_of_traffic(
    _ops.across_places.default, tokens=Tokens({"host": "host"}, "host", rule="across"),
    runtime="moefx.runtime.plan.across_places(host, n)",
)  # fmt: skip
_part_of_traffic(
    _ops.within_place.default, tokens=Tokens({"host": "host"}, "host"),
    runtime="moefx.runtime.plan.within_place(host, n)",
)  # fmt: skip
define(
    _ops.dump_counts.default, volume=lambda node: Volume(hbm_bytes=nbytes(node)), drawn="routing", again=False,
    stage=Stage.COUNTS, along=Along("I", "I"), tokens=Tokens({"traffic": "traffic"}, "traffic", rule="dumped_counts"),
    runtime=f"{_dumps}.dump_counts(traffic, places, n)",
)  # fmt: skip
define(
    _ops.dump.default, along=MOVED, volume=_moved, drawn="routing", stage=Stage.OUT,
    tokens=Tokens({"counts": "counts", "rows": "sorted"}, "sorted", rule="dumped", moves=True, or_blocks=True),
    runtime=f"{_dumps}.dump(rows, counts, places, n, expert_dim)",
)  # fmt: skip
define(
    _ops.local_combine.default, along=MOVED, volume=_moved, drawn="routing", stage=Stage.BACK, fresh=True,
    tokens=Tokens({"counts": "counts", "rows": "sorted"}, "sorted", rule="dumped", moves=True, or_blocks=True),
    runtime=f"{_dumps}.local_combine(rows, counts, places, n, expert_dim)",
)  # fmt: skip
