"""Codecs: rows in fewer bytes for the wire. What comes out has the dtype and width of what went in.

N rows of width D. A codec may use nothing but the row itself, since rows are scattered between encode and decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import sympy
import torch
from torch import Tensor

from moefx.errors import ExtensionError, UnsupportedUse
from moefx.options import NAMES
from moefx.registered import Registered, check_name
from moefx.transport import zfp

IDENTITY = "identity"
_SCALE_BYTES = 4
_MAGNITUDES = (1.0, 2.0**100, 0.0, 2.0**-100)  # of the rows that a codec is tried on, in turn


@dataclass(frozen=True)
class Codec:
    """encode: rows [N, D] of a floating dtype -> payload [N, payload_width(D)] of `payload_dtype`.
    decode(payload, D, dtype): -> rows [N, D]. A payload of zeros decodes to zeros: rows that stay at home come back so.
    So do rows of zeros.
    relative_error: the largest error of an entry, over the largest magnitude of its row, for magnitudes of 2**-100 to
        2**100. Rows below may become zeros, and bf16 of the largest fp32 numbers is infinite.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int, torch.dtype], Tensor]
    payload_dtype: torch.dtype
    payload_width: Callable[[int], int]
    relative_error: float

    def row_bytes(self, width: int) -> int:
        """Bytes on the wire of one row of `width` entries; a formula if `width` is a symbol."""
        return self.payload_width(width) * self.payload_dtype.itemsize


_CODECS: dict[str, Codec] = {}
NAMES["codec"] = "codec", lambda: (IDENTITY, *_CODECS)


def register_codec(name: str, codec: Codec) -> None:
    """Make a codec known as `name`, on every rank and before compiling.

    It is tried first. Raises ExtensionError if it is not a Codec or does not do what `Codec` says;
    UnsupportedUse for a name that is taken.
    """
    check_name("codec", name)
    if name in _CODECS or name == IDENTITY:
        raise UnsupportedUse(f"there is a codec '{name}' already", hint="give yours another name")
    if not isinstance(codec, Codec):
        raise ExtensionError(f"the codec '{name}' is of type {type(codec).__name__}", hint="give a moefx.extend.Codec")
    codec = replace(
        codec,
        encode=Registered(f"encode of the codec '{name}'", codec.encode, (Tensor,)),
        decode=Registered(f"decode of the codec '{name}'", codec.decode, (Tensor,)),
        payload_width=Registered(f"payload_width of the codec '{name}'", codec.payload_width,
                                 (int, float, torch.SymInt, sympy.Expr)),
    )  # fmt: skip
    complaint = _complaint(codec)
    if complaint:
        raise ExtensionError(f"the codec '{name}' {complaint}", where=codec.encode.line,
                             hint="docs/extending.md shows one that is right")  # fmt: skip
    _CODECS[name] = codec


def codec_named(name: str) -> Codec | None:
    """The codec; None for `identity`, which has nothing to do. Raises UnsupportedUse for an unknown name."""
    if name != IDENTITY and name not in _CODECS:
        raise UnsupportedUse(f"there is no codec '{name}'", hint=f"one of {', '.join((IDENTITY, *_CODECS))}")
    return _CODECS.get(name)


def codec_names() -> tuple[str, ...]:
    """All that do something."""
    return tuple(_CODECS)


def encode(rows: Tensor, codec: str) -> Tensor:
    """Rows [N, D] -> the payload of a codec that is not `identity`."""
    return _CODECS[codec].encode(rows)


def decode(payload: Tensor, codec: str, width: int, dtype: torch.dtype) -> Tensor:
    """The payload of a codec that is not `identity` -> rows [N, width]."""
    return _CODECS[codec].decode(payload, width, dtype)


def _complaint(codec: Codec) -> str | None:
    """What the codec does otherwise than `Codec` says, if anything."""
    if not isinstance(codec.payload_dtype, torch.dtype):
        return f"has the payload_dtype {codec.payload_dtype!r}"
    if not isinstance(codec.relative_error, (int, float)) or not 0 <= codec.relative_error < math.inf:
        return f"has the relative_error {codec.relative_error!r}, not a number from 0"
    generator = torch.Generator().manual_seed(0)
    for n, width in ((0, 8), (1, 1), (5, 8), (3, 33)):
        payload_width = codec.payload_width(width)
        if not isinstance(payload_width, int):
            return f"has the payload_width {payload_width!r} for rows of {width}, not an int"
        magnitudes = torch.tensor([_MAGNITUDES[i % len(_MAGNITUDES)] for i in range(n)]).unsqueeze(1)
        for dtype in (torch.float32, torch.bfloat16):
            rows = (torch.randn((n, width), generator=generator) * magnitudes).to(dtype)
            complaint = _complaint_about(codec, rows, (n, payload_width))
            if complaint:
                return complaint
    return None


