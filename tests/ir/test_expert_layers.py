"""A whole layer of experts as one op: what it is made of, its gradients, and what the runtime makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.runtime import expert_layer as runtime
from moefx.runtime import kernels
from tests.support.graphs import graph

_ops = torch.ops.moefx
HOW = {"swiglu": (False, None, None), "clamped": (True, 0.7, 1.7)}


def drawn(dtype: torch.dtype, scores: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """(x, weights, gate_up, down), and a routing in which one expert is idle and some choices are of nobody."""
    torch.manual_seed(0)
    idx = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 9], [2, 0]])
    given = [torch.randn(shape).to(dtype) for shape in ((5, 6), (5, 2), (4, 8, 6), (4, 6, 4))]
    given[1] = given[1].to(scores).masked_fill(idx > 3, 0)
    return [each.requires_grad_() for each in given], kernels.route(idx, None, None, 4)


def apart(kind: str, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, perm: Tensor, counts: Tensor,
          *how: Any) -> Tensor:  # fmt: skip
    gates = _ops.grouped_linear(_ops.dispatch(x, perm, 2), gate_up, counts, False)
    rows = _ops.grouped_linear(_ops.gated(kind, [gates], *how), down, counts, False)
    return _ops.combine(rows, perm, 2, weights)


@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", HOW)
def test_the_op_and_its_gradients_are_those_of_its_parts_to_the_bit(kind: str, scores: torch.dtype) -> None:
    given, routing = drawn(torch.bfloat16, scores)
    found, gates = _ops.expert_layer(kind, *given, *routing, *HOW[kind])
    meant = apart(kind, *given, *routing, *HOW[kind])
    assert gates.shape == (10, 8)
    assert torch.equal(found, meant)
    grad = torch.randn_like(meant)
    for one, other in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(meant, given, grad)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", HOW)
def test_the_runtime_does_what_the_op_means(kind: str) -> None:
    given, routing = drawn(torch.float64, torch.float64)
    given, how = [each.detach() for each in given], dict(zip(("interleaved", "limit", "alpha"), HOW[kind]))
    meant = _ops.expert_layer(kind, *given, *routing, *HOW[kind])
    found = runtime.expert_layer(*given, *routing, kind, **how)
    grad = torch.randn_like(meant[0])
    meant += _ops.expert_layer_backward(grad, kind, *given, *routing, meant[1], *HOW[kind])
    found += runtime.expert_layer_backward(grad, *given, *routing, found[1], kind, **how)
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("up", "down", "dtype", "complaint"), [
    (24, 16, "f32", "down \\[8, 16, 11\\]"),
    (24, 8, "f32", "tokens are 16 wide"), (22, 16, "bf16", "x, gate_up and down"),
])  # fmt: skip
def test_the_verifier_knows_its_constraints(up: int, down: int, dtype: str, complaint: str) -> None:
    gm, _ = graph(f'''
        def graph(x: "f32[s0, 16]", weights: "f32[s0, 2]", idx: "i64[s0, 2]", up: "f32[8, {up}, 16]",
                  down: "{dtype}[8, {down}, 11]"):
            route = m.route.default(idx, 8)
            perm = route[0]
            counts = route[1]
            h = x * 2
            return (h, perm, counts)
    ''')
    nodes = {n.name: n for n in gm.graph.nodes}
    nodes["h"].target = _ops.expert_layer.default
    given = (nodes[n] for n in ("x", "weights", "up", "down", "perm", "counts"))
    nodes["h"].args = ("swiglu", *given, False, None, None)
    with pytest.raises(VerifyError, match=complaint):
        verify(gm, Level.PLACED, Facts(MeshSpec.named({"ep": 1})))
