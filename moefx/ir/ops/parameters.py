"""`materialize`: the one way from a parameter's home to its use."""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.ir.op import Volume, define


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


define(materialize, volume=lambda node: Volume())
