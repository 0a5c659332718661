"""`materialize`: the one way from a parameter to its use; `own_experts`: a rank's part of what all ranks have."""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.ir import world
from moefx.ir.factors import factors
from moefx.ir.level import Level
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import Along, Volume, argument, define, free, nbytes
from moefx.ir.redistribute import redistribute


class _Materialize(torch.autograd.Function):
    """Identity whose transpose reduces the gradient. Traced through, so that it costs nothing in the program."""

    @staticmethod
    def forward(ctx, param, axes, scale, index):
        ctx.how = axes, scale, index
        return param.view_as(param)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.moefx.reduce_gradient(grad, *ctx.how), None, None, None


def materialize(param: Tensor, plan: str, axes: str, scale: float, index: int) -> Tensor:
    """The parameter as its users want it, from where it lives.

    plan: `"identity"` is the only one so far: home and use coincide. axes: `"dp+ep"`, the mesh axes whose ranks hold
    the same parameter: its gradient is summed over them. scale: one over the number of ranks that read different
    data. index: which input of the program this is (names the gradient's accumulation buffer).

    Constraints: one materialize per parameter and program, before every other use of it.
    """
    assert plan == "identity", f"no plan {plan}"
    return _Materialize.apply(param, axes, scale, index)


@meaning(
    lambda whole, n, axis, table=None, cap=None: sized(
        whole, 0, whole.shape[0] // n if table is None else whole.shape[0] // table.shape[0] * cap
    ),
    gradient=lambda grad, whole, n, axis, table, cap: own_experts_backward(
        grad, n, axis, *(() if table is None else (table, cap))
    ),
)
def own_experts(whole: Tensor, n: int, axis: str, table: Tensor | None = None, cap: int | None = None) -> Tensor:
    """This rank's experts of a tensor that every rank has: [E, ...] -> [E/n, ...]; by a `table` [E, P] of slots, of
    which a rank has `cap`, those of its slots, [cap, ...], zeros where there is none.

    Constraints: without a table, E divides by n. Several rows may belong to an expert: [k*E, ...] -> [k*cap, ...].
    """
    me = world.current().coordinate(axis)
    if table is None:
        return whole.chunk(n)[me].clone()
    of_experts = whole.unflatten(0, (table.shape[0], -1))
    own = of_experts.new_zeros((cap, *of_experts.shape[1:]))
    for expert, place in _places_on(me, table, cap):
        own[place] = of_experts[expert]
    return own.flatten(0, 1)


def _places_on(me: int, table: Tensor, cap: int) -> list[tuple[int, int]]:
    """(expert, place) of every slot of this rank that is taken."""
    slots = [(expert, slot) for expert, row in enumerate(table.tolist()) for slot in row]
    return [(expert, slot % cap) for expert, slot in slots if slot // cap == me]


@meaning(
    lambda grad, n, axis, table=None, cap=None: sized(
        grad, 0, grad.shape[0] * n if table is None else grad.shape[0] // cap * table.shape[0]
    )
)
def own_experts_backward(grad: Tensor, n: int, axis: str, table: Tensor | None = None,
                         cap: int | None = None) -> Tensor:  # fmt: skip
    """The transpose of `own_experts`: zeros for the experts of other ranks."""
    me = world.current().coordinate(axis)
    if table is None:
        parts = [torch.zeros_like(grad)] * n
        parts[me] = grad
        return torch.cat(parts)
    of_slots = grad.unflatten(0, (cap, -1))
    whole = of_slots.new_zeros((table.shape[0], *of_slots.shape[1:]))
    for expert, place in _places_on(me, table, cap):
        whole[expert] = of_slots[place]
    return whole.flatten(0, 1)


_ops = torch.ops.moefx
define(
    materialize, volume=free, levels=frozenset({Level.PLACED}), along=Along("I", "R"),
    factors=factors("param [..] -> [..]"),
)
redistribute(
    _ops.own_experts.default, "R", "V",
    volume=lambda node: Volume(hbm_bytes=0 if argument(node, "table") is None else 2 * nbytes(node)),
    is_view=lambda call: argument(call, "table") is None,
    runtime="moefx.runtime.collectives.own_experts(session, whole, axis=axis, table=table, cap=cap)",
)  # fmt: skip
redistribute(
    _ops.own_experts_backward.default, "V", "P",
    runtime="moefx.runtime.collectives.own_experts_backward(session, grad, axis=axis, table=table, cap=cap)",
)  # fmt: skip
