"""Gated activations on ragged rows, and their gradients, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.runtime import glu
from tests.kernels.cases import DEVICE, Case, assert_near, cases, triton_kernels, wide

SETTINGS = settings(max_examples=7, deadline=None, derandomize=True)
KINDS = [glu.Glu(name, interleaved, limit=0.7) for name in glu.NAMES for interleaved in (False, True)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}{' interleaved' * kind.interleaved}")
@SETTINGS
@given(cases(), st.booleans(), st.booleans())
def test_forward_and_backward(kind: glu.Glu, case: Case, ragged: bool, scaled: bool) -> None:
    rows, grad = case.draw(case.T * case.K, 2 * case.D), case.draw(case.T * case.K, case.D)
    scale = case.draw(case.T * case.K) if scaled else None
    counts = case.routing[1] if ragged else None
    found = triton_kernels.glu(rows, kind, counts)
    assert found.dtype == case.dtype
    assert_near(found, glu.glu(wide(rows), kind, counts), roundings=2)
    meant = glu.glu_backward(wide(grad), wide(rows), kind, counts, wide(scale))
    for one, other in zip(triton_kernels.glu_backward(grad, rows, kind, counts, scale), meant, strict=True):
        assert_near(one, other, roundings=8 if one is not None and one.dtype == torch.float32 else 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.interleaved], ids=lambda kind: kind.name)
@SETTINGS
@given(cases(), st.booleans())
def test_gates_and_ups_in_tensors_of_their_own(kind: glu.Glu, case: Case, of_one: bool) -> None:
    rows = case.draw(case.T * case.K, 2 * case.D)
    gates, ups = rows.chunk(2, 1)[::-1] if of_one else (case.draw(case.T * case.K, case.D) for _ in range(2))
    grad = case.draw(case.T * case.K, case.D)
    assert_near(triton_kernels.glu(gates, kind, up=ups), glu.glu(wide(gates), kind, up=wide(ups)), roundings=2)
    found, *nothing = triton_kernels.glu_backward(grad, gates, kind, up=ups)
    assert nothing == [None, None]
    for one, other in zip(found, glu.glu_backward(wide(grad), wide(gates), kind, up=wide(ups))[0], strict=True):
        assert one.dtype == case.dtype
        assert_near(one, other, roundings=2)


@pytest.mark.parametrize("apart", [False, True])
def test_as_programs_call_them(apart: bool) -> None:
    """Rows may be blocks."""
    rows = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    halves, how = [*rows.chunk(2, -1)] if apart else [rows], {"interleaved": not apart, "limit": 0.7, "alpha": 1.5}
    found, grad = triton_kernels.gated(halves, "clamped", **how), rows[..., :12] + 1
    assert_near(found, glu.gated(list(map(wide, halves)), "clamped", **how), roundings=2)
    grads = triton_kernels.gated_backward(grad, halves, "clamped", **how)
    assert [each.shape for each in grads] == [each.shape for each in halves]
    for one, other in zip(grads, glu.gated_backward(grad.double(), list(map(wide, halves)), "clamped", **how)):
        assert_near(one, other, roundings=2)


def test_the_meaning_is_what_models_write() -> None:
    rows = torch.randn(4, 12, dtype=torch.float64)
    gate, up = rows.chunk(2, 1)
    for name, act in (("swiglu", torch.nn.functional.silu), ("geglu", torch.nn.functional.gelu)):
        assert torch.equal(glu.glu(rows, glu.Glu(name)), act(gate) * up)
    gate, up = rows[:, ::2].clamp(max=7.0), rows[:, 1::2].clamp(-7.0, 7.0)  # GPT-OSS
    assert torch.equal(glu.glu(rows, glu.Glu("clamped", True)), (up + 1) * gate * torch.sigmoid(gate * 1.702))
