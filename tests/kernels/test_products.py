"""Products per slot, their gradients, and a layer that fuses what is around them."""

from __future__ import annotations

import importlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefx.runtime import expert_layer, glu, grouped, kernels
from tests.kernels.cases import DEVICE, HAS_TRITON, Case, assert_near, cases, wide

matmul, layer = (importlib.import_module(f"moefx.runtime.triton_kernels.{name}") if HAS_TRITON else None
                 for name in ("matmul", "layer"))  # fmt: skip

SETTINGS = settings(max_examples=7, deadline=None, derandomize=True)


@SETTINGS
@given(cases(), st.sampled_from([1, 24, 65]), st.booleans(), st.booleans())
def test_linear(case: Case, out: int, transposed: bool, has_bias: bool) -> None:
    _, counts = case.routing
    rows, bias = case.draw(case.T * case.K, case.D), case.draw(case.E, out) if has_bias else None
    weight = case.draw(case.E, *((case.D, out) if transposed else (out, case.D)))
    found = matmul.grouped_linear(rows, weight, counts, transposed=transposed, bias=bias)
    assert found.dtype == case.dtype
    meant = grouped.grouped_linear(wide(rows), wide(weight), counts, transposed=transposed, bias=wide(bias))
    assert_near(found, meant, roundings=8 if case.dtype == torch.float32 else 1)


@SETTINGS
@given(cases(), st.sampled_from([1, 24, 65]), st.booleans(), st.booleans())
def test_weight_gradient(case: Case, out: int, transposed: bool, adds: bool) -> None:
    _, counts = case.routing
    rows, grad = case.draw(case.T * case.K, case.D), case.draw(case.T * case.K, out)
    base = case.draw(case.E, *((case.D, out) if transposed else (out, case.D))) if adds else None
    meant = grouped.grouped_wgrad(wide(rows), wide(grad), counts, transposed=transposed)
    meant = meant if base is None else meant + wide(base)
    found = matmul.grouped_wgrad(rows, grad, counts, transposed=transposed, out=base)
    assert base is None or found is base
    assert_near(found, meant, roundings=16 if case.dtype == torch.float32 else 2)


def test_rows_that_are_matrices() -> None:
    rows, grad, weight = torch.randn(5, 3, 8), torch.randn(5, 3, 6), torch.randn(2, 6, 8)
    counts, bias = torch.tensor([1, 3]), torch.randn(2, 6)
    for mine, meant in (
        (matmul.grouped_linear, grouped.grouped_linear),
        (matmul.finished_linear, grouped.grouped_linear),
    ):
        torch.testing.assert_close(mine(rows, weight, counts, bias=bias), meant(rows, weight, counts, bias=bias))
    assert_near(matmul.grouped_wgrad(rows, grad, counts), grouped.grouped_wgrad(rows, grad, counts), roundings=8)


def test_tiles_cover_all_rows_once() -> None:
    counts = torch.tensor([0, 33, 0, 1, 64, 0], device=DEVICE)
    tiles, bound = matmul.mapped(counts, 120, 32)
    slots, firsts, ends = (each[tiles[0] >= 0].tolist() for each in tiles)
    assert bound == tiles.shape[1] == 120 // 32 + 7
    covered = [(slot, row) for slot, first, end in zip(slots, firsts, ends)
               for row in range(first, min(first + 32, end))]  # fmt: skip
    of_row = [slot for slot, count in enumerate([*counts.tolist(), 22]) for _ in range(count)]
    assert covered == list(zip(of_row, range(120)))


def plain(x: Tensor, weights: Tensor, perm: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, kind: glu.Glu):
    """The layer by its meaning, for autograd: expert by expert."""
    token = perm // weights.shape[1]
    out = torch.zeros_like(x)
    start = 0
    for gates, last, count in zip(gate_up, down, counts.tolist()):
        pairs = perm[start : start + count]
        start += count
        hidden = glu.glu(x[token[start - count : start]] @ gates.t(), kind)
        out = out.index_add(0, pairs // weights.shape[1], (hidden @ last.t()) * weights.reshape(-1)[pairs, None])
    return out


@SETTINGS
@given(cases(widths=(16, 40)), st.sampled_from([8, 24]), st.sampled_from(
    [glu.Glu(), glu.Glu("clamped", True), glu.Glu("geglu_tanh"), glu.Glu("geglu", True)]))  # fmt: skip
def test_layer(case: Case, inner: int, kind: glu.Glu) -> None:
    perm, counts = case.routing
    x, grad = case.draw(case.T, case.D), case.draw(case.T, case.D)
    weights = case.draw(case.T, case.K).contiguous()
    gate_up, down = 0.2 * case.draw(case.E, 2 * inner, case.D), 0.2 * case.draw(case.E, case.D, inner)
    exact = [wide(each).requires_grad_() for each in (x, weights, gate_up, down)]
    meant = plain(*exact[:2], perm, counts, *exact[2:], kind)
    gradients = torch.autograd.grad((meant * wide(grad)).sum(), exact, allow_unused=True)
    found, kept = layer.forward(x, weights, perm, counts, gate_up, down, kind)
    roundings = 16 if case.dtype == torch.float32 else 4
    assert_near(found, meant.detach(), roundings=roundings)
    mine = layer.backward(grad, x, weights, counts, gate_up, down, kind, kept)
    for one, other, of in zip(mine, gradients, exact, strict=True):
        assert_near(one, torch.zeros_like(of) if other is None else other, roundings=2 * roundings)


@SETTINGS
@given(cases(widths=(16, 40)), st.booleans())
def test_layer_as_programs_call_it(case: Case, single: bool) -> None:
    """Scores may be in single precision where rows are not; then the sum over choices is."""
    perm, counts = case.routing
    x, grad, weights = case.draw(case.T, case.D), case.draw(case.T, case.D), case.draw(case.T, case.K).contiguous()
    weights = weights.float() if single else weights
    given = x, weights, 0.2 * case.draw(case.E, 16, case.D), 0.2 * case.draw(case.E, case.D, 8)
    how, roundings = {"interleaved": True, "limit": 0.7, "alpha": 1.5}, 32 if case.dtype == torch.float32 else 8
    out, gates = layer.expert_layer(*given, perm, counts, "clamped", **how)
    assert out.dtype == (torch.float32 if single else case.dtype)
    exact = tuple(map(wide, given))
    meant, of_gates = expert_layer.expert_layer(*exact, perm, counts, "clamped", **how)
    for one, other in ((out.to(case.dtype), meant), (gates, of_gates)):
        assert_near(one, other, roundings=roundings)
    grad = grad.to(out.dtype)
    mine = layer.expert_layer_backward(grad, *given, perm, counts, gates, "clamped", **how)
    wanted = expert_layer.expert_layer_backward(wide(grad), *exact, perm, counts, wide(gates), "clamped", **how)
    for one, other, of in zip(mine, wanted, given, strict=True):
        assert one.dtype == of.dtype
        assert_near(one.to(case.dtype), other, roundings=roundings)


def test_meaning_runs_where_no_kernel_can(monkeypatch) -> None:
    """As in a rehearsal on CPU of a program for CUDA, where Triton does not interpret."""
    if DEVICE == "cpu":
        monkeypatch.setattr(importlib.import_module("triton").knobs.runtime, "interpret", False)
    rows, perm = torch.randn(4, 3, dtype=torch.float64), torch.tensor([2, 0, 3, 1])
    combine = importlib.import_module("moefx.runtime.triton_kernels.rows").combine
    assert torch.equal(combine(rows, None, perm, 2), kernels.combine(rows, None, perm, 2))
