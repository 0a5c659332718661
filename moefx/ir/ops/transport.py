"""Ops of an all-to-all in steps: exchanges within groups of ranks, reorderings between them, codecs around them.

Shapes: n ranks on the axis, m of them per node, R rows held. `algorithm` and `step` name a step of a registered
algorithm (`moefx.transport.algorithms`), `reverse` the way back. `host` is the traffic matrix [n, n*S], as in
`all_to_all`. An op reads only the rows that its step knows of, and fills what is left of `out_rows` with zeros: rows
that nobody wants stand at the tail and stay at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir import world
from moefx.ir.meaning import fresh_size, meaning, sized
from moefx.ir.op import (
    MOVED,
    Along,
    Sent,
    Stage,
    Tokens,
    Volume,
    argument,
    copied,
    define,
    expr,
    free,
    nbytes,
    numel,
    value,
)
from moefx.ir.ops.exchange import way
from moefx.transport import blocks, codecs
from moefx.transport.algorithms import Exchange, Local, Transport, all_to_all_named, transport
from moefx.transport.codecs import codec_named

_Sizes = Sequence[int]


@meaning(fresh_size)
def phase_rows(host: Tensor, n: int, axis: str, m: int, algorithm: str, step: str, reverse: bool) -> int:
    """How many rows this rank holds after the step: a fresh unbacked size of the graph."""
    here, pairs = _plan(host, n, axis, m, algorithm, reverse)
    return here.num_rows(step, pairs)


@meaning("rows [r~ ..], host [..~] -> [out_rows ..]")
def exchange_phase(
    rows: Tensor, host: Tensor, out_rows: int, n: int, axis: str, m: int, algorithm: str, step: str, reverse: bool
) -> Tensor:
    """One exchange of the algorithm, within its group: rows by receiver -> rows by sender."""
    here, pairs = _plan(host, n, axis, m, algorithm, reverse)
    peers = here.peers(step)
    send, receive = ([0] * n, [0] * n)
    for peer, leaving, arriving in zip(peers, *here.splits(step, pairs)):
        send[peer], receive[peer] = leaving, arriving
    moved = world.current().all_to_all(rows[: sum(send)], send, receive, axis)
    return _padded(rows, [moved], out_rows)


@meaning(lambda rows, host, out_rows, *_: sized(rows[0], 0, out_rows))
def repack(
    rows: Sequence[Tensor],
    host: Tensor,
    out_rows: int,
    n: int,
    axis: str,
    m: int,
    algorithm: str,
    step: str,
    reverse: bool,
) -> Tensor:
    """One local step of the algorithm: the rows of earlier steps, joined and sorted block by block."""
    here, pairs = _plan(host, n, axis, m, algorithm, reverse)
    pieces = [rows[i][start : start + length] for i, start, length in here.segments(step, pairs)]
    return _padded(rows[0], pieces, out_rows)


@meaning(
    lambda rows, codec: rows.new_empty(
        (rows.shape[0], codec_named(codec).payload_width(rows.shape[1])), dtype=codec_named(codec).payload_dtype
    )
)
def encode(rows: Tensor, codec: str) -> Tensor:
    """Rows [R, D] -> the codec's payload [R, W]."""
    return codecs.encode(rows, codec)


@meaning(lambda payload, codec, width, dtype: payload.new_empty((payload.shape[0], width), dtype=dtype))
def decode(payload: Tensor, codec: str, width: int, dtype: torch.dtype) -> Tensor:
    """The codec's payload [R, W] -> rows [R, width]."""
    return codecs.decode(payload, codec, width, dtype)


@meaning("sizes [r~] -> [n n]")
def block_traffic(
    sizes: Tensor, shape: _Sizes, expert_dim: int, row_dim: int, n: int, axis: str, reverse: bool
) -> Tensor:
    """The ranks' capacities [n] -> rows per (source, target) [n, n], for static blocks of `shape` that are about to go
    out, or back if `reverse`: what goes back is what went out."""
    unit, _ = blocks.row_shape(shape, expert_dim, row_dim, n, reverse=reverse)
    return (torch.as_tensor(sizes) * unit).unsqueeze(1).repeat(1, n)


