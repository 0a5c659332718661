"""Gated activations of experts on rows: SwiGLU, GEGLU and the clamped one of GPT-OSS, and their gradients, in ATen.

R rows, H inner width, S slots. Rows [R, 2H] hold what the first product of an expert gives: gates and then ups, or one
beside the other (`interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("swiglu", "geglu", "geglu_tanh", "clamped")


@dataclass(frozen=True)
class Glu:
    """Which activation. name: one of `NAMES`. "clamped" is `(up + 1) * gate * sigmoid(alpha * gate)` of gates up to
    `limit` and ups between `-limit` and `limit`; the others are `act(gate) * up`."""

    name: str = "swiglu"
    interleaved: bool = False
    limit: float = 7.0
    alpha: float = 1.702


def number_of(kind: Glu) -> int:
    """The place of its name in `NAMES`. Raises ValueError for an unknown one."""
    return NAMES.index(kind.name)


def glu(rows: Tensor, kind: Glu, counts: Tensor | None = None, *, up: Tensor | None = None) -> Tensor:
    """rows [R, 2H], or gates [R, H] and up [R, H] -> [R, H]; with counts [S] int64, zeros past their sum."""
    halves = _halves(*(_wide(each, counts) for each in (rows, up)), kind)
    return _gated(*halves, kind).to(rows.dtype)


def glu_backward(
    grad: Tensor, rows: Tensor, kind: Glu, counts: Tensor | None = None, scale: Tensor | None = None, *,
    up: Tensor | None = None,
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None]:  # fmt: skip
    """Of `glu(rows, kind, counts) * scale[:, None]`: grad [R, H], rows [R, 2H], scale [R] or None -> grad_rows [R, 2H],
    or those of gates and ups; that product [R, H], and the gradient of scale [R] float32, both None without a scale.
    """
    given = [_wide(each, counts).requires_grad_() for each in (rows, up) if each is not None]
    incoming = _wide(grad, counts)
    with torch.enable_grad():
        result = _gated(*_halves(*given, *[None] * (2 - len(given)), kind), kind)
    weight = 1 if scale is None else scale[:, None].to(incoming.dtype)
    grads = (each.to(rows.dtype) for each in torch.autograd.grad(result, given, incoming * weight))
    grad_rows = next(grads) if up is None else tuple(grads)
    if scale is None:
        return grad_rows, None, None
    return grad_rows, (result.detach() * weight).to(rows.dtype), (result.detach() * incoming).sum(1)


def gated(
    halves: Sequence[Tensor], name: str, *, interleaved: bool = False, limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    """As programs call it. halves: one tensor [.., 2H], or gates and ups [.., H] -> [.., H]."""
    return gated_by(glu, halves, kind_of(name, interleaved, limit, alpha))


def gated_backward(
    grad: Tensor, halves: Sequence[Tensor], name: str, *, interleaved: bool = False, limit: float | None = None,
    alpha: float | None = None,
) -> list[Tensor]:  # fmt: skip
    """grad [.., H] of `gated` -> the gradients of the halves."""
    return gated_backward_by(glu_backward, grad, halves, kind_of(name, interleaved, limit, alpha))


def kind_of(name: str, interleaved: bool, limit: float | None, alpha: float | None) -> Glu:
    """limit and alpha: None where the activation has none."""
    given = {key: found for key, found in (("limit", limit), ("alpha", alpha)) if found is not None}
    return Glu(name, interleaved, **given)


def gated_by(function: Callable[..., Tensor], halves: Sequence[Tensor], kind: Glu) -> Tensor:
    """`gated` by a function that does what `glu` does."""
    rows, up = (each.flatten(0, -2) for each in halves) if len(halves) > 1 else (halves[0].flatten(0, -2), None)
    return function(rows, kind, up=up).unflatten(0, halves[0].shape[:-1])


def gated_backward_by(
    function: Callable[..., tuple], grad: Tensor, halves: Sequence[Tensor], kind: Glu
) -> list[Tensor]:
    """`gated_backward` by a function that does what `glu_backward` does."""
    rows, up = (each.flatten(0, -2) for each in halves) if len(halves) > 1 else (halves[0].flatten(0, -2), None)
    found, _, _ = function(grad.flatten(0, -2), rows, kind, up=up)
    return [each.view_as(half) for each, half in zip([found] if up is None else found, halves, strict=True)]


def _wide(rows: Tensor | None, counts: Tensor | None) -> Tensor | None:
    return None if rows is None else _in_use(rows, counts).to(torch.promote_types(rows.dtype, torch.float32))


def _in_use(rows: Tensor, counts: Tensor | None) -> Tensor:
    """Rows [R, ...] with zeros past the sum of counts."""
    if counts is None:
        return rows
    beyond = torch.arange(rows.shape[0], device=rows.device) >= counts.sum()
    return rows.masked_fill(beyond[:, None], 0)


def _halves(rows: Tensor, up: Tensor | None, kind: Glu) -> tuple[Tensor, Tensor]:
    if up is not None:
        return rows, up
    gate, up = (rows[:, ::2], rows[:, 1::2]) if kind.interleaved else rows.chunk(2, 1)
    return gate, up


def _gated(gate: Tensor, up: Tensor, kind: Glu) -> Tensor:
    if kind.name == "swiglu":
        return F.silu(gate) * up
    if kind.name in ("geglu", "geglu_tanh"):
        return F.gelu(gate, approximate="none" if kind.name == "geglu" else "tanh") * up
    assert kind.name == "clamped", f"no activation is called {kind.name}"
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + 1) * gate * torch.sigmoid(kind.alpha * gate)
