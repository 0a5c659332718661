"""One expert-parallel MoE layer in the papers' symbols: what a rank computes and moves, forward and backward.

B sequences per rank of L tokens, M the model's width, H the experts' hidden width, E experts, k choices per token,
f the capacity factor (1 where nothing is dropped), n chunks, N_EP ranks that share the experts, b bytes per element.
Balanced routing is meant: every rank gets as many rows as it sends, R = f*k*B*L. Indices and counts have 8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from moefx.ir.op import Volume

B, L, M, H, E, k, n, N_EP, b = SYMBOLS = sympy.symbols("B L M H E k n N_EP b", integer=True, positive=True)
f = sympy.Symbol("f", positive=True)
INDEX_BYTES = 8


@dataclass(frozen=True)
class LayerAmounts:
    """Volumes by step of the layer, in the order in which they run; those of all n chunks together."""

    forward: Mapping[str, Volume]
    backward: Mapping[str, Volume]


def moe_layer_amounts(*, gated: bool = True) -> LayerAmounts:
    """The layer with a linear router and experts of two matrices, or three if `gated` (SwiGLU, the first two fused).

    Activations count as one fused pass over memory; the router's softmax and top-k, which are narrow, are left out.
    """
    tokens, rows, width = B * L, f * k * B * L, (2 if gated else 1) * H
    moved = Volume(wire_bytes={"ep": rows * M * b * (N_EP - 1) / N_EP}, messages={"ep": n * (N_EP - 1)})
    counts = Volume(wire_bytes={"ep": n * INDEX_BYTES * E * (N_EP - 1)}, messages={"ep": n * (N_EP - 1)})
    regrouped = Volume(hbm_bytes=2 * rows * M * b)
    indices, choices = INDEX_BYTES * rows, k * tokens * b
    gathered = Volume(hbm_bytes=(tokens + rows) * M * b + indices)
    forward = {
        "router": _gemm(tokens, M, E, weights=1),
        "route": Volume(hbm_bytes=INDEX_BYTES * (k * tokens + n * 2 * E) + indices),
        "exchange counts": counts,
        "dispatch": gathered,
        "all-to-all to the experts": moved,
        "regroup": regrouped,
        "first matmul": _gemm(rows, M, width, weights=n * E / N_EP),
        "activation": Volume(hbm_bytes=rows * (width + H) * b),
        "second matmul": _gemm(rows, H, M, weights=n * E / N_EP),
        "regroup back": regrouped,
        "all-to-all to the tokens": moved,
        "combine": Volume(flops=2 * rows * M, hbm_bytes=gathered.hbm_bytes + choices),
    }
    reduced = E * M * b
    backward = {
        "combine": Volume(flops=2 * rows * M, hbm_bytes=(tokens + 2 * rows) * M * b + indices + 2 * choices),
        "all-to-all to the experts": moved,
        "regroup": regrouped,
        "weight gradient of the second matmul": _gemm(rows, H, M, weights=n * E / N_EP),
        "input gradient of the second matmul": _gemm(rows, H, M, weights=n * E / N_EP),
        "activation": Volume(hbm_bytes=rows * (2 * width + H) * b),
        "weight gradient of the first matmul": _gemm(rows, M, width, weights=n * E / N_EP),
        "input gradient of the first matmul": _gemm(rows, M, width, weights=n * E / N_EP),
        "regroup back": regrouped,
        "all-to-all to the tokens": moved,
        "dispatch": Volume(flops=2 * rows * M, hbm_bytes=gathered.hbm_bytes),
        "weight gradient of the router": _gemm(tokens, M, E, weights=1),
        "input gradient of the router": _gemm(tokens, M, E, weights=1),
        "all-reduce of the router's gradient": Volume(
            wire_bytes={"ep": 2 * reduced * (N_EP - 1) / N_EP}, messages={"ep": 2 * (N_EP - 1)}
        ),
    }
    return LayerAmounts(forward, backward)


def _gemm(rows: sympy.Expr, inner: sympy.Expr, outer: sympy.Expr, weights: sympy.Expr | int) -> Volume:
    """A product over `rows` with `weights` matrices [inner, outer]; its two gradients take the same."""
    return Volume(2 * rows * inner * outer, b * (rows * (inner + outer) + weights * inner * outer))
