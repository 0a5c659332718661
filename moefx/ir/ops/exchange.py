"""Ops that move counts, rows and gradients between ranks. They name mesh axes, never ranks or groups.

Shapes: n ranks on the axis, S slots per rank, R rows received (one unbacked symbol per region).
"""

from __future__ import annotations

from functools import partial

import sympy
import torch
from torch import Tensor

from moefx.ir import world
from moefx.ir.meaning import fresh_size, meaning, sized
from moefx.ir.op import MOVED, Along, Sent, Stage, Tokens, Volume, argument, copied, define, expr, free, nbytes, value
from moefx.ir.redistribute import redistribute
from moefx.transport.algorithms import group_of


@meaning("counts [s~] -> [n s]")
def exchange_counts(counts: Tensor, n: int, axis: str) -> Tensor:
    """All-gather of every rank's rows per global slot: [n*S] -> traffic [n, n*S]; row r is what rank r sends."""
    return world.current().all_gather(counts, axis).view(n, -1)


@meaning(lambda traffic, *_: traffic.new_empty(traffic.shape, device="cpu"))
def counts_to_host(traffic: Tensor, axis: str) -> Tensor:
    """The traffic matrix on the host: the only place where sizes leave the device."""
    return traffic.to("cpu", copy=True)


@meaning(fresh_size)
def received_rows(host: Tensor, n: int, axis: str) -> int:
    """How many rows this rank receives: a fresh unbacked size of the graph."""
    return sum(_receive(host, n, axis))


@meaning(fresh_size)
def sent_rows(host: Tensor, balanced: int, n: int, axis: str) -> int:
    """How many rows this rank sends, without those of dropped pairs: a fresh unbacked size of the graph. balanced: what
    it is priced as."""
    return sum(_send(host, n, axis))


@meaning("traffic [n~ s~] -> [s//n]")
def slot_counts(traffic: Tensor, n: int, axis: str) -> Tensor:
    """Rows per slot of this rank, over all sources: [n, n*S] -> [S]."""
    me = world.current().coordinate(axis)
    return traffic.view(n, n, -1)[:, me].sum(0)


@meaning(
    "rows [r~ ..], host [..~] -> [out_rows ..]",
    gradient=lambda grad, rows, host, _, n, axis, reverse, *part: all_to_all(
        grad.contiguous(), host, rows.shape[0], n, axis, not reverse, *part
    ),
)
def all_to_all(rows: Tensor, host: Tensor, out_rows: int, n: int, axis: str, reverse: bool, over: str | None = None,
               m: int | None = None) -> Tensor:  # fmt: skip
    """Rows sorted by global slot -> rows by (source, local slot), or back if `reverse`; `out_rows` come out. over: the
    ranks of the axis that take part, "intra" (those of a node of m ranks) or "inter" (those of equal number on all
    nodes); None: all.

    Constraints: dropped rows stand at the tail and stay at home; going back, their rows come out as zeros. Nobody has
    rows for who does not take part.
    """
    send, receive = _send(host, n, axis), _receive(host, n, axis)
    if reverse:
        send, receive = receive, send
    among = group_of(over, n, m, world.current().coordinate(axis)) if over else range(n)
    send, receive = ([numbers[place] for place in among] for numbers in (send, receive))
    moved = world.current().all_to_all(rows[: sum(send)], send, receive, axis, among)
    out = rows.new_zeros((out_rows, *rows.shape[1:]))
    out[: moved.shape[0]] = moved
    return out


@meaning(
    lambda rows, *_: torch.empty_like(rows),
    gradient=lambda grad, rows, host, n, axis, reverse: regroup(grad, host, n, axis, not reverse),
)
def regroup(rows: Tensor, host: Tensor, n: int, axis: str, reverse: bool) -> Tensor:
    """(source, slot) order -> (slot, source) order of the received rows, or back if `reverse`."""
    me = world.current().coordinate(axis)
    blocks = torch.as_tensor(host).view(n, n, -1)[:, me]  # rows per (source, slot)
    sizes = blocks.T if reverse else blocks
    pieces = rows.split(sizes.flatten().tolist())
    order = torch.arange(blocks.numel()).view(sizes.shape).T.flatten().tolist()
    return torch.cat([pieces[i] for i in order]) if len(order) > 1 else rows.clone()


