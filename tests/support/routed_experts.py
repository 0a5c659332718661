"""Experts that are handed a routing, by a router that cannot be captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, D, E, K


class Experts(nn.Module):
    """A loop over experts. Everything that has to do with tokens is an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, D, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, D) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(rows @ self.up[e]) @ self.down[e]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, choice, None])
        return out


class OnTwoAxes(Experts):
    """Tokens [B, S, D], ids and weights [B, S, K]."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x.view(-1, D), ids.view(-1, K), weights.view(-1, K)).view_as(x)


class Sorted(Experts):
    """Grouped matmuls, which say nothing of the width of rows in their types."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        offs = torch.bincount(ids.flatten(), minlength=E).cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(x[order // K], self.up, offs=offs))
        out = F.grouped_mm(hidden, self.down, offs=offs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // K, out)


class HitAlone(Experts):
    """A loop over the experts that are hit."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for hit in mask.sum((-1, -2)).gt(0).nonzero():
            choice, token = torch.where(mask[hit[0]])
            out.index_add_(0, token, self.expert(hit[0], x[token]) * weights[token, choice, None])
        return out


class Gated(Experts):
    """gates [T, E] that are zero for most experts."""

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token = gates[:, e].nonzero()[:, 0]
            out = out.index_add(0, token, self.expert(e, x[token]) * gates[token, e, None])
        return out


class GatedAll(Experts):
    """Every expert computes every token."""

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * gates[:, e, None]
        return out


class Padded(Experts):
    """Nobody for tokens of padding; the mask is turned for every expert anew."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, padding: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where((ids == e) & ~padding.reshape(-1)[:, None])
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, choice, None])
        return out


class Named(nn.ModuleDict):
    """Experts by name, beside a module without parameters, as NLLB has them."""

    def __init__(self) -> None:
        super().__init__({f"expert_{e}": nn.Linear(D, D) for e in range(E)})
        self["drop"] = nn.Dropout(0.0)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self["drop"](self[f"expert_{e}"](x[token]) * weights[token, choice, None]))
        return out


class ByPlace(Experts):
    """Weights are gathered by the ids, which need not be those of experts: -1 would be the last one."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("td,tkdi->tki", x, self.up[ids]))
        return (torch.einsum("tki,tkid->tkd", hidden, self.down[ids]) * weights[..., None]).sum(1)


class Router(nn.Module):
    """[B, S, D], with control flow between router and experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if logits.abs().max().item() > 1e6:
            logits = logits / 2
        weights, ids = logits.softmax(-1).topk(K, dim=-1)
        if isinstance(self.experts, (Gated, GatedAll)):
            gates = torch.zeros_like(logits).scatter(-1, ids, weights)
            return self.experts(x.view(-1, D), gates.view(-1, E)).view_as(x)
        if isinstance(self.experts, OnTwoAxes):
            return self.experts(x, ids, weights)
        padding = {"padding": x[..., 0] > 0.5} if isinstance(self.experts, Padded) else {}
        return self.experts(x.view(-1, D), ids.view(-1, K), weights.view(-1, K), **padding).view_as(x)


ROUTED = (Experts, OnTwoAxes, Sorted, HitAlone, Gated, GatedAll, Padded, Named)
