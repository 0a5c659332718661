"""Permutes, unpermutes with weights and their gradients against the meaning in ATen."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefx.runtime import kernels
from tests.kernels.cases import Case, assert_near, cases, triton_kernels, wide

SETTINGS = settings(max_examples=16, deadline=None, derandomize=True)


@SETTINGS
@given(cases(), st.booleans())
def test_dispatch(case: Case, some: bool) -> None:
    perm, _ = case.routing
    x, rows = case.draw(case.T, case.D), case.used if some else None
    found = triton_kernels.dispatch(x, perm, case.K, rows)
    assert found.dtype == case.dtype
    assert torch.equal(found, kernels.dispatch(x, perm, case.K, rows))


def some_rows(case: Case, perm: Tensor, some: bool) -> Tensor:
    """Rows of all pairs, or of those that are not dropped, with something behind them that shows if it is read."""
    rows = case.draw(perm.numel(), case.D)
    if some:
        rows[case.used :] = float("nan")
    return rows[: case.used] if some else rows


@SETTINGS
@given(cases(), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_combine(case: Case, some: bool, weighted: bool, other: torch.dtype) -> None:
    """Weights may have another dtype than rows."""
    perm, _ = case.routing
    rows = some_rows(case, perm, some)
    weights = case.draw(case.T, case.K).to(other) if weighted else None
    found = triton_kernels.combine(rows, weights, perm, case.K)
    assert found.dtype == kernels.combine(rows, weights, perm, case.K).dtype
    assert_near(found, kernels.combine(wide(rows), wide(weights), perm, case.K))


@SETTINGS
@given(cases(), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_gradients_of_combine(case: Case, some: bool, weighted: bool, other: torch.dtype) -> None:
    perm, _ = case.routing
    rows = some_rows(case, perm, some)
    grad = case.draw(case.T, case.D)
    weights = case.draw(case.T, case.K).to(other) if weighted else None
    found = triton_kernels.combine_backward(grad, rows, weights, perm, case.K)
    meant = kernels.combine_backward(wide(grad), wide(rows), wide(weights), perm, case.K)
    assert found[0].dtype == rows.dtype
    assert_near(found[0], meant[0])
    assert_near(found[1], meant[1], roundings=4 if case.dtype == torch.float32 else 1)


def test_rows_that_are_wider_than_a_tile() -> None:
    case = Case(3, 2, 2, 9000, torch.float32, torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.Generator(), False)
    test_dispatch.hypothesis.inner_test(case, True)
    test_combine.hypothesis.inner_test(case, False, True, torch.float32)
    test_gradients_of_combine.hypothesis.inner_test(case, False, True, torch.float32)


def test_rows_may_be_matrices() -> None:
    perm, x = torch.tensor([1, 0, 3, 2]), torch.randn(2, 3, 5)
    assert torch.equal(triton_kernels.dispatch(x, perm, 2), kernels.dispatch(x, perm, 2))
    rows = torch.randn(4, 3, 5)
    torch.testing.assert_close(triton_kernels.combine(rows, None, perm, 2), kernels.combine(rows, None, perm, 2))