def _complaint_about(codec: Codec, rows: Tensor, wanted: tuple[int, int]) -> str | None:
    """What is wrong with what becomes of rows [N, D], in a payload of the wanted shape."""
    payload, (_, width), dtype = codec.encode(rows), rows.shape, rows.dtype
    if payload.dtype != codec.payload_dtype or tuple(payload.shape) != wanted:
        return f"encodes {list(rows.shape)} to {payload.dtype}{list(payload.shape)}, not {list(wanted)}"
    if codec.decode(torch.zeros_like(payload), width, dtype).any():
        return "decodes a payload of zeros to something else"
    for what, sent, expected in (
        ("", payload, rows),
        (" that come in another order", payload.flip(0), rows.flip(0)),
        (" behind others in memory", payload[1:], rows[1:]),
        (" that are encoded alone", codec.encode(rows[1:2]), rows[1:2]),
    ):
        back = codec.decode(sent, width, dtype)
        if back.shape != expected.shape or back.dtype != dtype:
            return f"gives back {back.dtype}{list(back.shape)} for {dtype}{list(expected.shape)}"
        wrong = _wrong_entry(back.double(), expected.double(), codec.relative_error + torch.finfo(dtype).eps)
        if wrong is not None:
            found, entry, largest = wrong
            return (f"has a relative error above {codec.relative_error:.3g} for rows{what}: it makes {found:.3g} of "
                    f"{entry:.3g} in a row whose largest magnitude is {largest:.3g}")  # fmt: skip
    return None


def _wrong_entry(back: Tensor, rows: Tensor, allowed: float) -> tuple[float, float, float] | None:
    """The first entry that is further off than allowed: what it became, what it was, its row's largest magnitude."""
    largest = rows.abs().amax(1, keepdim=True).expand_as(rows)
    wrong = ~((back - rows).abs() <= allowed * largest)  # NaN is wrong, too
    if not wrong.any():
        return None
    return back[wrong][0].item(), rows[wrong][0].item(), largest[wrong][0].item()


def encode_scaled(rows: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """[N, D] -> uint8 [N, D + 4]: entries of `dtype`, of one byte, as multiples of a unit, then this unit (fp32): the
    row's largest magnitude over `largest`, the largest number of `dtype`.

    Rows of zeros stay exact. A row with an entry that is not finite, or too large for fp32, comes out all NaN.
    """
    numbers = rows.float()
    unit = (numbers.abs().amax(1) if rows.shape[1] else numbers.new_zeros(rows.shape[0])) / largest
    usable = ((unit > 0) & unit.isfinite()).unsqueeze(1)
    # In the order x / unit: the reciprocal of a subnormal unit is infinite.
    entries = (numbers / unit.unsqueeze(1).where(usable, 1.0)).where(usable, 0.0)
    if not dtype.is_floating_point:
        entries.round_()
    unit = unit.where(unit.isfinite(), float("nan"))
    unit_bytes = unit.view(torch.uint8).view(rows.shape[0], _SCALE_BYTES)
    return torch.cat([entries.clamp_(-largest, largest).to(dtype).view(torch.uint8), unit_bytes], 1)


def decode_scaled(payload: Tensor, width: int, dtype: torch.dtype, sent: torch.dtype) -> Tensor:
    """uint8 [N, D + 4], entries of the dtype `sent` and their unit -> [N, D] of `dtype`."""
    entries = payload[:, :width].view(sent).float()
    # float32 may only be seen in memory that is aligned for it.
    unit = payload[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return zfp.finite(entries * unit, dtype)


def _scaled(sent: torch.dtype, largest: float, relative_error: float) -> Codec:
    return Codec(
        encode=partial(encode_scaled, dtype=sent, largest=largest),
        decode=partial(decode_scaled, sent=sent),
        payload_dtype=torch.uint8,
        payload_width=lambda width: width + _SCALE_BYTES,
        relative_error=relative_error,
    )


_CODECS |= {
    "bf16": Codec(
        encode=lambda rows: rows.to(torch.bfloat16),
        decode=lambda payload, width, dtype: payload.to(dtype),
        payload_dtype=torch.bfloat16,
        payload_width=lambda width: width,
        relative_error=2.0**-8,  # half a unit in the last of 8 binary places
    ),
    "int8": _scaled(torch.int8, 127.0, 0.5 / 127),
    "fp8-e4m3": _scaled(torch.float8_e4m3fn, 448.0, 16 / 448),  # steps of 32 from 256 on
    "fp8-e5m2": _scaled(torch.float8_e5m2, 57344.0, 4096 / 57344),  # steps of 8192 from 32768 on
    "zfp": Codec(
        encode=zfp.encode,
        decode=zfp.decode,
        payload_dtype=torch.uint8,
        payload_width=zfp.payload_width,
        relative_error=zfp.RELATIVE_ERROR,
    ),
}
