"""Layers whose experts take their tokens by places that no mask says: cut lists, pieces of an order, drawn samples."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.styles import D, E, K, Layer

C = 5  # tokens of an expert at most


class Routed(Layer):
    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        return rows, weights, chosen


class FirstOfAList(Routed):
    """A capacity that cuts the list of an expert's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            token, choice = token[:C], choice[:C]
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class FirstOfNonzero(Routed):
    """The same, of one tensor of places, with rows put into what was there."""

    def forward(self, x: Tensor) -> Tensor:
        p, best = self.router(x.reshape(-1, D)).softmax(-1).max(-1)
        rows = x.reshape(-1, D)
        out = rows.clone()
        for e, expert in enumerate(self.experts):
            token = (best == e).nonzero(as_tuple=True)[0][:C]
            out[token] = expert(rows[token]) * p[token, None]
        return out.view_as(x)


class CutCounts(Routed):
    """`tensor_split` of the sorted pairs at cumulated counts."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=E).cumsum(0)[:-1]
        out = torch.zeros_like(rows)
        for pair, expert in zip(order.tensor_split(ends.cpu()), self.experts):
            token = pair // K
            out.index_add_(0, token, expert(rows[token]) * weights.flatten()[pair, None])
        return out.view_as(x)


class ChoiceMajor(Routed):
    """Pairs are numbered choice by choice, then sorted and split."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        flat = chosen.t().flatten()
        order = flat.argsort(stable=True)
        out = torch.zeros_like(rows)
        for pair, expert in zip(order.split(torch.bincount(flat, minlength=E).tolist()), self.experts):
            token = pair % len(rows)
            out.index_add_(0, token, expert(rows[token]) * weights.t().flatten()[pair, None])
        return out.view_as(x)


class Shuffled(Routed):
    """A full expert keeps a sample of its tokens; the rest passes unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        p, best = self.router(x.reshape(-1, D)).softmax(-1).max(-1)
        rows = x.reshape(-1, D)
        out = rows.clone()
        for e, expert in enumerate(self.experts):
            token = (best == e).nonzero()[:, 0]
            token = token[torch.randperm(len(token), device=x.device)[:C]]
            out[token] = expert(rows[token]) * p[token, None]
        return out.view_as(x)


class ExpertsChoose(Routed):
    """Every expert takes its own best tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            score, token = p[:, e].topk(4)
            out = out.index_add(0, token, expert(rows[token]) * score[:, None])
        return out.view_as(x)


class Selected(Routed):
    """Rows by masked_select, put back by masked_scatter."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            w = (weights * (chosen == e)).sum(-1).masked_select(mask)
            mine = expert(rows.masked_select(mask[:, None]).view(-1, D)) * w[:, None]
            out = out + torch.zeros_like(rows).masked_scatter(mask[:, None].expand_as(rows), mine)
        return out.view_as(x)


class Gates(Routed):
    """Gates of minus infinity but for the chosen; rows by columns of nonzeros."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        logits = self.router(rows)
        best, chosen = logits.topk(K, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, chosen, best).softmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = gates[:, e].nonzero()[:, 0]
            out.index_add_(0, token, expert(rows[token]) * gates[token, e, None])
        return out.view_as(x)


class SortedColumns(Routed):
    """Rows from the sorted copy of nonzero(), gates gathered."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        gates = torch.zeros(len(rows), E).scatter(1, chosen, weights)
        where, order = gates.nonzero().sort(0)
        experts = where[:, 1]
        token = gates.nonzero()[order[:, 1], 0]
        counts = (gates > 0).sum(0).tolist()
        mine = torch.gather(gates[token], 1, experts[:, None])
        parts = rows[token].split(counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)]) * mine
        return torch.zeros_like(rows).index_add(0, token, out).view_as(x)


PLACE_STYLES = [FirstOfAList, FirstOfNonzero, CutCounts, ChoiceMajor, Selected, ExpertsChoose, Gates, SortedColumns]
