"""What layers do that people published: weights that are all the same, places in a column, views that are added to,
softmaxes written by hand, constant experts, sorted weights that the module keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.block_styles import SoftSlotsOfModules, WidthOfData
from tests.support.styles import D, E, K, Layer, Stacked, mlp


class EqualWeights(Layer):
    """Tokens are hashed by their places; a mask is set where the weight of the choices is positive."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        number = x.shape[0] * x.shape[1]
        places = torch.arange(number)
        chosen = torch.stack([(places * 7 + 3 + choice) % E for choice in range(K)], dim=-1)
        weights = torch.full(chosen.shape, 1 / K, dtype=x.dtype).reshape(number, K)
        chosen = chosen.reshape(number, K)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            weight = (weights * (chosen == e)).sum(-1)
            mine = weight > 0
            out[mine] += expert(rows[mine]) * weight[mine].unsqueeze(-1)
        return out.view_as(x) + 0 * self.router(x).sum()


class PlacesInColumns(Layer):
    """nonzero() of a mask of tokens is [n, 1], and so rows are [n, 1, D]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        most, chosen = self.router(rows).sigmoid().max(dim=1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            places = (chosen == e).nonzero()
            out[places, :] = expert(rows[places, :])
        return (out * most[:, None]).view_as(x)


class AddsToViews(Layer):
    """Every expert adds to a view of its own of what is read as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.view(-1, D), torch.zeros_like(x)
        weights, chosen = self.router(rows).softmax(-1).topk(K)
        gates = torch.zeros(rows.shape[0], E).scatter(-1, chosen, weights)
        for e, expert in enumerate(self.experts):
            mine = gates[:, e] > 0
            out.view(-1, D)[mine] += expert(rows[mine]) * gates[mine, e].unsqueeze(-1)
        return out


class SoftmaxByHand(SoftSlotsOfModules):
    @staticmethod
    def softmax(scores: Tensor, dims: tuple[int, ...]) -> Tensor:
        shares = (scores - scores.amax(dims, keepdim=True)).exp()
        return shares / shares.sum(dims, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bsd,dep->bsep", x, self.scale * self.slots)
        slots = torch.einsum("bsd,bsep->bepd", x, self.softmax(scores, (1,)))
        y = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], dim=1)
        return torch.einsum("bepd,bsep->bsd", y, self.softmax(scores, (2, 3)))


class Constant(nn.Module):
    """MoE++'s constant expert: its token, or a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.gate = nn.Parameter(torch.randn(D)), nn.Linear(D, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        return torch.einsum("n,nd->nd", share[:, 0], x) + torch.einsum("n,d->nd", share[:, 1], self.constant)


class ConstantExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E + 3)
        self.experts = nn.ModuleList([*(mlp() for _ in range(E)), Constant(), Constant(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            tokens, choice = torch.where(chosen == e)
            out.index_add_(0, tokens, expert(rows[tokens]) * weights[tokens, choice, None])
        return out.view_as(x)


class NarrowExperts(ConstantExperts):
    """All that the experts have is small, as adapters' weights are: one of them has nothing."""

    def __init__(self) -> None:
        super().__init__()
        narrow = (nn.Sequential(nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)) for _ in range(E + 2))
        self.experts = nn.ModuleList([*narrow, nn.Identity()])


