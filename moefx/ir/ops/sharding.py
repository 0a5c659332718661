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
from moefx.ir.op import MOVED, Along, Stage, Tokens, Volume, argument, define, nbytes
from moefx.transport import dumps


@torch.library.custom_op("moefx::dump_counts", mutates_args=())
def dump_counts(traffic: Tensor, places: int, n: int, axis: str) -> Tensor:
    """Rows per (source, expert) [sources, E] -> rows per (source, slot) [sources, E*n], once rows are dumped."""
    return dumps.dump_counts(traffic, places, n).contiguous()


@dump_counts.register_fake
def _(traffic, places, n, axis):
    return traffic.new_empty(traffic.shape[0], traffic.shape[1] * n)


@torch.library.custom_op("moefx::dump", mutates_args=())
def dump(rows: Tensor, counts: Tensor | None, places: int, n: int, expert_dim: int, axis: str) -> Tensor:
    """A copy of every row for each rank along `axis` that holds a part of its expert: [P, ..] -> [P*n, ..].

    Blocks have no counts, and the experts on `expert_dim`: [.., E, ..] -> [.., E*n, ..].
    """
    return dumps.dump(rows, counts, places, n, expert_dim).contiguous()


@dump.register_fake
def _(rows, counts, places, n, expert_dim, axis):
    shape = list(rows.shape)
    shape[0 if counts is not None else expert_dim] *= n
    return rows.new_empty(shape)


@torch.library.custom_op("moefx::local_combine", mutates_args=())
def local_combine(rows: Tensor, counts: Tensor | None, places: int, n: int, expert_dim: int, axis: str) -> Tensor:
    """The transpose of `dump`: the sum of what came back for a row, [P*n, ..] -> [P, ..]."""
    return dumps.local_combine(rows, counts, places, n, expert_dim)


@local_combine.register_fake
def _(rows, counts, places, n, expert_dim, axis):
    shape = list(rows.shape)
    shape[0 if counts is not None else expert_dim] //= n
    return rows.new_empty(shape)


@torch.library.custom_op("moefx::across_places", mutates_args=())
def across_places(host: Tensor, n: int, axis: str) -> Tensor:
    """What places have for one another, of rows that come from this rank's place along `axis` and go there: traffic
    [places*n, places*n*S] of dumped rows -> [places, places*S]."""
    me = world.current().coordinate(axis)
    places = host.shape[0] // n
    return torch.as_tensor(host).view(places, n, places, n, -1)[:, me, :, me].reshape(places, -1).clone()


@across_places.register_fake
def _(host, n, axis):
    return host.new_empty(host.shape[0] // n, host.shape[1] // n)


@torch.library.custom_op("moefx::within_place", mutates_args=())
def within_place(host: Tensor, n: int, axis: str) -> Tensor:
    """What ranks of this place have for one another once the rows of all n places along `axis` have arrived: traffic
    [n*m, n*m*S] of dumped rows -> [m, m*S]."""
    me = world.current().coordinate(axis)
    m = host.shape[0] // n
    return torch.as_tensor(host).view(n, m, n, -1)[:, :, me].sum(0)


@within_place.register_fake
def _(host, n, axis):
    return host.new_empty(host.shape[0] // n, host.shape[1] // n)


def _setup(ctx, inputs, output):
    _, counts, *ctx.how = inputs
    ctx.save_for_backward(counts)


def _dump_backward(ctx, grad):
    (counts,) = ctx.saved_tensors
    return torch.ops.moefx.local_combine(grad.contiguous(), counts, *ctx.how), None, None, None, None, None


def _combine_backward(ctx, grad):
    (counts,) = ctx.saved_tensors
    return torch.ops.moefx.dump(grad.contiguous(), counts, *ctx.how), None, None, None, None, None


dump.register_autograd(_dump_backward, setup_context=_setup)
local_combine.register_autograd(_combine_backward, setup_context=_setup)


def _moved(node) -> Volume:
    return Volume(hbm_bytes=nbytes(argument(node, "rows")) + nbytes(node))


_ops, _dumps = torch.ops.moefx, "moefx.transport.dumps"
_part_of_traffic = partial(define, volume=lambda node: Volume(), along=Along("I", "V", dim=None), drawn="routing",
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
