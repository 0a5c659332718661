"""Rows for several ranks that hold parts of the same experts: where their copies stand.

`places` places hold different experts, and each of them is `copies` ranks; all-to-alls name ranks place by place. Known
to compiler and runtime alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dump(rows: Tensor, counts: Tensor | None, places: int, copies: int, expert_dim: int) -> Tensor:
    """Every row once for each rank of its place.

    Dropless: rows [P, ..] sorted by expert, counts [E] -> [P * copies, ..]: the rows of a place, `copies` times, then
    those of the next. Rows past the counts stay at the tail. Blocks: counts is None, the experts are on `expert_dim`,
    [.., E, ..] -> [.., E * copies, ..].
    """
    if counts is not None:
        return rows.index_select(0, _sources(counts, rows.shape[0], places, copies))
    dim = expert_dim % rows.dim()
    apart = rows.unflatten(dim, (places, 1, -1))
    return apart.expand(*(copies if i == dim + 1 else -1 for i in range(apart.dim()))).flatten(dim, dim + 2)


def local_combine(rows: Tensor, counts: Tensor | None, places: int, copies: int, expert_dim: int) -> Tensor:
    """The transpose of `dump`: the sum of what came back for a row."""
    if counts is not None:
        targets = _targets(counts, rows.shape[0] // copies, places, copies)
        return rows.index_select(0, targets.flatten()).unflatten(0, (-1, copies)).sum(1)
    dim = expert_dim % rows.dim()
    return rows.unflatten(dim, (places, copies, -1)).sum(dim + 1).flatten(dim, dim + 1)


def dump_counts(traffic: Tensor, places: int, copies: int) -> Tensor:
    """Rows per (source, expert) [n, E] -> rows per (source, slot of every rank) [n, E * copies]."""
    return traffic.unflatten(1, (places, 1, -1)).expand(-1, -1, copies, -1).flatten(1)


def _targets(counts: Tensor, rows: int, places: int, copies: int) -> Tensor:
    """[rows, copies]: where the copies of every row stand. Rows past the counts count as those of one more place."""
    sizes = counts.view(places, -1).sum(1)
    sizes = torch.cat([sizes, rows - sizes.sum(0, keepdim=True)])
    ends = sizes.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    place = torch.searchsorted(ends, row, right=True)
    first = (ends - sizes)[place]
    steps = torch.arange(copies, device=counts.device)
    return (first * (copies - 1) + row)[:, None] + sizes[place][:, None] * steps


def _sources(counts: Tensor, rows: int, places: int, copies: int) -> Tensor:
    """[rows * copies]: of which row each one is a copy."""
    targets = _targets(counts, rows, places, copies).flatten()
    row = torch.arange(rows, device=counts.device).repeat_interleave(copies)
    return torch.empty_like(targets).scatter_(0, targets, row)