def _packed(x, sizes, expert_dim, row_dim, n, axis, reverse):
    unit, width = blocks.row_shape(x.shape, expert_dim, row_dim, n, reverse=reverse)
    return x.new_empty((unit * x.shape[row_dim] * (1 if reverse else n), width))


@meaning(_packed)
def pack_blocks(x: Tensor, sizes: Tensor, expert_dim: int, row_dim: int, n: int, axis: str, reverse: bool) -> Tensor:
    """Static blocks as rows by target rank: [.., E, .., C_own, ..] -> [R, width], see `transport.blocks`."""
    return blocks.pack(x, torch.as_tensor(sizes).tolist(), expert_dim, row_dim, n, reverse=reverse)


@meaning(lambda rows, sizes, shape, *_: rows.new_empty(shape))
def unpack_blocks(
    rows: Tensor, sizes: Tensor, shape: _Sizes, expert_dim: int, row_dim: int, n: int, axis: str, reverse: bool
) -> Tensor:
    """Rows by source rank as static blocks of `shape`: [R, width] -> [.., E/n, .., sum(C), ..]."""
    me = world.current().coordinate(axis)
    each = torch.as_tensor(sizes).tolist()
    return blocks.unpack(rows, shape, each, expert_dim, row_dim, reverse=reverse, rank=me)


def _plan(host: Tensor, n: int, axis: str, m: int, algorithm: str, reverse: bool) -> tuple[Transport, np.ndarray]:
    pairs = torch.as_tensor(host).view(n, n, -1).sum(2).numpy()
    return transport(algorithm, n, m, world.current().coordinate(axis)), pairs.T if reverse else pairs


def _padded(like: Tensor, pieces: list[Tensor], out_rows: int) -> Tensor:
    out = like.new_zeros((out_rows, *like.shape[1:]))
    found = torch.cat([out[:0], *pieces])
    out[: found.shape[0]] = found
    return out


def _exchanged(node) -> Volume:
    sent, axis = _sent(node), argument(node, "axis")
    return Volume(wire_bytes={axis: sum((each.nbytes for each in sent), start=sympy.S.Zero)},
                  messages={axis: sympy.Integer(sum(each.messages for each in sent))})  # fmt: skip


def _sent(node) -> tuple[Sent, ...]:
    """Where every pair of ranks has equally much to send. Counted for rank 0: algorithms with busy and idle ranks let
    the first one of a node work."""
    n, m, payload = argument(node, "n"), argument(node, "m"), nbytes(argument(node, "rows"))
    plan, step = transport(argument(node, "algorithm"), n, m, 0), argument(node, "step")
    counts = plan.splits(step, np.ones((n, n), dtype=np.int64))[0]
    leaving = {peer: count for peer, count in zip(plan.peers(step), counts) if count and peer != 0}
    sent = []
    for link in ("intra", "inter"):
        mine = [count for peer, count in leaving.items() if (peer < m) == (link == "intra")]
        if mine:
            nbytes_sent = payload * sympy.Rational(sum(mine), sum(counts))
            sent.append(Sent(link, len(mine), nbytes_sent, aligned=plan.over(step) == "inter"))
    return tuple(sent)


def _coded(node) -> Volume:
    """Reads the one form and writes the other; a few flops per entry."""
    return Volume(flops=2 * numel(node), hbm_bytes=nbytes(node.args[0]) + nbytes(node))


def _in_fp32(node: Node) -> sympy.Expr:
    """Codecs whose payload is bytes work on two tensors of numbers."""
    packs = codec_named(argument(node, "codec")).payload_dtype is torch.uint8
    return 2 * 4 * numel(argument(node, "rows")) if packs else sympy.S.Zero


