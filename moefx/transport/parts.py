"""A rank's part of what all ranks have, and the transpose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moefx.layout import Cut, Layout


def part_of(x: Tensor, dim: int, pieces: Sequence[int], n: int, place: int) -> Tensor:
    """The share of place `place` of n of each piece of a dim: a view where there is one piece."""
    return _layout(dim, pieces).take(x, {"axis": n}, {"axis": place})


def padded(part: Tensor, dim: int, pieces: Sequence[int], n: int, place: int) -> Tensor:
    """The transpose: zeros for the shares of other places."""
    shape = list(part.shape)
    shape[dim] *= n
    whole = part.new_zeros(shape)
    _layout(dim, pieces).put(whole, part, {"axis": n}, {"axis": place})
    return whole


def _layout(dim: int, pieces: Sequence[int]) -> Layout:
    return Layout((Cut(dim, ("axis",), tuple(pieces)),))
