"""`materialize`: the one way from a parameter to its use; `own_experts`: a rank's part of what all ranks have."""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.ir import world
from moefx.ir.fates import Operand, shape_of, stay
from moefx.ir.level import Level
from moefx.ir.op import Along, Volume, define, nbytes, value


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


@torch.library.custom_op("moefx::own_experts", mutates_args=())
def own_experts(whole: Tensor, n: int, axis: str) -> Tensor:
    """This rank's experts of a tensor that every rank has: [E, ...] -> [E/n, ...].

    Constraints: E divides by n.
    """
    return whole.chunk(n)[world.current().coordinate(axis)].clone()


@own_experts.register_fake
def _(whole, n, axis):
    return whole.new_empty(whole.shape[0] // n, *whole.shape[1:])


@torch.library.custom_op("moefx::own_experts_backward", mutates_args=())
def own_experts_backward(grad: Tensor, n: int, axis: str) -> Tensor:
    """The transpose of `own_experts`: zeros for the experts of other ranks."""
    parts = [torch.zeros_like(grad)] * n
    parts[world.current().coordinate(axis)] = grad
    return torch.cat(parts)


@own_experts_backward.register_fake
def _(grad, n, axis):
    return grad.new_empty(grad.shape[0] * n, *grad.shape[1:])


def _setup_own(ctx, inputs, output):
    _, ctx.n, ctx.axis = inputs


def _own_backward(ctx, grad):
    return torch.ops.moefx.own_experts_backward(grad, ctx.n, ctx.axis), None, None


own_experts.register_autograd(_own_backward, setup_context=_setup_own)
_ops = torch.ops.moefx
define(
    materialize, volume=lambda node: Volume(), levels=frozenset({Level.PLACED}), along=Along("I", "R"),
    dims=lambda node: [Operand(node.args[0], stay(shape_of(value(node))))],
)  # fmt: skip
define(
    _ops.own_experts.default, volume=lambda node: Volume(), along=Along("R", "V"), is_view=lambda call: True,
    runtime="moefx.runtime.collectives.own_experts(session, whole, axis=axis)",
)  # fmt: skip
define(
    _ops.own_experts_backward.default, volume=lambda node: Volume(hbm_bytes=nbytes(node)),
    along=Along("V", "P"),
    runtime="moefx.runtime.collectives.own_experts_backward(session, grad, axis=axis)",
)  # fmt: skip
