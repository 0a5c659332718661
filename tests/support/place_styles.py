"""Layers whose experts take their tokens by places that no mask says: cut lists, pieces of an order, drawn samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, D, E, K, Layer

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


class SampledIfFull(Routed):
    """Labml's Switch Transformer: of a full expert's tokens a sample is kept, the rest passes, if there is any."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p, best = self.router(rows).softmax(-1).max(-1)
        tokens = [torch.eq(best, e).nonzero(as_tuple=True)[0] for e in range(E)]
        out = rows.new_zeros(rows.shape)
        capacity = int(len(rows) / E)
        dropped = []
        for e in range(E):
            if len(tokens[e]) <= capacity:
                continue
            tokens[e] = tokens[e][torch.randperm(len(tokens[e]))]
            dropped.append(tokens[e][capacity:])
            tokens[e] = tokens[e][:capacity]
        made = [self.experts[e](rows[tokens[e], :]) for e in range(E)]
        for e in range(E):
            out[tokens[e], :] = made[e]
        if dropped:
            rest = torch.cat(dropped)
            out[rest, :] = rows[rest, :]
        return (out * p.view(-1, 1)).view_as(x)


class BothPlaces(Routed):
    """Added to what stands there, by both results of `where`, cut."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            token, choice = token[:C], choice[:C]
            out[token] += expert(rows[token]) * weights[token, choice, None]
        return out.view_as(x)


class SortedBest(nn.Module):
    """Grouped matmuls of a top-1 router whose ids are [T]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = (nn.Parameter(torch.randn(E, *shape) * 0.2) for shape in ((D, 24), (24, D)))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p, best = self.router(rows).softmax(-1).max(-1)
        order = best.argsort(stable=True)
        ends = torch.bincount(best, minlength=E).cumsum(0).to(torch.int32)
        hidden = torch.nn.functional.gelu(torch._grouped_mm(rows[order], self.up, offs=ends))
        made = torch._grouped_mm(hidden, self.down, offs=ends) * p[order, None]
        return torch.zeros_like(rows).index_copy(0, order, made).view_as(x)


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


class ChoiceFirst(Routed):
    """All first choices stand before all second ones; rows are cut by counts."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        ids = chosen.t().flatten()
        order = ids.argsort(stable=True)
        token = order % rows.shape[0]
        parts = self.cut(rows[token], ids.bincount(minlength=E))
        y = torch.cat([expert(mine) for expert, mine in zip(self.experts, parts)])
        return torch.zeros_like(rows).index_add(0, token, y * weights.t().flatten()[order, None]).view_as(x)

    def cut(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return rows.split(counts.tolist())


class CutRows(ChoiceFirst):
    def cut(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return rows.tensor_split(counts.cumsum(0)[:-1].cpu())


class ChoiceFirstGrouped(nn.Module):
    """Sorts of the same kind with grouped matmuls. back: how the rows come back to their tokens."""

    def __init__(self, back: str = "added") -> None:
        super().__init__()
        self.back, self.router = back, nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, D, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        ids = chosen.t().reshape(-1)
        order = ids.argsort(stable=True)
        ends = ids.bincount(minlength=E).cumsum(0).to(torch.int32)
        mine = rows.repeat(K, 1)[order] if self.back == "put" else rows[order % rows.shape[0]]
        y = F.grouped_mm(F.grouped_mm(mine, self.up, offs=ends).relu(), self.down, offs=ends)
        y = y * weights.t().reshape(-1)[order].unsqueeze(-1)
        if self.back == "added":
            return torch.zeros_like(rows).index_add(0, order % rows.shape[0], y).view_as(x)
        if self.back == "put":
            return torch.empty_like(y).index_copy(0, order, y).view(K, -1, D).sum(0).view_as(x)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return y[inverse].view(K, -1, D).sum(0).view_as(x)


class JoinedPlaces(Routed):
    """Rows of all experts are added at once."""

    def forward(self, x: Tensor) -> Tensor:
        rows, weights, chosen = self.routed(x)
        found = []
        for e, expert in enumerate(self.experts):
            token, choice = (each[:C] for each in torch.where(chosen == e))
            found.append((token, expert(rows[token]), weights[token, choice]))
        tokens, made, scores = map(torch.cat, zip(*found))
        return torch.zeros_like(rows).index_add(0, tokens, made * scores[:, None]).view_as(x)


PLACE_STYLES = [FirstOfAList, FirstOfNonzero, CutCounts, ChoiceMajor, ChoiceFirst, BothPlaces, SortedBest, Selected,
                JoinedPlaces, ExpertsChoose, Gates, SortedColumns, CutRows]  # fmt: skip
