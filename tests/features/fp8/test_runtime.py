"""Products in fp8 against their meaning, an error bound, and what torch's product on CUDA asks of its arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefx.features.fp8 import ops, runtime

SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
MAGNITUDES = (1.0, 2.0**60, 0.0, 2.0**-60, 2.0**-130)


def operands(counts: list[int], rest: int, transposed: bool, biased: bool, dtype: torch.dtype) -> tuple:
    """rows [R, 32] and weight [S, 16, 32] whose rows have all magnitudes, counts, and a bias."""
    seed, slots, height = torch.Generator().manual_seed(sum(counts)), len(counts), sum(counts) + rest
    size = torch.tensor([MAGNITUDES[i % len(MAGNITUDES)] for i in range(max(height, 16))])
    rows = torch.randn(height, 32, generator=seed) * size[:height, None]
    weight = torch.randn(slots, 16, 32, generator=seed) * size[:16, None]
    weight = weight.to(dtype).transpose(1, 2).contiguous() if transposed else weight.to(dtype)
    bias = torch.randn(slots, 16, generator=seed).to(dtype) if biased else None
    return rows.to(dtype), weight, torch.tensor(counts), bias


@SETTINGS
@given(COUNTS, st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_it_is_what_the_op_means(counts: list[int], rest: int, transposed: bool, biased: bool, dtype: torch.dtype):
    rows, weight, sizes, bias = operands(counts, rest, transposed, biased, dtype)
    found = runtime.scaled_linear(rows, weight, sizes, transposed=transposed, bias=bias)
    meant = torch.ops.moefx.scaled_linear(rows, weight, sizes, transposed, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, meant, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
    assert not found[sum(counts) :].any()


@SETTINGS
@given(COUNTS, st.booleans())
def test_every_entry_is_off_by_a_sixteenth_of_itself_at_most(counts: list[int], transposed: bool):
    """Or by half of the least number that the row's scale leaves."""
    rows, weight, sizes, _ = operands(counts, 0, transposed, False, torch.float64)
    found = runtime.scaled_linear(rows, weight, sizes, transposed=transposed)
    matrices = (weight.transpose(1, 2) if transposed else weight).repeat_interleave(sizes, 0)
    off = [torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) * 2.0**-10 / 448) for x in (rows, matrices)]
    bound = torch.einsum("ri,roi->ro", rows.abs(), off[1]) + torch.einsum("ri,roi->ro", off[0], matrices.abs() + off[1])
    error = (found - torch.einsum("ri,roi->ro", rows, matrices)).abs()
    assert (error <= bound * (1 + 1e-5) + 1e-37).all()


def test_rows_that_are_matrices():
    rows, weight = torch.randn(3, 2, 16), torch.randn(2, 32, 16)
    found = runtime.scaled_linear(rows, weight, torch.tensor([1, 2]))
    flat = runtime.scaled_linear(rows.flatten(0, 1), weight, torch.tensor([2, 4]))
    assert torch.equal(found, flat.view(3, 2, 32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_with_its_row(bad: float):
    rows, weight = torch.randn(3, 16), torch.randn(1, 32, 16)
    rows[1, 3] = bad
    assert runtime.scaled_linear(rows, weight, torch.tensor([3])).isnan().sum(1).tolist() == [0, 32, 0]
    weight[0, 5, 0] = bad
    assert runtime.scaled_linear(rows[:1], weight, torch.tensor([1])).isnan()[0].nonzero().tolist() == [[5]]


def like_torch(a: Tensor, b: Tensor, scale_a: Tensor, how_a: object, scale_b: Tensor, how_b: object, *, offs: Tensor,
               output_dtype: torch.dtype) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_grouped_mm with a scale per row, with what its CUDA form checks (torch 2.13,
    ATen/native/cuda/GroupedBlas.cpp and GroupedMMUtils.h). Rows past the last end are not written."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert how_a is how_b is torch.nn.functional.ScalingType.RowWise
    assert (a.dim(), b.dim()) == (2, 3)
    assert a.shape[1] == b.shape[1]
    assert all(size % 16 == 0 for size in (a.shape[1], *b.shape[1:]))
    assert a.stride(1) == 1 and a.stride(0) >= a.shape[1]  # noqa: PT018  by rows
    assert b.stride(1) == 1 and b.stride(2) >= b.shape[1]  # noqa: PT018  by columns
    assert a.stride(0) % 16 == b.stride(2) % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.is_contiguous() and scale_b.stride(1) == 1  # noqa: PT018
    assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (b.shape[0], b.shape[2]))
    assert (offs.dtype, offs.shape, output_dtype) == (torch.int32, b.shape[:1], torch.bfloat16)
    out = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.bfloat16)
    start = 0
    for slot, end in enumerate(offs.tolist()):
        product = a[start:end].float() @ b[slot].float()
        out[start:end] = product * scale_a[start:end, None] * scale_b[slot]
        start = end
    return out


@SETTINGS
@given(COUNTS, st.integers(0, 2), st.booleans(), st.booleans())
def test_torchs_product_is_called_as_it_wants_and_gives_the_same(
    counts: list[int], rest: int, transposed: bool, biased: bool
):
    rows, weight, sizes, bias = operands(counts, rest, transposed, biased, torch.bfloat16)
    scaled = runtime.scaled(rows), runtime.scaled(weight.transpose(1, 2) if transposed else weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.F, "scaled_grouped_mm", like_torch, raising=False)
        found = runtime.by_torch(*scaled, sizes, bias)
    meant = runtime.by_parts(*scaled, sizes, bias)
    # Two roundings where the meaning has none: of the product, and of its sum with the bias.
    product = runtime.by_parts(*scaled, sizes, None)
    assert ((found.float() - meant).abs() <= 2**-8 * (1.01 * product.abs() + meant.abs()) + 1e-37).all()


def test_the_meaning_knows_fp8_as_the_runtime_does():
    assert ops.FP8 is runtime.FP8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    rows, weight, sizes, bias = operands([5, 0, 30], 2, False, True, torch.bfloat16)
    found = runtime.scaled_linear(*(each.cuda() for each in (rows, weight, sizes)), bias=bias.cuda())
    meant = runtime.scaled_linear(rows, weight, sizes, bias=bias)
    torch.testing.assert_close(found.cpu(), meant, rtol=2**-6, atol=2**-6)