class KeepsSorted(Stacked):
    """Weights, and the order that sorts them, stay with the module for later use."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).topk(K)
        self.order = chosen.flatten().sort(stable=True)[1]
        self.sorted_weights = weights.softmax(-1).flatten()[self.order]
        ends = torch.bincount(chosen.flatten(), minlength=E).cumsum(0).to(torch.int32)
        tokens = self.order.div(K, rounding_mode="trunc")
        hidden = F.gelu(F.grouped_mm(rows[tokens], self.up, offs=ends))
        out = F.grouped_mm(hidden, self.down, offs=ends) * self.sorted_weights[:, None]
        return torch.zeros_like(rows).index_add(0, tokens, out).view_as(x)


class ActivePairs(Layer):
    """Pairs whose weight is not zero, sorted by expert, cut by counts and put back where they were."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).sigmoid().topk(K)
        flat = weights.reshape(-1)
        active = torch.where(flat != 0)[0]
        experts = chosen.reshape(-1)[active]
        counts = torch.zeros(E, dtype=torch.int64).scatter_add_(0, experts, torch.ones_like(experts))
        places = active[experts.argsort(stable=True)]
        parts = rows[places // K].split(counts.tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts) if part.numel()])
        out, scores = torch.zeros(rows.shape[0] * K, D), torch.zeros(rows.shape[0] * K)
        out[places], scores[places] = y, flat[places]
        return (out * scores[:, None]).view(-1, K, D).sum(1).view_as(x)


class RowsBehindOne(Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K)
        masks = F.one_hot(chosen, E).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            choice, tokens = torch.where(masks[e])
            y = expert(rows.unsqueeze(0)[:, tokens, :].reshape(-1, D)) * weights[tokens, choice].unsqueeze(-1)
            out.index_add_(0, tokens, y)
        return out.view_as(x)


class MaskedTokens(Layer):
    """Every expert gets all tokens, zero where it was not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            weight = (weights * (chosen == e).float()).sum(-1)
            out = out + expert(x * (chosen == e).any(-1).unsqueeze(-1)) * weight.unsqueeze(-1)
        return out


class SortedChoices(Layer):
    """The first columns of sorted scores, and rows that are read and set."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = (each[:, :K] for each in self.router(rows).softmax(-1).sort(-1, descending=True))
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = (chosen == e).nonzero(as_tuple=True)
            out[token] = out[token] + expert(rows[token]) * weights[token, choice].unsqueeze(1)
        return out.view_as(x)


class RankedCapacity(Layer):
    """A full expert keeps the tokens of the highest weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        out, capacity = torch.zeros_like(rows), max(1, int(1.25 * rows.shape[0] / E))
        for e, expert in enumerate(self.experts):
            scores = torch.where(chosen == e, weights, torch.full_like(weights, -1.0))
            kept = (chosen == e) & (scores.argsort(descending=True).argsort() < capacity)
            out[kept] = expert(rows[kept]) * weights[kept].unsqueeze(-1)
        return out.view_as(x)


class DividesAgain(Layer):
    """Weights are divided in every turn of the loop; two maxima instead of a top-k."""

    def forward(self, x: Tensor) -> Tensor:
        rows, out = x.view(-1, D), torch.zeros_like(x.view(-1, D))
        scores = self.router(rows).softmax(-1)
        first = scores.argmax(-1)
        second = scores.masked_fill(F.one_hot(first, E).bool(), 0.0).argmax(-1)
        one, two = (scores.gather(1, chosen[:, None]) for chosen in (first, second))
        for e, expert in enumerate(self.experts):
            for chosen, weight in ((first, one / (one + two)), (second, two / (one + two))):
                mine = chosen == e
                out[mine] += expert(rows[mine]) * weight[mine]
        return out.view_as(x)


class Joined(Layer):
    """All outputs of a token in a row, seen as one for every expert."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        y = torch.cat([expert(x) for expert in self.experts], -1).view(*x.shape[:2], E, D)
        return torch.matmul(gates.unsqueeze(-2), y).squeeze(-2)


class MeanOfExperts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], 2) * gates.unsqueeze(-1)).mean(2)


class ColumnsOfPicked(Layer):
    """Weights are picked by a mask of [B, S] first, then a column of these."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        chosen = scores.topk(K, -1).indices
        gates = (scores + torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)).softmax(-1)
        rows, out = x.view(-1, D), torch.zeros_like(x).view(-1, D)
        for e, expert in enumerate(self.experts):
            mine = (chosen == e).any(-1)
            out[mine.view(-1)] += expert(rows[mine.view(-1)]) * gates[mine][:, e].unsqueeze(1)
        return out.view_as(x)


class ArraysOfEnds(Layer):
    """numpy sums the counts of all experts."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K)
        order = chosen.flatten().argsort()
        ends, parts = chosen.flatten().bincount(minlength=E).cpu().numpy().cumsum(), []
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            mine = order[start:end]
            parts.append(self.experts[e](rows[mine // K]) * weights.flatten()[mine].unsqueeze(1))
        return torch.zeros_like(rows).index_add(0, order // K, torch.cat(parts)).view_as(x)


PUBLISHED_STYLES = (EqualWeights, PlacesInColumns, MaskedTokens, AddsToViews, ActivePairs, RowsBehindOne, SoftmaxByHand,
                    ConstantExperts, NarrowExperts, KeepsSorted, WidthOfData,
                    SortedChoices, RankedCapacity, DividesAgain, Joined, MeanOfExperts, ColumnsOfPicked,
                    ArraysOfEnds)  # fmt: skip
