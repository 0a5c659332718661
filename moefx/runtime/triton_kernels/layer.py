"""A whole layer of gated experts on rows of one device: what gather, activation and weighing cost goes into products.

T tokens, K choices, R rows = sum(counts) at most, D width, H inner width, S slots. The forward is two products and a
sum over choices; it keeps the tokens and what the first product gave [R, 2H], nothing else of the size of rows. Of the
backward, gradients of tokens are gathered while they are loaded, and the gradient of the weights falls out of the
activation's. Nothing is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefx.runtime import expert_layer as meaning
from moefx.runtime.glu import Glu, kind_of
from moefx.runtime.triton_kernels.activations import glu_backward
from moefx.runtime.triton_kernels.launch import or_else
from moefx.runtime.triton_kernels.matmul import Tiles, product, weight_gradient
from moefx.runtime.triton_kernels.rows import collect, places_of


class Kept(NamedTuple):
    """What the backward of a layer needs. gates [R, 2H]; source [R] int32, the token of every row; places [T*K]
    int32; scale [R] float32, the weight of every row."""

    gates: Tensor
    source: Tensor
    places: Tensor
    scale: Tensor


class Ways(NamedTuple):
    """Tiles of the products of a layer; None is what `matmul.tiles_for` says."""

    forward: Tiles | None = None
    backward: Tiles | None = None
    weights: Tiles | None = None


def forward(
    x: Tensor, weights: Tensor, perm: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, kind: Glu,
    ways: Ways = Ways(),  # noqa: B008  it never changes
) -> tuple[Tensor, Kept]:  # fmt: skip
    """x [T, D], weights [T, K], perm [T*K] and counts [S] of `kernels.route`, gate_up [S, 2H, D], down [S, D, H] ->
    [T, D] and what `backward` takes. Dropped pairs give nothing."""
    source, places, scale = _moves(weights, perm)
    gates, hidden = product(x, gate_up.transpose(1, 2), counts, num_rows=perm.numel(), source=source, kind=kind,
                            tiles=ways.forward)  # fmt: skip
    rows = product(hidden, down.transpose(1, 2), counts, scale=scale, tiles=ways.forward)
    return collect(rows, None, places, weights.shape[1]), Kept(gates, source, places, scale)


def backward(
    grad: Tensor, x: Tensor, weights: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, kind: Glu, kept: Kept,
    ways: Ways = Ways(),  # noqa: B008  it never changes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad [T, D] of the result -> gradients of x, weights, gate_up and down."""
    grad_hidden = product(grad, down, counts, num_rows=kept.source.numel(), source=kept.source, tiles=ways.backward)
    grad_gates, scaled, grad_scale = glu_backward(grad_hidden, kept.gates, kind, counts, kept.scale)
    del grad_hidden
    grad_down = weight_gradient(grad, scaled, counts, left_source=kept.source, tiles=ways.weights)
    grad_rows = product(grad_gates, gate_up, counts, tiles=ways.backward)
    grad_x = collect(grad_rows, None, kept.places, weights.shape[1])
    del grad_rows
    grad_gate_up = weight_gradient(grad_gates, x, counts, right_source=kept.source, tiles=ways.weights)
    grad_weights = grad_scale.index_select(0, kept.places).view(weights.shape).to(weights.dtype)
    return grad_x, grad_weights, grad_gate_up, grad_down


@or_else(meaning.expert_layer)
def expert_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor, name: str, *,
    interleaved: bool = False, limit: float | None = None, alpha: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `runtime.expert_layer.expert_layer` gives, as programs call it."""
    out, kept = forward(x, weights, perm, counts, gate_up, down, kind_of(name, interleaved, limit, alpha))
    return out.to(torch.promote_types(x.dtype, weights.dtype)), kept.gates


@or_else(meaning.expert_layer_backward)
def expert_layer_backward(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
    gates: Tensor, name: str, *, interleaved: bool = False, limit: float | None = None, alpha: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What `runtime.expert_layer.expert_layer_backward` gives. What says where rows go is worked out again: it is four
    numbers a row."""
    kind = kind_of(name, interleaved, limit, alpha)
    kept = Kept(gates, *_moves(weights, perm))
    return backward(grad.to(x.dtype), x, weights, counts, gate_up, down, kind, kept)


def _moves(weights: Tensor, perm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`source`, `places` and `scale` of `Kept`."""
    scale = weights.reshape(-1).index_select(0, perm).float()
    return (perm // weights.shape[1]).to(torch.int32), places_of(perm), scale
