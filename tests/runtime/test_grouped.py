"""Every provider of grouped products against one matmul per slot, with skew, idle slots and rows of no slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefx.runtime import grouped

SETTINGS = settings(max_examples=25, deadline=None)
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
PROVIDERS = [grouped.LOOP, grouped.GROUPED_MM]


def plain_linear(rows: Tensor, weight: Tensor, counts: list[int], transposed: bool) -> Tensor:
    matrices = weight if transposed else weight.transpose(1, 2)
    parts = rows.split([*counts, rows.shape[0] - sum(counts)])
    outs = [part @ matrix for part, matrix in zip(parts, matrices, strict=False)]
    return torch.cat([*outs, rows.new_zeros(parts[-1].shape[0], matrices.shape[2])])


@SETTINGS
@given(COUNTS, st.integers(0, 3), st.booleans(), st.sampled_from(PROVIDERS))
def test_linear_and_gradients(counts: list[int], rest: int, transposed: bool, provider: grouped.Provider) -> None:
    S, R = len(counts), sum(counts) + rest
    torch.manual_seed(R)
    rows = torch.randn(R, 8, requires_grad=True)
    weight = torch.randn((S, 8, 16) if transposed else (S, 16, 8), requires_grad=True)
    plain = plain_linear(rows, weight, counts, transposed)
    grad = torch.randn_like(plain)
    d_rows, d_weight = torch.autograd.grad(plain, (rows, weight), grad)

    n = torch.tensor(counts)
    x, w = rows.detach(), weight.detach()
    forward = w if transposed else w.transpose(1, 2)
    close = torch.testing.assert_close
    close(provider.linear(x, forward, n, False, None), plain.detach())
    close(provider.linear(grad, forward.transpose(1, 2), n, False, None), d_rows)
    bias = torch.randn(S, 16)
    valid = sum(counts)
    biased = plain.detach()[:valid] + bias.repeat_interleave(n, 0)
    close(provider.linear(x, forward, n, False, bias)[:valid], biased)
    close(provider.linear(x, forward, n, False, bias)[valid:], torch.zeros(rest, 16))
    left, right = (x, grad) if transposed else (grad, x)
    close(provider.wgrad(left, right, n, None), d_weight)

    close(grouped.grouped_linear(x, w, n, transposed=transposed), plain.detach())
    close(grouped.grouped_linear(grad, w, n, transposed=not transposed), d_rows)
    close(grouped.grouped_wgrad(x, grad, n, transposed=transposed), d_weight)
    before = torch.randn_like(d_weight)
    out = before.clone()
    assert grouped.grouped_wgrad(x, grad, n, transposed=transposed, out=out) is out
    close(out, before + d_weight)


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_no_slot_and_idle_slots_are_zero(provider: grouped.Provider, dtype: torch.dtype) -> None:
    counts = torch.tensor([0, 3, 0, 2, 0])
    # Rows past the counts are garbage to the caller: they must reach neither result.
    rows = torch.full((9, 8), torch.nan, dtype=dtype)
    grad = torch.full((9, 16), torch.nan, dtype=dtype)
    rows[:5], grad[:5] = 1, 1
    out = provider.linear(rows, torch.ones(5, 8, 16, dtype=dtype), counts, False, None)
    assert torch.equal(out[:5], torch.full((5, 16), 8, dtype=dtype))
    assert torch.equal(out[5:], torch.zeros(4, 16, dtype=dtype))
    wgrad = provider.wgrad(rows, grad, counts, None)
    assert torch.equal(wgrad, counts.to(dtype)[:, None, None].expand(5, 8, 16))


def test_works_under_grad_mode_and_on_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 4, 3))
    rows = torch.randn(5, 3, requires_grad=True)
    out = grouped.grouped_linear(rows, weight, torch.tensor([2, 3]))
    assert not out.requires_grad
    torch.testing.assert_close(out, plain_linear(rows, weight, [2, 3], False).detach())


def test_unmeasured_types_run_the_loop() -> None:
    assert ("cpu", torch.float64) not in grouped.PROVIDERS
    counts = torch.tensor([1, 2])
    rows, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(grouped.grouped_linear(rows, weight, counts), plain_linear(rows, weight, [1, 2], False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [64, 60])
def test_cuda_bfloat16_aligned_and_not(width: int) -> None:
    counts = torch.tensor([0, 30, 0, 50], device="cuda")
    rows = torch.randn(90, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 128, width, device="cuda", dtype=torch.bfloat16)
    expected = plain_linear(rows, weight, counts.tolist(), False)
    torch.testing.assert_close(grouped.grouped_linear(rows, weight, counts), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(expected)
    wgrad = grouped.grouped_wgrad(rows, grad, counts)
    torch.testing.assert_close(wgrad[1], grad[:30].t() @ rows[:30], rtol=2e-2, atol=2e-2)
    assert wgrad[0].abs().sum() == 0


@pytest.mark.parametrize(("height", "width", "out", "slots", "fits"), [
    (3, 16, 8, 1023, True), (3, 16, 8, 1024, False), (3, 12, 8, 2, False), (3, 16, 12, 2, False), (0, 16, 8, 2, False),
])  # fmt: skip
def test_cuda_product_is_called_for_what_it_takes(height: int, width: int, out: int, slots: int, fits: bool) -> None:
    """Any number of rows per slot, but whole units of 16 bytes a row, and fewer than 1024 slots."""
    rows = torch.zeros(height, width, dtype=torch.bfloat16)
    assert grouped.GROUPED_MM_CUDA.fits(rows, out, slots) == fits