@meaning(lambda size, n, *_: torch.empty(n, dtype=torch.int64))
def exchange_sizes(size: int, n: int, axis: str) -> Tensor:
    """All-gather of one size of every rank, to the host: [n]. Capacity mode's only header: capacities follow from the
    rank's own batch, so ranks with unequal batches have unequal ones."""
    return world.current().all_gather(torch.tensor([size]), axis)


@meaning(fresh_size)
def total_size(sizes: Tensor) -> int:
    """The sum of the exchanged sizes: a fresh unbacked size of the graph."""
    return int(torch.as_tensor(sizes).sum())


@meaning(
    lambda x, sizes, out_rows, expert_dim, row_dim, n, axis, reverse: sized(
        sized(x, row_dim, out_rows), expert_dim, x.shape[expert_dim] * n if reverse else x.shape[expert_dim] // n
    ),
    gradient=lambda grad, x, sizes, _, expert_dim, row_dim, n, axis, reverse: all_to_all_capacity(
        grad, sizes, x.shape[row_dim], expert_dim, row_dim, n, axis, not reverse
    ),
)
def all_to_all_capacity(
    x: Tensor, sizes: Tensor, out_rows: int, expert_dim: int, row_dim: int, n: int, axis: str, reverse: bool
) -> Tensor:
    """Blocks of rows per expert: [.., E, .., C_own, ..] -> [.., E/n, .., sum(C), ..], or back if `reverse`.

    `sizes` [n] are the ranks' C, `out_rows` the size of `row_dim` that comes out.
    Constraints: E divides by n; expert_dim and row_dim differ.
    """
    here = world.current()
    each = torch.as_tensor(sizes).tolist()
    if reverse:
        send = [part.reshape(-1) for part in x.split(each, row_dim)]
        shape = list(x.shape)
        shape[row_dim] = each[here.coordinate(axis)]
        counts = [torch.Size(shape).numel()] * n
        moved = here.all_to_all(torch.cat(send), [p.numel() for p in send], counts, axis)
        return torch.cat([p.view(shape) for p in moved.split(counts)], expert_dim)
    parts = x.chunk(n, expert_dim)
    shapes = [[*parts[0].shape[:row_dim], c, *parts[0].shape[row_dim + 1 :]] for c in each]
    counts = [torch.Size(s).numel() for s in shapes]
    moved = here.all_to_all(torch.cat([p.reshape(-1) for p in parts]), [parts[0].numel()] * n, counts, axis)
    return torch.cat([p.view(s) for p, s in zip(moved.split(counts), shapes)], row_dim)


@meaning("grad [..] -> [..]")
def reduce_gradient(grad: Tensor, axes: str, scale: float, param: int) -> Tensor:
    """The transpose of `materialize`: sum over the ranks of `axes`, times `scale`. `param` is the input's index."""
    return world.current().all_reduce(grad * scale, axes)


@meaning(lambda grads, *_: [grad.new_empty(grad.shape) for grad in grads])
def reduce_gradients(grads: list[Tensor], axes: str, scale: float, inputs: list[int]) -> list[Tensor]:
    """`reduce_gradient` of several in one collective, a bucket. inputs: which of the program's inputs they belong to.

    Constraints: as many inputs as gradients, which are of one dtype.
    """
    return [world.current().all_reduce(grad * scale, axes) for grad in grads]


@meaning("old [..], new [..] -> [..] new")
def sum_statistic(old: Tensor, new: Tensor, axes: str) -> Tensor:
    """A routing statistic that every rank changed by its own tokens: `old + sum over ranks of (new - old)`."""
    return old + world.current().all_reduce(new - old, axes)


