"""The codec "zfp": blocks of numbers in a fixed number of bits, after ZFP (Lindstrom, "Fixed-Rate Compressed
Floating-Point Arrays", 2014).

A block is 16 neighbours in one row as 4 x 4, filled up with zeros at the end of the row: rows travel one by one, so a
block of several rows would mix those of different ranks. Each takes 16 bytes: the exponent of its unit, and 120 bits
for the coefficients of ZFP's transform, in multiples of the unit. Those of the 8 lowest sequencies have 8 bits, the
others 7: planes of bits, the coefficients in order of sequency, cut where the budget ends.

ZFP also spends bits on telling which coefficients are small. Here all blocks have the same planes: of rows whose
neighbours are unlike, as the entries of tokens are, that makes the error 1.5 times smaller, of smooth ones far larger.
ZFP's negabinary numbers serve that search alone, so coefficients are signed here. Its steps of integers run in fp32,
where those of the decoder are exact: every device decodes the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 16
_SIDE = 4
_FINE = 8  # coefficients with 8 bits
# Coefficients, 4 y + x, by sequency: x + y, then how far from the diagonal.
_ORDER = sorted(range(BLOCK), key=lambda i: (i // _SIDE + i % _SIDE, (i // _SIDE) ** 2 + (i % _SIDE) ** 2))
_NOT_FINITE = 255  # the exponent of infinity: zeros times it are NaN
# What a coefficient adds to an entry, at most: the inverse of the transform is [4 6 -4 -1; 4 2 4 5; 4 -2 4 -5;
# 4 -6 -4 1] / 4 along each side. A unit is less than 1/63 of the largest coefficient, which is no larger than the
# largest entry; coefficients of 8 bits are off by half a unit, those of 7 by one.
_GAINS = ((1.0, 1.5, 1.0, 0.25), (1.0, 0.5, 1.0, 1.25))
RELATIVE_ERROR = max(
    sum(v[i // _SIDE] * h[i % _SIDE] * (0.5 if place < _FINE else 1.0) for place, i in enumerate(_ORDER))
    for v in _GAINS for h in _GAINS
) / 63  # fmt: skip


def payload_width(width: Any) -> Any:
    """Bytes of a row of `width` entries."""
    return BLOCK * ((width + BLOCK - 1) // BLOCK)


def encode(rows: Tensor) -> Tensor:
    """[N, D] -> uint8 [N, payload_width(D)]. Of a block: its exponent, 8 coefficients of 8 bits, and 7 bytes, each with
    7 bits of a coefficient and one of the last.

    Rows of zeros stay exact. A block with an entry that is not finite, or too large for fp32, comes out all NaN.
    """
    n, width = rows.shape
    padded = rows.new_zeros((n, payload_width(width)), dtype=torch.float32)
    torch.mul(rows, 0.25, out=padded[:, :width])  # so that the sum of two is finite
    numbers = padded.view(-1, BLOCK).t().contiguous()
    _along_both_sides(_lift, numbers)
    numbers = torch.stack([numbers[i] for i in _ORDER])
    numbers[_FINE:] *= 0.5
    ratio = torch.maximum(numbers[:_FINE].abs().amax(0) / 127, numbers[_FINE:].abs().amax(0) / 63)
    # The next power of two: the bits of a ratio are its exponent, and 23 of its mantissa.
    exponent = (((ratio.view(torch.int32) >> 23) & _NOT_FINITE) + 1).clamp_(max=_NOT_FINITE).to(torch.uint8)
    entries = numbers.div_(_unit(exponent)).round_().nan_to_num_(0.0).to(torch.int8).view(torch.uint8)
    packed = (entries[_FINE:-1] << 1) | ((entries[-1:] >> _places(rows)) & 1)
    return torch.cat([exponent.unsqueeze(0), entries[:_FINE], packed]).t().reshape(n, payload_width(width))


def decode(payload: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """uint8 [N, payload_width(D)] -> [N, D] of `dtype`."""
    n = payload.shape[0]
    blocks = payload.reshape(-1, BLOCK).t().contiguous()
    packed = blocks[1 + _FINE :]
    last = ((packed & 1) << _places(payload)).sum(0, keepdim=True, dtype=torch.uint8) << 1
    coarse = torch.cat([packed, last]).view(torch.int8) >> 1
    entries = torch.cat([blocks[1 : 1 + _FINE].view(torch.int8).float(), coarse * 2.0])
    entries = torch.stack([entries[_ORDER.index(i)] for i in range(BLOCK)])
    _along_both_sides(_unlift, entries)
    numbers = (entries * 4).mul_(_unit(blocks[0])).t().reshape(n, payload_width(width))[:, :width]
    return finite(numbers, dtype).contiguous()


def finite(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 -> `dtype`. What is only a little above its largest number becomes that; NaN stays it."""
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return numbers.clamp(-largest, largest).to(dtype)


def _places(like: Tensor) -> Tensor:
    """Of the bits of the last coefficient, [7, 1]."""
    return torch.arange(_FINE - 1, device=like.device, dtype=torch.uint8).unsqueeze(1)


def _unit(exponent: Tensor) -> Tensor:
    """The power of two with this exponent, as fp32 counts them: 0 with 0, and infinity with 255."""
    return (exponent.int() << 23).view(torch.float32)


def _along_both_sides(lift: Any, blocks: Tensor) -> None:
    """blocks: [16, number], changed in place."""
    square = blocks.view(_SIDE, _SIDE, -1)
    lift(*square.unbind(0))
    lift(*square.unbind(1))


def _lift(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> None:
    """ZFP's decorrelating transform, [4 4 4 4; 5 1 -1 -5; -4 4 4 -4; -2 6 -6 2] / 16, in place. Nothing grows."""
    for low, high in ((x, w), (z, y), (x, z), (w, y)):
        low.add_(high).mul_(0.5)
        high.sub_(low)
    w.add_(y, alpha=0.5)
    y.sub_(w, alpha=0.5)


def _unlift(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> None:
    """The inverse of `_lift`, in place."""
    y.add_(w, alpha=0.5)
    w.sub_(y, alpha=0.5)
    for low, high in ((w, y), (x, z), (z, y), (x, w)):
        high.add_(low)
        low.mul_(2).sub_(high)
