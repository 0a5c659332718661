"""A whole layer of gated experts on rows of one device, and its gradients, as the functions that it is made of.

T tokens, K choices, D width, H inner width, S experts, R = T*K rows.
"""

from __future__ import annotations

from torch import Tensor

from moefx.runtime import glu, grouped, kernels


def expert_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor, name: str, *,
    interleaved: bool = False, limit: float | None = None, alpha: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, D], weights [T, K], gate_up [S, 2H, D], down [S, D, H], perm [R] and counts [S] of `kernels.route` ->
    [T, D] in the promoted dtype of x and weights, and what the first product gave [R, 2H]. The activation is one of
    `glu.NAMES`."""
    k = weights.shape[1]
    gates = grouped.grouped_linear(kernels.dispatch(x, perm, k), gate_up, counts)
    hidden = glu.gated([gates], name, interleaved=interleaved, limit=limit, alpha=alpha)
    return kernels.combine(grouped.grouped_linear(hidden, down, counts), weights, perm, k), gates


def expert_layer_backward(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
    gates: Tensor, name: str, *, interleaved: bool = False, limit: float | None = None, alpha: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad [T, D] of `expert_layer`, and the gates that it gave -> gradients of x, weights, gate_up and down."""
    k, how = weights.shape[1], {"interleaved": interleaved, "limit": limit, "alpha": alpha}
    hidden = glu.gated([gates], name, **how)
    rows = grouped.grouped_linear(hidden, down, counts)
    grad_rows, grad_weights = kernels.combine_backward(grad, rows, weights, perm, k)
    grad_down = grouped.grouped_wgrad(hidden, grad_rows, counts)
    grad_hidden = grouped.grouped_linear(grad_rows, down, counts, transposed=True)
    (grad_gates,) = glu.gated_backward(grad_hidden, [gates], name, **how)
    grad_gate_up = grouped.grouped_wgrad(kernels.dispatch(x, perm, k), grad_gates, counts)
    grad_x = kernels.combine(grouped.grouped_linear(grad_gates, gate_up, counts, transposed=True), None, perm, k)
    return grad_x, grad_weights, grad_gate_up, grad_down
