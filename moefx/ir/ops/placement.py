"""Experts on other ranks than their own: their parameters go out to the ranks that have copies, gradients come home.

n ranks on the axis; a rank has `room` places for experts that live there and `cap` slots in all, the others for copies.
`moves` is the placement table [E, P] in the host's memory: global slot = rank * cap + place, homes in column 0, -1
pads.
Sources: SparseAllGather and SparseReduceScatter of Hecate (section 4); node by node as in its hierarchical form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir import world
from moefx.ir.meaning import meaning
from moefx.ir.op import MOVED, Stage, Volume, argument, define, numel, value


@meaning(
    lambda params, moves, room, cap, n, axis, m, dtype: [
        param.new_empty((cap, *param.shape[1:]), dtype=dtype) for param in params
    ],
    gradient=lambda grads, params, moves, *how: _home(grads, params, moves, *how[:-1]),
)
def gather_experts(params: Sequence[Tensor], moves: Tensor, room: int, cap: int, n: int, axis: str,
                   m: int | None, dtype: torch.dtype | None) -> list[Tensor]:  # fmt: skip
    """Parameters of the experts that live here, [room, ..] each -> of all that this rank computes, [cap, ..] each: its
    own at the front, copies of others where `moves` has them, zeros elsewhere. m: ranks per node; an expert crosses to
    a node once. dtype: of the result, and of what travels; gradients go home in that of the parameters.

    Constraints: `moves` lies in the host's memory, and is the same on all ranks of the axis.
    """
    me, found = world.current().coordinate(axis), []
    for param in params:
        out = param.new_zeros((cap, *param.shape[1:]), dtype=dtype)
        out[:room] = param
        every = world.current().all_gather(out[:room].contiguous(), axis)
        for home, *copies in moves.tolist():
            for place in (copy - me * cap for copy in copies if copy >= 0 and copy // cap == me):
                out[place] = every[home // cap * room + home % cap]
        found.append(out)
    return found


@meaning(
    lambda grads, moves, room, *_: [grad.new_empty((room, *grad.shape[1:])) for grad in grads],
    gradient=lambda grads, _, *how: gather_experts(grads, *how, None),
)
def scatter_experts(grads: Sequence[Tensor], moves: Tensor, room: int, cap: int, n: int, axis: str,
                    m: int | None) -> list[Tensor]:  # fmt: skip
    """The transpose of `gather_experts`: gradients [cap, ..] each -> of the experts that live here, [room, ..] each,
    with those of all copies, summed in the order of the ranks that have them."""
    me, found = world.current().coordinate(axis), []
    for grad in grads:
        out = grad[:room].clone()
        every = world.current().all_gather(grad.contiguous(), axis)
        for home, *copies in moves.tolist():
            for copy in sorted(copies) if home // cap == me else ():
                if copy >= 0:
                    out[home % cap] += every[copy]
        found.append(out)
    return found


@meaning(
    lambda slots, *_: [torch.empty_like(each) for each in slots],
    gradient=lambda grads, slots, params, added, *how: ([None] * len(slots), _home(grads, params, *how)),
)
def add_experts(slots: Sequence[Tensor], params: Sequence[Tensor], added: Tensor, moves: Tensor, room: int, cap: int,
                n: int, axis: str, m: int | None) -> list[Tensor]:  # fmt: skip
    """What `gather_experts` made of `params` [room, ..] each, slots [cap, ..] each -> the same with the copies of
    `added` in places that were free. `moves` has all copies: by it gradients go home, to `params` at once.

    Constraints: as of `gather_experts`; no copy of `added` has a place that is taken; `slots` want no gradients.
    """
    me, found = world.current().coordinate(axis), []
    for mine in slots:
        out, every = mine.clone(), world.current().all_gather(mine.contiguous(), axis)
        for home, *copies in added.tolist():
            for copy in copies:
                if copy >= 0 and copy // cap == me:
                    out[copy % cap] = every[home]
        found.append(out)
    return found


def _home(grads: list[Tensor], params: Sequence[Tensor], *how: Any) -> list[Tensor]:
    """Gradients on the way to the parameters, each in the parameter's dtype."""
    return scatter_experts([grad.to(param.dtype) for grad, param in zip(grads, params)], *how)


def _given(node: Any) -> list[Node]:
    """The parameters, what was gathered of them, or the gradients."""
    return node.args[0]


def adds(call: Any) -> bool:
    """Whether a call brings copies to those that others have brought."""
    return call.target is _ops.add_experts.default


def _moved(node: Node) -> Volume:
    """On average a rank gives as many experts as there is room for copies."""
    axis = argument(node, "axis")
    messages = sympy.Integer(min(argument(node, "n") - 1, _many(node)))
    return Volume(wire_bytes={axis: _spare(node)}, messages={axis: messages})


def _many(node: Node) -> int:
    """Copies that come to a rank: as many as there is room for; to those of a forecast one, which it has left."""
    return 1 if adds(node) else argument(node, "cap") - argument(node, "room")


def _spare(node: Node) -> sympy.Expr:
    """Bytes of the copies of a rank."""
    dtype = argument(node, "dtype") if node.target is _ops.gather_experts.default else None
    return sum((numel(each) / value(each).shape[0] * _many(node) * (dtype or value(each).dtype).itemsize
                for each in _given(node)), start=sympy.S.Zero)  # fmt: skip


def _sent(node: Node) -> sympy.Expr:
    """Of an all-to-all that sends as much: all but one of n parts leaves."""
    n = argument(node, "n")
    return _spare(node) * sympy.Rational(n, n - 1)


def _check(node: Any) -> str | None:
    room, cap, n, m, moves = (argument(node, name) for name in ("room", "cap", "n", "m", "moves"))
    rows = room if node.target is _ops.gather_experts.default else cap
    wrong = next((each for each in _given(node) if value(each).shape[0] != rows), None)
    if not 0 < room < cap:
        return f"{cap} slots are no more than {room} homes: there is nothing to copy to"
    if wrong is not None:
        return f"{wrong.name} has {value(wrong).shape[0]} rows, not {rows}"
    if value(moves).dim() != 2 or value(moves).device.type != "cpu":
        return "moves is no table in the host's memory"
    return None if m is None or n % m == 0 else f"{n} ranks are not nodes of {m}"


_ops, _runtime = torch.ops.moefx, "moefx.runtime.gather_experts"
_move = partial(define, volume=_moved, along=MOVED, check=_check, payload=_sent, collective="all_to_all")
_move(
    _ops.gather_experts.default, stage=Stage.WEIGHTS,
    is_view=lambda call: argument(call, "dtype") is None and all(each.op == "placeholder" for each in _given(call)),
    runtime=f"{_runtime}.gather_experts_start(session, step_state, params, moves, room=room, cap=cap, axis=axis, "
            "region=region, m=m, dtype=dtype, lend=are_inputs)",
)  # fmt: skip
_move(
    _ops.add_experts.default, stage=Stage.WEIGHTS, is_view=lambda call: True,  # in memory that is there for copies
    runtime=f"{_runtime}.add_experts_start(session, step_state, slots, added, cap=cap, axis=axis, region=region, m=m)",
)  # fmt: skip
_move(
    _ops.scatter_experts.default, stage=Stage.COPIES, workspace=_spare,
    runtime=f"{_runtime}.scatter_experts_start(session, grads, moves, room=room, cap=cap, axis=axis, region=region, "
            "m=m)",
)  # fmt: skip
