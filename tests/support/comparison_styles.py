"""Layers that say in other words which tokens an expert has, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.styles import D, E, K, Layer


class Compared(Layer):
    """A loop whose masks are made by `compare(ids, expert)`."""

    def __init__(self, compare: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.compare = compare

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(self.compare(chosen, e))
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class Weighed(Layer):
    """All experts compute all tokens; `weigh(weights, ids, expert)` is zero [T] where a token did not choose one."""

    def __init__(self, weigh: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            out = out + expert(rows) * self.weigh(weights, chosen, e)[:, None]
        return out.view_as(x)


class Read(Layer):
    """`read(weights, ids, tokens, expert)` are the scores of the tokens that chose an expert."""

    def __init__(self, read: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = torch.where((chosen == e).any(-1))[0]
            out.index_add_(0, token, expert(rows[token]) * self.read(weights, chosen, token, e)[:, None])
        return out.view_as(x)


MASKS = {
    "isin": lambda ids, e: torch.isin(ids, torch.tensor([e])),
    "difference": lambda ids, e: (ids - e) == 0,
    "not other": lambda ids, e: ~(ids != e),
    "between": lambda ids, e: (ids >= e) & (ids < e + 1),
    "of all": lambda ids, e: (ids[..., None] == torch.arange(E))[..., e],
    "distance": lambda ids, e: (ids - e).abs() < 0.5,
    "exclusive or": lambda ids, e: (ids ^ e) == 0,
}
WEIGHTS = {
    "in double": lambda w, ids, e: (w * (ids == e).double()).sum(-1).to(w.dtype),
    "one by one": lambda w, ids, e: sum(w[:, k] * (ids[:, k] == e) for k in range(K)),
    "filled": lambda w, ids, e: w.masked_fill(ids != e, 0).sum(-1),
    "einsum": lambda w, ids, e: torch.einsum("tk,tk->t", w, (ids == e).to(w.dtype)),
    "product": lambda w, ids, e: ((ids == e).to(w.dtype)[:, None] @ w[..., None]).view(-1),
}
READS = {
    "compared there": lambda w, ids, t, e: (w[t] * (ids[t] == e)).sum(-1),
    "largest": lambda w, ids, t, e: torch.where(ids[t] == e, w[t], 0).amax(-1),
    "of a column": lambda w, ids, t, e: torch.zeros(len(w), E).scatter(1, ids, w)[:, e].index_select(0, t),
    "picked": lambda w, ids, t, e: w[t].masked_select(ids[t] == e),
}


def of_all(kind: type[nn.Module], ways: dict[str, Callable]) -> nn.Module:
    """A layer for each way, one behind the other."""
    return nn.Sequential(*map(kind, ways.values()))