def _check_step(node, kind: type | None = None) -> str | None:
    name, n, m = argument(node, "step"), argument(node, "n"), argument(node, "m")
    if n % m:
        return f"{n} ranks are not nodes of {m}"
    algorithm = all_to_all_named(argument(node, "algorithm"))
    step = next((s for s in algorithm.steps if s.name == name), None)
    if step is None or (kind is not None and not isinstance(step, kind)):
        return f"'{name}' is no {kind.__name__ if kind else 'step'} of '{argument(node, 'algorithm')}'"
    if kind is Local and len(argument(node, "rows")) != len(algorithm.reads(step)):
        return f"'{name}' joins {algorithm.reads(step)}"
    return None


def _check_encode(node) -> str | None:
    rows = value(argument(node, "rows"))
    return None if rows.dim() == 2 and rows.is_floating_point() else f"rows are {rows.dtype} with {rows.dim()} dims"


def _check_decode(node) -> str | None:
    payload, codec = value(argument(node, "payload")), codec_named(argument(node, "codec"))
    wanted = expr(codec.payload_width(value(argument(node, "width"))))
    if payload.dtype is codec.payload_dtype and expr(payload.shape[1]) == wanted:
        return None
    return f"the payload is {payload.dtype} and {expr(payload.shape[1])} wide, not {codec.payload_dtype} and {wanted}"


def _link(call) -> str:
    over = all_to_all_named(argument(call, "algorithm")).step(argument(call, "step")).over
    return "comm" if over == "all" else over


_ops, _runtime, _codecs = torch.ops.moefx, "moefx.runtime.alltoall", "moefx.transport.codecs"
_blocks_call = "axis=axis, expert_dim=expert_dim, row_dim=row_dim, reverse=reverse"
_which_step = "m=m, algorithm=algorithm, step=step"
_step = partial(define, along=MOVED, tokens=Tokens({"host": "host"}, rule="step", moves=True, coded=True))
define(
    _ops.phase_rows.default, volume=free, check=_check_step, along=Along("I", "V", dim=None),
    tokens=Tokens({"host": "host"}, "held"),
    runtime=f"{_runtime}.phase_rows(host, {_which_step}, reverse=reverse)",
)  # fmt: skip
_step(
    _ops.exchange_phase.default, volume=_exchanged, check=lambda node: _check_step(node, Exchange),
    collective="all_to_all", payload="rows", sent=_sent, stage=way, link=_link,
    runtime=f"{_runtime}.exchange_phase_start(session, rows, host, axis=axis, {_which_step}, region=region, "
            "reverse=reverse, num_rows=out_rows)",
)  # fmt: skip
_step(
    _ops.repack.default, volume=copied, check=lambda node: _check_step(node, Local), stage=way,
    runtime=f"{_runtime}.repack(rows, host, {_which_step}, reverse=reverse, num_rows=out_rows)",
)  # fmt: skip
define(
    _ops.encode.default, volume=_coded, check=_check_encode, stage=Stage.COMPRESS, rounds=True, workspace=_in_fp32,
    tokens=Tokens(rule="encoded", moves=True), runtime=f"{_codecs}.encode(rows, codec)",
)  # fmt: skip
define(
    _ops.decode.default, volume=_coded, check=_check_decode, stage=Stage.DECOMPRESS, rounds=True,
    tokens=Tokens(rule="decoded", moves=True), runtime=f"{_codecs}.decode(payload, codec, width, dtype)",
)  # fmt: skip
define(
    _ops.block_traffic.default, volume=free, along=Along("I", "I"),
    tokens=Tokens({"sizes": "capacities"}, rule="traffic"),
    runtime=f"{_runtime}.block_plan(session, sizes, shape, {_blocks_call})",
)  # fmt: skip
define(
    _ops.pack_blocks.default, volume=copied, along=MOVED, workspace=nbytes,
    tokens=Tokens({"sizes": "capacities"}, rule="packed", moves=True),
    runtime=f"{_runtime}.pack_blocks(x, sizes, expert_dim=expert_dim, row_dim=row_dim, reverse=reverse)",
)  # fmt: skip
define(
    _ops.unpack_blocks.default, volume=copied, along=MOVED, stage=way,
    tokens=Tokens({"sizes": "capacities"}, rule="unpacked", moves=True),
    runtime=f"{_runtime}.unpack_blocks(session, rows, sizes, shape, {_blocks_call})",
)  # fmt: skip
