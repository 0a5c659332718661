"""Gated activations as one op each way, where a kernel does one in one pass. Elsewhere they stay the ops that the user
wrote.

Shapes: H inner width; rows [.., 2H] hold gates and ups, or these are tensors of their own, [.., H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from moefx.ir.fates import TAKEN, Operand, shape_of, stay
from moefx.ir.meaning import meaning, sized
from moefx.ir.op import argument, define, value

_aten = torch.ops.aten
KINDS = ("swiglu", "geglu", "geglu_tanh", "clamped")


@meaning(
    lambda kind, halves, *_: sized(halves[0], -1, halves[0].shape[-1] * len(halves) // 2),
    gradient=lambda grad, kind, halves, *how: (None, gated_backward(grad, kind, halves, *how)),
)
def gated(kind: str, halves: Sequence[Tensor], interleaved: bool, limit: float | None, alpha: float | None) -> Tensor:
    """An activation of gates times ups, [.., H]. kind: "swiglu", "geglu", "geglu_tanh", or "clamped", which is
    `(up + 1) * (gate * sigmoid(gate * alpha))` of gates up to `limit` and ups between `-limit` and `limit`.

    Constraints: halves is one tensor [.., 2H], gates in front of ups, or before its own one each if interleaved; or
    gates and ups, [.., H] of one shape and dtype. limit and alpha are numbers for "clamped" alone.
    """
    gate, up = _halves(halves, interleaved)
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind in ("geglu", "geglu_tanh"):
        return F.gelu(gate, approximate="none" if kind == "geglu" else "tanh") * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@meaning(lambda grad, kind, halves, *_: [half.new_empty(half.shape) for half in halves])
def gated_backward(
    grad: Tensor, kind: str, halves: Sequence[Tensor], interleaved: bool, limit: float | None,
    alpha: float | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the halves of `gated`: of one tensor [.., 2H], or of two [.., H]."""
    gate, up = _halves(halves, interleaved)
    if kind == "clamped":
        grads = _clamped_backward(grad, gate, up, limit, alpha)
    elif kind == "swiglu":
        grads = _aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    else:
        how = "none" if kind == "geglu" else "tanh"
        grads = _aten.gelu_backward(grad * up, gate, approximate=how), grad * F.gelu(gate, approximate=how)
    if len(halves) == 2:
        return list(grads)
    return [torch.stack(grads, -1).flatten(-2) if interleaved else torch.cat(grads, -1)]


def _clamped_backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float) -> tuple[Tensor, Tensor]:
    low, near = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = torch.sigmoid(low * alpha)
    of_product = grad * (near + 1)
    of_gate = of_product * sigmoid + _aten.sigmoid_backward(of_product * low, sigmoid) * alpha
    return of_gate.masked_fill(gate > limit, 0), (grad * (low * sigmoid)).masked_fill(up.abs() > limit, 0)


def _halves(halves: Sequence[Tensor], interleaved: bool) -> tuple[Tensor, ...]:
    if len(halves) == 2:
        return tuple(halves)
    (rows,) = halves
    return (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)


def _check(node: Node) -> str | None:
    kind, halves = argument(node, "kind"), [value(each) for each in argument(node, "halves")]
    if kind not in KINDS:
        return f"the activation {kind} is none of {', '.join(KINDS)}"
    if len(halves) == 2:
        if argument(node, "interleaved") or halves[0].shape != halves[1].shape or halves[0].dtype != halves[1].dtype:
            return f"gates are {halves[0].dtype} {list(halves[0].shape)}, ups {halves[1].dtype} {list(halves[1].shape)}"
    elif len(halves) != 1 or halves[0].shape[-1] % 2:
        return f"{len(halves)} tensors, the first {halves[0].shape[-1]} wide, are no gates and ups"
    numbers = [argument(node, name) is not None for name in ("limit", "alpha")]
    return None if numbers == [kind == "clamped"] * 2 else f"{kind} has a limit or alpha that it must not, or has none"


def _dims(node: Node) -> list[Operand]:
    """Rows keep their places; of gates and ups in one tensor, those of a rank do, each for itself."""
    halves = argument(node, "halves")
    given = [argument(node, "grad"), *halves] if "backward" in node.target.name() else halves
    shapes = [shape_of(value(each)) for each in given]
    others = {len(shapes[0]) - 1: TAKEN} if len(halves) == 1 else {}
    return [Operand(each, stay(shape, others)) for each, shape in zip(given, shapes)]


_ops = torch.ops.moefx
define(
    _ops.gated.default, check=_check, dims=_dims, fresh=True, lean=True,
    runtime="moefx.runtime.glu.gated(halves, kind, interleaved=interleaved, limit=limit, alpha=alpha)",
)  # fmt: skip
define(
    _ops.gated_backward.default, check=_check, dims=_dims, fresh=True, lean=True,
    runtime="moefx.runtime.glu.gated_backward(grad, halves, kind, interleaved=interleaved, limit=limit, alpha=alpha)",
)  # fmt: skip
