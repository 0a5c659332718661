"""Static blocks of experts as rows: what capacity mode sends, in the form in which dropless rows travel.

E experts, n ranks, C the ranks' capacities. A row has the width of the last dim that is neither the experts' nor the
capacity's (1 if there is none), so that codecs see the same rows as in dropless mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def row_shape(shape: Sequence[int], expert_dim: int, row_dim: int, n: int, *, reverse: bool) -> tuple[int, int]:
    """(rows per pair of ranks and unit of capacity, width of a row) of a tensor of this shape; reverse: of one that is
    on its way back, and has the experts of one rank only."""
    last = width_dim(len(shape), expert_dim, row_dim)
    unit = 1
    for dim, size in enumerate(shape):
        if dim not in (row_dim, last):
            unit = unit * (size // n if dim == expert_dim and not reverse else size)
    return unit, 1 if last is None else shape[last]


def pack(x: Tensor, sizes: Sequence[int], expert_dim: int, row_dim: int, n: int, *, reverse: bool) -> Tensor:
    """[.., E, .., C_own, ..] -> [rows, width], by target rank; reverse: [.., E/n, .., sum(C), ..] by source rank."""
    parts = x.split(list(sizes), row_dim) if reverse else x.chunk(n, expert_dim)
    last = width_dim(x.dim(), expert_dim, row_dim)
    width = 1 if last is None else x.shape[last]
    return torch.cat([_moved(part, last).reshape(-1, width) for part in parts])


def unpack(
    rows: Tensor, shape: Sequence[int], sizes: Sequence[int], expert_dim: int, row_dim: int, *, reverse: bool, rank: int
) -> Tensor:
    """Rows by source rank -> the tensor of `shape`, [.., E/n, .., sum(C), ..]; reverse: by target rank -> [.., E, ..,
    C_own, ..], C_own being that of `rank`."""
    n, block = len(sizes), list(shape)
    if reverse:
        block[expert_dim] //= n
    last = width_dim(len(block), expert_dim, row_dim)
    shapes = []
    for size in [sizes[rank]] * n if reverse else sizes:
        block[row_dim] = size
        shapes.append(list(block) if last is None else [*block[:last], *block[last + 1 :], block[last]])
    parts = rows.split([math.prod(s if last is None else s[:-1]) for s in shapes])
    back = [p.reshape(s) if last is None else p.reshape(s).movedim(-1, last) for p, s in zip(parts, shapes)]
    return torch.cat(back, expert_dim if reverse else row_dim)


def width_dim(dims: int, expert_dim: int, row_dim: int) -> int | None:
    """The dim whose entries make up a row."""
    return max(set(range(dims)) - {expert_dim, row_dim}, default=None)


def _moved(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.movedim(dim, -1)
