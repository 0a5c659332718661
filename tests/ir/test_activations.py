"""Gated activations as ops: what models write, its gradients, and what the runtime makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefx.axes import MeshSpec
from moefx.errors import VerifyError
from moefx.ir.level import Level
from moefx.ir.ops.activations import KINDS
from moefx.ir.verify import Facts, verify
from moefx.runtime import glu
from tests.support.graphs import graph

NUMBERS = {"clamped": (0.7, 1.7)}


def written(kind: str, halves: Sequence[Tensor], interleaved: bool) -> Tensor:
    """As models write it."""
    if interleaved:
        halves = halves[0][..., ::2], halves[0][..., 1::2]
    gate, up = halves if len(halves) == 2 else halves[0].chunk(2, -1)
    if kind == "clamped":
        gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.7))
    return (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh" if "tanh" in kind else "none")) * up


def drawn(lay: str, dtype: torch.dtype) -> list[Tensor]:
    shape = {"blocks": (3, 5, 12), "two": (5, 6)}.get(lay, (5, 12))
    found = [torch.randn(shape).to(dtype) for _ in range(2 if lay == "two" else 1)]
    return [each.requires_grad_() for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lay", ["halves", "interleaved", "two", "blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_op_and_its_gradient_are_what_models_write_to_the_bit(kind: str, lay: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    halves, interleaved = drawn(lay, dtype), lay == "interleaved"
    limit, alpha = NUMBERS.get(kind, (None, None))
    meant = written(kind, halves, interleaved)
    found = torch.ops.moefx.gated(kind, halves, interleaved, limit, alpha)
    assert torch.equal(found, meant)
    grad = torch.randn_like(meant)
    for one, other in zip(torch.autograd.grad(found, halves, grad), torch.autograd.grad(meant, halves, grad)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lay", ["halves", "interleaved", "two", "blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_runtime_does_what_the_op_means(kind: str, lay: str) -> None:
    torch.manual_seed(1)
    halves, interleaved = [each.detach() for each in drawn(lay, torch.float64)], lay == "interleaved"
    limit, alpha = NUMBERS.get(kind, (None, None))
    how = {"interleaved": interleaved, "limit": limit, "alpha": alpha}
    meant = torch.ops.moefx.gated(kind, halves, interleaved, limit, alpha)
    torch.testing.assert_close(glu.gated(halves, kind, **how), meant, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(meant)
    grads = torch.ops.moefx.gated_backward(grad, kind, halves, interleaved, limit, alpha)
    for one, other in zip(glu.gated_backward(grad, halves, kind, **how), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("call", "complaint"), [
    ("'relu', [x], False, None, None", "the activation relu is none of swiglu"),
    ("'swiglu', [x, y], True, None, None", "gates are"), ("'swiglu', [x, z], False, None, None", "gates are"),
    ("'swiglu', [z], False, None, None", "the first 5 wide"),
    ("'clamped', [x], False, None, 1.7", "clamped has a limit or alpha"),
    ("'swiglu', [x], False, 7.0, None", "swiglu has a limit or alpha"),
])  # fmt: skip
def test_the_verifier_knows_its_constraints(call: str, complaint: str) -> None:
    gm, _ = graph('def graph(x: "f32[s0, 8]", y: "f32[s0, 8]", z: "f32[s0, 5]"):\n    h = x * 2\n    return (h,)\n')
    node = next(n for n in gm.graph.nodes if n.name == "h")
    names = {n.name: n for n in gm.graph.nodes}
    node.target, node.args = torch.ops.moefx.gated.default, eval(f"({call},)", {}, names)
    with pytest.raises(VerifyError, match=complaint):
        verify(gm, Level.PLACED, Facts(MeshSpec.named({"ep": 1})))
