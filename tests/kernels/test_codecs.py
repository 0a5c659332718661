"""Codecs of one byte an entry, against PyTorch's form: the same payload to the bit, and the same rows."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.transport import codecs
from tests.kernels.cases import DEVICE, HAS_TRITON, Case, cases

kernels = importlib.import_module("moefx.runtime.triton_kernels.codecs") if HAS_TRITON else None
KINDS = ("int8", "fp8-e4m3", "fp8-e5m2")
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
MAGNITUDES = (1.0, 2.0**100, 0.0, 2.0**-100)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """To the bit, but for bfloat16: the interpreter cuts digits off where a GPU rounds."""
    assert one.dtype == other.dtype
    digits = 2.0**-7 if one.dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    torch.testing.assert_close(one, other, rtol=digits, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@SETTINGS
@given(cases(), st.booleans())
def test_the_same_payload_and_the_same_rows(kind: str, case: Case, shuffled: bool) -> None:
    rows = case.draw(case.T * case.K, case.D)
    scale = torch.tensor([MAGNITUDES[i % len(MAGNITUDES)] for i in range(len(rows))]).to(DEVICE)
    rows = rows * scale[:, None].to(rows.dtype)
    payload = kernels.encode(rows, kind)
    assert torch.equal(payload, codecs.encode(rows, kind))
    payload = payload.flip(0) if shuffled else payload[1:]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same(kernels.decode(payload, kind, case.D, dtype), codecs.decode(payload, kind, case.D, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_and_every_tie(kind: str) -> None:
    """All numbers that a byte can be, and what is halfway between two of them."""
    places = {"int8": torch.int8, "fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}[kind]
    numbers = torch.arange(256, dtype=torch.uint8).view(places).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= kernels.KINDS[kind][2])].sort().values
    ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    near = torch.cat([ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)]).clamp(numbers[0], numbers[-1])
    rows = torch.cat([near, numbers[-1:]]).view(1, -1).to(DEVICE)  # the largest makes the unit 1
    payload = kernels.encode(rows, kind)
    assert torch.equal(payload, codecs.encode(rows, kind))
    same(kernels.decode(payload, kind, rows.shape[1], torch.float32),
         codecs.decode(payload, kind, rows.shape[1], torch.float32))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_its_neighbours_are_not(kind: str, bad: float) -> None:
    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows[1, 7] = bad
    payload = kernels.encode(rows, kind)
    found = kernels.decode(payload, kind, 40, torch.float32)
    assert found.isnan().sum(1).tolist() == [0, 40, 0]
    same(found, codecs.decode(codecs.encode(rows, kind), kind, 40, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_wider_than_a_tile(kind: str) -> None:
    rows = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    payload = kernels.encode(rows, kind)
    assert torch.equal(payload, codecs.encode(rows, kind))
    same(kernels.decode(payload, kind, 5000, torch.bfloat16), codecs.decode(payload, kind, 5000, torch.bfloat16))
