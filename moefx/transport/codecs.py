"""Codecs: rows in fewer bytes for the wire. What comes out has the dtype and width of what went in.

N rows of width D. A codec may use nothing but the row itself, since rows are scattered between encode and decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefx.errors import UnsupportedUse

IDENTITY = "identity"
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """encode: rows [N, D] of a floating dtype -> payload [N, payload_width(D)] of `payload_dtype`.
    decode(payload, D, dtype): -> rows [N, D]. A payload of zeros decodes to zeros: rows that stay at home come back so.
    relative_error: the largest error of an entry, over the largest magnitude of its row.
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


def register_codec(name: str, codec: Codec) -> None:
    """Make a codec known as `name`, on every rank and before compiling.

    It is tried first. Raises UnsupportedUse if it does not do what `Codec` says, and for a name that is taken.
    """
    if name in _CODECS or name == IDENTITY:
        raise UnsupportedUse(f"there is a codec '{name}' already", hint="give yours another name")
    complaint = _complaint(codec)
    if complaint:
        raise UnsupportedUse(f"the codec '{name}' {complaint}")
    _CODECS[name] = codec


def codec_named(name: str) -> Codec | None:
    """The codec; None for `identity`, which has nothing to do. Raises UnsupportedUse for an unknown name."""
    if name != IDENTITY and name not in _CODECS:
        raise UnsupportedUse(f"there is no codec '{name}'", hint=f"one of {', '.join((IDENTITY, *_CODECS))}")
    return _CODECS.get(name)


def encode(rows: Tensor, codec: str) -> Tensor:
    """Rows [N, D] -> the payload of a codec that is not `identity`."""
    return _CODECS[codec].encode(rows)


def decode(payload: Tensor, codec: str, width: int, dtype: torch.dtype) -> Tensor:
    """The payload of a codec that is not `identity` -> rows [N, width]."""
    return _CODECS[codec].decode(payload, width, dtype)


def _complaint(codec: Codec) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((0, 8), (1, 1), (5, 8), (3, 33)):
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.randn(shape, generator=generator).to(dtype)
            payload = codec.encode(rows)
            wanted = (shape[0], codec.payload_width(shape[1]))
            if payload.dtype != codec.payload_dtype or tuple(payload.shape) != wanted:
                return f"encodes {list(shape)} to {payload.dtype}{list(payload.shape)}, not {list(wanted)}"
            back = codec.decode(payload, shape[1], dtype)
            if back.shape != rows.shape or back.dtype != dtype:
                return f"gives back {back.dtype}{list(back.shape)} for {dtype}{list(shape)}"
            if codec.decode(torch.zeros_like(payload), shape[1], dtype).any():
                return "decodes a payload of zeros to something else"
            rounding = torch.finfo(dtype).eps  # decode rounds to `dtype`, too
            error, size = (back.double() - rows.double()).abs(), rows.double().abs().amax(1, keepdim=True)
            if bool((error > (codec.relative_error + rounding) * size).any()):
                return f"has a relative error above {codec.relative_error:.3g}"
    return None


def encode_int8(rows: Tensor) -> Tensor:
    """[N, D] -> uint8 [N, D + 4]: entries as multiples of the row's largest magnitude over 127, then this unit (fp32).

    Rows of zeros stay exact. A row with an entry that is not finite, or too large for fp32, comes out all NaN.
    """
    numbers = rows.float()
    unit = (numbers.abs().amax(1) if rows.shape[1] else numbers.new_zeros(rows.shape[0])) / 127
    usable = ((unit > 0) & unit.isfinite()).unsqueeze(1)
    # In the order x / unit: the reciprocal of a subnormal unit is infinite.
    whole = (numbers / unit.unsqueeze(1).where(usable, 1.0)).where(usable, 0.0).round_().clamp_(-127, 127)
    unit = unit.where(unit.isfinite(), float("nan"))
    unit_bytes = unit.view(torch.uint8).view(rows.shape[0], _SCALE_BYTES)
    return torch.cat([whole.to(torch.int8).view(torch.uint8), unit_bytes], 1)


def decode_int8(payload: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """uint8 [N, D + 4] -> [N, D] of `dtype`."""
    whole = payload[:, :width].view(torch.int8)
    # float32 may only be seen in memory that is aligned for it.
    unit = payload[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (whole * unit).to(dtype)


register_codec(
    "bf16",
    Codec(
        encode=lambda rows: rows.to(torch.bfloat16),
        decode=lambda payload, width, dtype: payload.to(dtype),
        payload_dtype=torch.bfloat16,
        payload_width=lambda width: width,
        relative_error=2.0**-8,  # half a unit in the last of 8 binary places
    ),
)
register_codec(
    "int8",
    Codec(
        encode=encode_int8,
        decode=decode_int8,
        payload_dtype=torch.uint8,
        payload_width=lambda width: width + _SCALE_BYTES,
        relative_error=0.5 / 127,
    ),
)
