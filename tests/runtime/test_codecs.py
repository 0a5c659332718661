"""Codecs: error bounds, zeros, what is not finite, empty input, exact round trips, and the registry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.errors import ExtensionError, UnsupportedUse
from moefx.transport import codecs, zfp
from moefx.transport.codecs import Codec, codec_named, decode, encode, register_codec

NAMES = ("bf16", "int8", "fp8-e4m3", "fp8-e5m2", "zfp")
IN_BYTES = NAMES[1:]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def there_and_back(rows: torch.Tensor, name: str) -> torch.Tensor:
    payload = encode(rows, name)
    codec = codec_named(name)
    assert payload.dtype is codec.payload_dtype
    assert payload.shape == (rows.shape[0], codec.payload_width(rows.shape[1]))
    assert payload.element_size() * payload.shape[1] == codec.row_bytes(rows.shape[1])
    back = decode(payload, name, rows.shape[1], rows.dtype)
    assert (back.shape, back.dtype) == (rows.shape, rows.dtype)
    return back


@given(st.integers(0, 2**31), st.sampled_from(NAMES), st.sampled_from(DTYPES), st.integers(-30, 30))
@settings(max_examples=100, deadline=None)
def test_errors_are_bounded_by_the_largest_entry_of_the_row(seed, name, dtype, exponent):
    rows = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = (rows * 2.0 ** (exponent if dtype is not torch.float16 else exponent // 4)).to(dtype)
    error = (there_and_back(rows, name).double() - rows.double()).abs()
    # Decoding to a coarse dtype rounds once more, by half a unit of the entry, at worst of a subnormal one.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = (codec_named(name).relative_error + torch.finfo(dtype).eps) * rows.double().abs().amax(1, keepdim=True)
    assert bool((error <= bound * (1 + 1e-6) + tiny).all())


def worst_for_zfp():
    """[16, 16]: in row i all coefficients are off, at the largest unit, such that their errors add up in entry i."""
    inverse = torch.eye(16)
    zfp._along_both_sides(zfp._unlift, inverse)
    off = torch.full((16,), 1.98)  # the unit is 2, and twice that of coefficients of 7 bits
    off[zfp._ORDER[:8]] = 0.99
    coefficients = -inverse.sign() * off
    coefficients[:, 0] = 127.01
    return coefficients @ inverse.t()


def test_the_stated_errors_are_not_generous():
    gaussian = torch.randn(200, 400, generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        rows = worst_for_zfp() if name == "zfp" else gaussian
        error = (there_and_back(rows, name) - rows).abs() / rows.abs().amax(1, keepdim=True)
        stated = codec_named(name).relative_error
        assert 0.5 * stated < error.max() <= stated * (1 + 1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_empty_rows(name, dtype):
    for shape in ((0, 5), (3, 5), (3, 0), (0, 0)):
        rows = torch.zeros(shape, dtype=dtype)
        assert torch.equal(there_and_back(rows, name), rows)
    payload = encode(torch.zeros(2, 4, dtype=dtype), name)
    assert not decode(torch.zeros_like(payload), name, 4, dtype).any()


def test_values_that_can_be_represented_come_back_exactly():
    rows = torch.tensor([[127.0, -64.0, 1.0, 0.0], [0.5, -0.25, 0.0, 0.5 / 127 * 3]])
    rows[1] = torch.tensor([127.0, 3.0, -5.0, 127.0]) * 2.0**-9
    assert torch.equal(there_and_back(rows, "int8"), rows)
    halves = torch.randn(4, 9).bfloat16().float()
    assert torch.equal(there_and_back(halves, "bf16"), halves)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(bad):
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    for name in IN_BYTES:
        found = there_and_back(rows, name)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], there_and_back(rows[[0, 2]], name))
    found = there_and_back(rows, "bf16")
    assert torch.equal(found.isfinite(), rows.isfinite())


@pytest.mark.parametrize("name", IN_BYTES)
def test_numbers_too_large_or_too_small_for_fp32(name):
    large = there_and_back(torch.full((1, 3), 1e300, dtype=torch.float64), name)
    assert large.isnan().all()
    tiny = torch.full((1, 3), 1e-44)
    assert (there_and_back(tiny, name) - tiny).abs().max() <= 1e-44


@pytest.mark.parametrize("name", IN_BYTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(name, dtype):
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    rows = largest * (1 - 0.3 * torch.rand(8, 33, dtype=torch.float64)) * torch.randn(8, 33).sign()
    rows[:, 0] = largest
    assert there_and_back(rows.to(dtype), name).isfinite().all()


def test_zfp_spends_a_byte_an_entry_and_fills_the_last_block():
    """And block by block: what stands in one does not show in another."""
    assert [codec_named("zfp").row_bytes(width) for width in (0, 1, 16, 17, 64)] == [0, 16, 16, 32, 64]
    rows = torch.randn(3, 48)
    loud = rows.clone()
    loud[:, 16:32] *= 1e9
    same = (encode(rows, "zfp") == encode(loud, "zfp")).view(3, 3, 16).all(2)
    assert same.tolist() == [[True, False, True]] * 3


def test_rows_do_not_touch_each_other():
    rows = torch.randn(5, 8)
    rows[2] *= 1e6
    for name in NAMES:
        whole = there_and_back(rows, name)
        assert torch.equal(whole, torch.cat([there_and_back(row, name) for row in rows.split(1)]))


def test_rows_that_are_not_contiguous():
    rows = torch.randn(8, 5).t()
    for name in NAMES:
        assert torch.equal(there_and_back(rows, name), there_and_back(rows.contiguous(), name))


# ---- the registry


def doubled(**changes):
    what = {
        "encode": lambda rows: rows.float() * 2,
        "decode": lambda payload, width, dtype: (payload / 2).to(dtype),
        "payload_dtype": torch.float32,
        "payload_width": lambda width: width,
        "relative_error": 0.0,
    }
    return Codec(**(what | changes))


def test_a_users_codec(monkeypatch):
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    register_codec("doubled", doubled())
    rows = torch.randn(3, 4)
    assert torch.equal(encode(rows, "doubled"), 2 * rows)
    assert torch.equal(there_and_back(rows, "doubled"), rows)
    with pytest.raises(UnsupportedUse, match="there is a codec 'doubled' already"):
        register_codec("doubled", doubled())


@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_codecs_pass_the_trial(name):
    assert codecs._complaint(codec_named(name)) is None


HALF = {"payload_dtype": torch.float16, "decode": lambda payload, width, dtype: payload.to(dtype),
        "relative_error": 2.0**-11}  # fmt: skip


def clamped_half(rows):
    return rows.float().clamp(-65504, 65504).half()


def halved(rows):
    return rows.half()


def with_one_unit(rows):
    """A scale of the whole batch, with every row."""
    unit = (rows.float().abs().amax() if rows.numel() else torch.ones(())).expand(len(rows), 1)
    return torch.cat([rows.float() / unit, unit], 1)


def scaled(safe):
    """Rows over their largest magnitude, and it; `safe`: also where that is zero."""

    def encode(rows):
        unit = rows.float().abs().amax(1, keepdim=True)
        return torch.cat([rows.float() / (unit.where(unit > 0, torch.ones_like(unit)) if safe else unit), unit], 1)

    return {"encode": encode, "payload_width": lambda width: width + 1,
            "decode": lambda payload, width, dtype: (payload[:, :width] * payload[:, width:]).to(dtype)}


def as_bytes(copied):
    """fp32 behind one byte: `copied`, it is moved to where it may be seen as fp32."""

    def decode(payload, width, dtype):
        numbers = payload[:, 1:]
        numbers = numbers.clone(memory_format=torch.contiguous_format) if copied else numbers.contiguous()
        return numbers.view(torch.float32).to(dtype)

    def encode(rows):
        return torch.cat([rows.new_zeros(len(rows), 1).to(torch.uint8), rows.float().view(torch.uint8)], 1)

    return {"encode": encode, "decode": decode, "payload_width": lambda width: 4 * width + 1,
            "payload_dtype": torch.uint8}


@pytest.mark.parametrize(("changes", "message"), [
    ({"encode": lambda rows: rows.bfloat16().float() * 2}, "has a relative error above 0 for rows: "),
    ({"payload_width": lambda width: width + 1}, r"encodes \[0, 8\] to torch.float32\[0, 8\], not \[0, 9\]"),
    ({"payload_width": lambda width: 1.0 * width}, r"the payload_width 8\.0 for rows of 8, not an int"),
    ({"payload_dtype": torch.bfloat16}, "to torch.float32"),
    ({"payload_dtype": "float"}, "the payload_dtype 'float'"),
    ({"relative_error": math.nan}, "the relative_error nan"),
    ({"relative_error": None}, "the relative_error None"),
    ({"decode": lambda payload, width, dtype: payload / 2}, "gives back torch.float32.* for torch.bfloat16"),
    ({"decode": lambda payload, width, dtype: payload.to(dtype) / 2 + 1e-5}, "decodes a payload of zeros to something"),
    (HALF | {"encode": halved}, r"inf of \S+e\+\d\d in a row whose largest magnitude is \S+e\+\d\d\n.*test_codecs"),
    (HALF | {"encode": clamped_half}, r"6.55e\+04 of \S+e\+\d\d in a row"),
    (scaled(safe=False), "nan of 0 in a row whose largest magnitude is 0"),
    (scaled(safe=True) | {"encode": with_one_unit}, "above 0 for rows"),
    ({"decode": lambda payload, width, dtype: (payload.cumsum(0) - payload.cumsum(0).roll(1, 0)).to(dtype)},
     "has a relative error above 0 for rows"),
    (as_bytes(copied=False), r"decode of the codec 'broken' raised RuntimeError: .*divisible by 4.*\n.*codecs.py"),
])
def test_a_codec_that_is_none_is_refused(changes, message):
    with pytest.raises(ExtensionError, match=message):
        register_codec("broken", doubled(**changes))
    with pytest.raises(UnsupportedUse, match="no codec 'broken'"):
        codec_named("broken")


def test_identity_is_no_codec():
    assert codec_named("identity") is None
    with pytest.raises(UnsupportedUse, match="there is a codec 'identity' already"):
        register_codec("identity", doubled())


def test_codecs_that_are_right_are_taken(monkeypatch):
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    register_codec("scaled", doubled(**scaled(safe=True)))
    register_codec("bytes", doubled(**as_bytes(copied=True)))
    rows = torch.randn(3, 5)
    assert torch.equal(there_and_back(rows, "bytes"), rows)
