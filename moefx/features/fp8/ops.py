"""A product per expert in fp8. Shapes as in `ir.ops.experts`: R rows, S slots, I and O the widths."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx.ir.meaning import meaning, sized
from moefx.ir.op import REGISTRY, Gemm, Volume, argument, define, numel, value

FP8 = torch.float8_e4m3fn
_ops = torch.ops.moefx
_exact = REGISTRY[_ops.grouped_linear.default]


@meaning(lambda rows, weight, counts, transposed, *_: sized(rows, -1, weight.shape[2 if transposed else 1]))
def scaled_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, bias: Tensor | None = None
) -> Tensor:
    """`grouped_linear` of rows and weights in fp8: each row, and each output of a slot's matrix, has a scale in fp32,
    which makes its largest entry the largest number of e4m3. Sums are in fp32, and are rounded once.

    Constraints: those of `grouped_linear`.
    """
    matrices = weight.transpose(1, 2) if transposed else weight
    bias = None if bias is None else bias.float()
    return _exact.target(_rounded(rows), _rounded(matrices), counts, False, bias).to(rows.dtype)


def _rounded(x: Tensor) -> Tensor:
    """x [.., I] as fp8 has it, in fp32."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = (largest / torch.finfo(FP8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).to(FP8).float() * scale


def _volume(node: Node) -> Volume:
    """Rows and weights are read twice to make bytes of them, which are written and read."""
    found, size = _exact.volume(node), value(argument(node, "rows")).element_size()
    return replace(found, hbm_bytes=found.hbm_bytes + (size + 2) * _entries(node))


def _product(node: Node) -> Gemm:
    """Bytes are made in two passes over rows and weights: one finds scales, one rounds."""
    size = value(argument(node, "rows")).element_size()
    return replace(_exact.gemm(node), dtype=str(FP8).removeprefix("torch."), beside=(2 * size + 1) * _entries(node))


def _entries(node: Node) -> sympy.Expr:
    return numel(argument(node, "rows")) + numel(argument(node, "weight"))


define(
    _ops.scaled_linear.default, volume=_volume, check=_exact.check, gemm=_product, tokens=_exact.tokens, fresh=True,
    rounds=_exact.target, workspace=lambda node: 5 * _entries(node) + 4 * numel(node),
    runtime="moefx.features.fp8.runtime.scaled_linear(rows, weight, counts, transposed=transposed, bias=bias)",
)  # fmt: skip