def _send(host: Tensor, n: int, axis: str) -> list[int]:
    me = world.current().coordinate(axis)
    return torch.as_tensor(host).view(n, n, -1)[me].sum(1).tolist()


def _receive(host: Tensor, n: int, axis: str) -> list[int]:
    me = world.current().coordinate(axis)
    return torch.as_tensor(host).view(n, n, -1)[:, me].sum(1).tolist()


def _leaving(node, payload) -> Volume:
    """A collective that sends the share (n-1)/n of `payload` bytes to n-1 peers."""
    n, axis = argument(node, "n"), argument(node, "axis")
    return Volume(wire_bytes={axis: payload * sympy.Rational(n - 1, n)}, messages={axis: sympy.Integer(n - 1)})


def _token_rows(node) -> Volume:
    """Sent rows: what goes in at the source, what comes out on the way back is the same amount on average."""
    sent = _sent_over(node)
    if sent is None:
        return _leaving(node, nbytes(argument(node, "rows")))
    axis = argument(node, "axis")
    return Volume(wire_bytes={axis: sent[0].nbytes}, messages={axis: sympy.Integer(sent[0].messages)})


def _sent_over(node) -> tuple[Sent, ...] | None:
    """What goes over the link of the ranks that take part, if these are not all; to nodes as many rows as arrive."""
    over, n, m, rows, back = (argument(node, name) for name in ("over", "n", "m", "rows", "reverse"))
    if over is None:
        return None
    ranks = len(group_of(over, n, m, 0))
    share = 1 if over == "intra" or back else expr(value(argument(node, "out_rows"))) / expr(value(rows).shape[0])
    return (Sent(over, ranks - 1, nbytes(rows) * share * sympy.Rational(ranks - 1, ranks), aligned=over == "inter"),)


def _blocks(node) -> Volume:
    return _leaving(node, nbytes(argument(node, "x")))


def _small(node) -> Volume:
    return Volume(hbm_bytes=nbytes(node.args[0]))


def _check_part(node):
    over, n, m = (argument(node, name) for name in ("over", "n", "m"))
    if over is None:
        return None if m is None else f"{m} ranks per node say nothing where all ranks take part"
    if over not in ("intra", "inter"):
        return f"it runs over '{over}', not 'intra' or 'inter'"
    return None if m and n % m == 0 else f"{n} ranks are not nodes of {m}"


def _check_capacity(node):
    x, n = value(argument(node, "x")), argument(node, "n")
    expert_dim, row_dim = argument(node, "expert_dim"), argument(node, "row_dim")
    if expert_dim == row_dim:
        return f"expert_dim and row_dim are both {row_dim}"
    size = expr(x.shape[expert_dim])
    if argument(node, "reverse") or not size.is_Integer or int(size) % n == 0:
        return None
    return f"{size} experts do not divide by {n}"


def _check_bucket(node) -> str | None:
    grads, inputs = argument(node, "grads"), argument(node, "inputs")
    if len(grads) != len(inputs):
        return f"{len(grads)} gradients of {len(inputs)} inputs"
    return "its gradients are of several dtypes" if len({value(grad).dtype for grad in grads}) > 1 else None


def way(call) -> Stage:
    """Rows go out to the experts, or back."""
    return Stage.BACK if argument(call, "reverse") else Stage.OUT


