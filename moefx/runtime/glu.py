"""Gated activations of experts on rows: SwiGLU, GEGLU and the clamped one of GPT-OSS, and their gradients, in ATen.

R rows, H inner width, S slots. Rows [R, 2H] hold what the first product of an expert gives: gates and then ups, or one
beside the other (`interleaved`).
"""

from __future__ import annotations

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


def glu(rows: Tensor, kind: Glu, counts: Tensor | None = None) -> Tensor:
    """rows [R, 2H] -> [R, H]; with counts [S] int64, zeros past their sum."""
    gate, up = _halves(_in_use(rows, counts).to(torch.promote_types(rows.dtype, torch.float32)), kind)
    return _gated(gate, up, kind).to(rows.dtype)


def glu_backward(
    grad: Tensor, rows: Tensor, kind: Glu, counts: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of `glu(rows, kind, counts) * scale[:, None]`: grad [R, H], rows [R, 2H], scale [R] or None -> grad_rows [R, 2H],
    that product [R, H], and the gradient of scale [R] float32; both None without a scale."""
    wide = _in_use(rows, counts).to(torch.promote_types(rows.dtype, torch.float32)).requires_grad_()
    incoming = _in_use(grad, counts).to(wide.dtype)
    with torch.enable_grad():
        result = _gated(*_halves(wide, kind), kind)
    weight = 1 if scale is None else scale[:, None].to(wide.dtype)
    (found,) = torch.autograd.grad(result, wide, incoming * weight)
    if scale is None:
        return found.to(rows.dtype), None, None
    return found.to(rows.dtype), (result.detach() * weight).to(rows.dtype), (result.detach() * incoming).sum(1)


def _in_use(rows: Tensor, counts: Tensor | None) -> Tensor:
    """Rows [R, ...] with zeros past the sum of counts."""
    if counts is None:
        return rows
    beyond = torch.arange(rows.shape[0], device=rows.device) >= counts.sum()
    return rows.masked_fill(beyond[:, None], 0)


def _halves(rows: Tensor, kind: Glu) -> tuple[Tensor, Tensor]:
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
