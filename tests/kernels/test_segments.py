"""Biases of slots, sums over the rows of a slot, and zeros behind the last row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.runtime import kernels
from tests.kernels.cases import DEVICE, Case, assert_near, cases, triton_kernels, wide

SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)


@SETTINGS
@given(cases())
def test_parameters_of_rows(case: Case) -> None:
    _, counts = case.routing
    param, rows = case.draw(case.E, case.D), case.T * case.K
    assert torch.equal(triton_kernels.expert_rows(param, counts, rows), kernels.expert_rows(param, counts, rows))
    numbers = param[:, 0]
    assert torch.equal(triton_kernels.expert_rows(numbers, counts, rows), kernels.expert_rows(numbers, counts, rows))


@SETTINGS
@given(cases())
def test_sums_over_rows(case: Case) -> None:
    _, counts = case.routing
    grad = case.draw(case.T * case.K, case.D)
    found = triton_kernels.expert_rows_backward(grad, counts)
    assert found.dtype == case.dtype
    assert_near(found, kernels.expert_rows_backward(wide(grad), counts), roundings=4)


def test_sums_over_many_chunks() -> None:
    counts = torch.tensor([300, 0, 1, 129, 2500], device=DEVICE)
    grad = torch.randn(3000, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = triton_kernels.expert_rows_backward(grad, counts)
    assert_near(found, kernels.expert_rows_backward(grad.double(), counts), roundings=100)
    assert torch.equal(found, triton_kernels.expert_rows_backward(grad, counts))


@SETTINGS
@given(cases(), st.booleans())
def test_bias_and_zeros_in_place(case: Case, has_bias: bool) -> None:
    _, counts = case.routing
    rows, bias = case.draw(case.T * case.K, case.D).contiguous(), case.draw(case.E, case.D) if has_bias else None
    rows[case.used :] = float("nan")  # as a product leaves them
    meant = kernels.finish_rows(wide(rows.clone()), counts, wide(bias))
    assert triton_kernels.finish_rows(rows, counts, bias) is rows
    assert_near(rows, meant)