_ops, _runtime = torch.ops.moefx, "moefx.runtime.collectives"
_size = partial(define, again=False, drawn="routing")  # what must not come out otherwise in the backward
_counted = partial(define, again=False, stage=Stage.COUNTS)
_exchange = partial(define, along=MOVED, collective="all_to_all", stage=way)
_count = partial(redistribute, again=False, stage=Stage.COUNTS)
_count(
    _ops.exchange_counts.default, "V", "I", tokens=Tokens({"counts": "counts"}, "traffic"),
    runtime=f"{_runtime}.exchange_counts_start(session, step_state, counts, axis=axis, region=region)",
)  # fmt: skip
_counted(
    _ops.counts_to_host.default, volume=_small, waited_by_host=True, along=Along("I", "I"),
    tokens=Tokens({"traffic": "traffic"}, "host"),
    runtime=f"{_runtime}.counts_to_host_start(session, traffic, axis=axis, learner=learner)",
)  # fmt: skip
_size(
    _ops.received_rows.default, volume=free, along=Along("I", "V", dim=None),
    tokens=Tokens({"host": "host"}, "received"),
    runtime="getattr(host, 'num_received')",
)  # fmt: skip
_size(
    _ops.sent_rows.default, volume=free, along=Along("I", "V", dim=None),
    tokens=Tokens({"host": "host"}, "sent"),
    runtime="getattr(host, 'num_sent')",
)  # fmt: skip
_size(
    _ops.slot_counts.default, volume=_small, along=Along("I", "V", dim=None),
    tokens=Tokens({"traffic": "traffic"}, "slots"),
    runtime=f"{_runtime}.slot_counts(session, traffic, axis=axis)",
)  # fmt: skip
_exchange(
    _ops.all_to_all.default, volume=_token_rows, payload="rows", check=_check_part, sent=_sent_over,
    link=lambda call: argument(call, "over") or "comm",
    tokens=Tokens({"host": "host", "rows": "sorted", "out_rows": "received"}, "source", moves=True, coded=True),
    runtime=f"{_runtime}.all_to_all_start(session, rows, host, "
            "axis=axis, region=region, reverse=reverse, num_rows=out_rows, over=over, m=m)",
)  # fmt: skip
define(
    _ops.regroup.default, volume=copied, along=MOVED, drawn="routing",
    is_view=lambda call: value(argument(call, "host")).shape[1] == argument(call, "n"),
    tokens=Tokens({"host": "host", "rows": "source"}, "slot", moves=True),
    runtime=f"{_runtime}.regroup(rows, host, reverse=reverse)",
)  # fmt: skip
_count(
    _ops.exchange_sizes.default, "V", "I",
    tokens=Tokens(gives="capacities", rule="capacities"),  # region: the first of those that share the capacity
    runtime=f"{_runtime}.exchange_sizes_start(session, step_state, size, axis=axis, region=region, fixed=is_fixed)",
)  # fmt: skip
_size(
    _ops.total_size.default, volume=free, tokens=Tokens({"sizes": "capacities"}, "capacity sum"),
    runtime="sum(sizes)",
)  # fmt: skip
_exchange(
    _ops.all_to_all_capacity.default, volume=_blocks, payload="x", check=_check_capacity, workspace=nbytes,
    tokens=Tokens({"sizes": "capacities"}, rule="block", moves=True, chosen="x"),
    runtime=f"{_runtime}.all_to_all_capacity_start(session, x, sizes, axis=axis, expert_dim=expert_dim, "
            "row_dim=row_dim, region=region, reverse=reverse)",
)  # fmt: skip
redistribute(
    _ops.reduce_gradient.default, "P", "I", stage=Stage.GRADIENT,
    runtime="moefx.runtime.gradients.reduce_gradient_start(session, step_state, grad, axes=axes, scale=scale, "
            "name=input_name, owned=is_owned)",
)  # fmt: skip
redistribute(
    _ops.reduce_gradients.default, "P", "I", of="grads", stage=Stage.GRADIENT, check=_check_bucket,
    workspace=nbytes, at_wait=lambda node: sympy.S.Zero, under_way=lambda node: -nbytes(node),  # what it reads is free
    runtime="moefx.runtime.gradients.reduce_gradients_start(session, step_state, grads, axes=axes, scale=scale, "
            "names=input_names)",
)  # fmt: skip
redistribute(
    _ops.sum_statistic.default, "P", "I", of="new", stage=Stage.STATISTIC, again=False,
    runtime=f"{_runtime}.sum_statistic_start(session, old, new, axes=axes)",
)  # fmt: skip
