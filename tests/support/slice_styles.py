"""Mixtures that sort the tokens and give every expert its slice, as people write them: [B, S, D] -> [B, S, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, Chunks, D, E, K, Layer, Stacked


class Geglu(nn.Module):
    """ST-MoE's experts: one half of what comes of the first matrix is the gate of the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(D, 2 * INNER), nn.Linear(INNER, D)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        x, gate = made.chunk(2, dim=-1) if self.how == "chunk" else made.split(INNER, dim=made.dim() - 1)
        return self.down(F.gelu(gate) * x)


class ChunksOfHalves(Chunks):
    """Experts on static blocks that take the last dim apart."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Geglu("chunk") for _ in range(E))


class ChunksSplit(Chunks):
    stacks = True

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Geglu("split") for _ in range(E))


class SlicesOfOrder(Layer):
    """The order is cut by offsets; every expert adds to the output by its own slice of it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        order = chosen.reshape(-1).argsort()
        ends = chosen.reshape(-1).bincount(minlength=E).cumsum(0).tolist()
        token, start = order // K, 0
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = token[start : ends[e]]
            out.index_add_(0, mine, expert(rows[mine]) * weights.reshape(-1)[order[start : ends[e]], None])
            start = ends[e]
        return out.view_as(x)


class Searched(Layer):
    """Offsets by a search among the sorted ids, and slices of the order by numbers that stay tensors."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        in_order, order = chosen.reshape(-1).sort(stable=True)
        bounds = torch.searchsorted(in_order, torch.arange(E + 1))
        ends = torch.searchsorted(in_order, torch.arange(E), right=True)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = order[bounds[e] : bounds[e + 1] if e % 2 else ends[e]]
            out.index_add_(0, mine // K, expert(rows[mine // K]) * weights.reshape(-1)[mine, None])
        return out.view_as(x)


class SplitOrder(Layer):
    """The order is split by counts; tokens are computed from every part."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        ids, order = chosen.flatten().sort(stable=True)
        out = torch.zeros_like(rows)
        for expert, places in zip(self.experts, order.split(torch.bincount(ids, minlength=E).tolist())):
            tokens = places // K
            out = out.index_add(0, tokens, expert(rows[tokens]) * weights.flatten()[places].unsqueeze(-1))
        return out.view_as(x)


class NumpyOffsets(Layer):
    """DeepSeek's way to infer: offsets of numpy, idle experts left out, scatter_add along repeated indices."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        idxs = chosen.view(-1).argsort()
        ends = chosen.view(-1).bincount(minlength=E).cpu().numpy().cumsum(0)
        token_idxs = idxs // K
        out = torch.zeros_like(rows)
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            mine = token_idxs[start:end]
            y = self.experts[i](rows[mine])
            y.mul_(weights.view(-1, 1)[idxs[start:end]])
            out.scatter_add_(0, mine.view(-1, 1).repeat(1, D), y)
        return out.view_as(x)


class NumpyCounts(Layer):
    """Slices of sorted rows by counts of numpy; what idle experts leave out is not concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        order = chosen.view(-1).argsort()
        in_order = rows[order // K]
        parts, start = [], 0
        for i, count in enumerate(chosen.view(-1).bincount(minlength=E).cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            parts.append(self.experts[i](in_order[start:end]))
            start = end
        y = torch.cat(parts) if len(parts) else in_order.new_empty(0)
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).view_as(x)


class RoutingMap(Layer):
    """Megatron's: a map of who chose whom, transposed, selects the numbers of the tokens and their scores."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        weights, chosen = p.topk(K, dim=-1)
        routing_map = torch.zeros_like(p).int().scatter(1, chosen, 1).bool()
        gates = torch.zeros_like(p).scatter(1, chosen, weights)
        by_expert = routing_map.bool().T.contiguous()
        numbers = torch.arange(rows.shape[0], device=rows.device).unsqueeze(0).expand(E, -1)
        token = numbers.masked_select(by_expert)
        parts = torch.split(rows.index_select(0, token), routing_map.sum(0).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        y = y * gates.T.contiguous().masked_select(by_expert).unsqueeze(-1)
        return torch.zeros_like(rows).scatter_add(0, token.unsqueeze(1).expand(-1, D), y).view_as(x)


class PaddedRows(Stacked):
    """torchtitan's loop: what is beyond the sum of all counts is padding, which one device has none of."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).sigmoid().topk(K, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=E, min=0, max=E)
        order = torch.argsort(chosen.view(-1), stable=True)
        index = (order // K).reshape(-1, 1).expand(-1, D)
        routed = torch.gather(rows, 0, index) * weights.view(-1)[order].reshape(-1, 1)
        out = self.one_by_one(routed, counts.int().tolist())
        return torch.zeros_like(rows).scatter_add(0, index, out).view_as(x)

    def one_by_one(self, routed: Tensor, counts: list[int]) -> Tensor:
        padding = routed.shape[0] - sum(counts)
        parts = torch.split(routed[: sum(counts)], split_size_or_sections=counts, dim=0)
        found = [torch.matmul(F.silu(torch.matmul(p, self.up[e])), self.down[e]) for e, p in enumerate(parts)]
        out = torch.cat(found, dim=0)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


class IfAny(PaddedRows):
    """torchtune's: rows are added only if there are any."""

    def one_by_one(self, routed: Tensor, counts: list[int]) -> Tensor:
        parts = torch.split(routed, counts)
        return torch.cat([torch.matmul(F.silu(torch.matmul(p, self.up[e])), self.down[e]) for e, p in enumerate(parts)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).sigmoid().topk(K, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=E, min=0, max=E - 1)
        order = torch.argsort(chosen.view(-1), stable=True)
        index = (order // K).reshape(-1, 1).expand(-1, D)
        routed = torch.gather(rows, 0, index) * weights.view(-1)[order].reshape(-1, 1)
        found, out = self.one_by_one(routed, counts.int().tolist()), torch.zeros_like(rows)
        if found.numel() > 0:
            out.scatter_add_(dim=0, index=index, src=found)
        return out.view_as(x)


class NonzeroScores(PaddedRows):
    """Mod-Squad's: lists of the choices whose scores are not zero."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        probs = self.router(rows).softmax(1)
        top, chosen = probs.topk(K, dim=1)
        top = top / (top.sum(1, keepdim=True) + 1e-6)
        gates = torch.zeros_like(probs).scatter(1, chosen, top)
        top, nonzeros = top.flatten(), top.flatten().nonzero().squeeze(-1)
        order = nonzeros[chosen.flatten()[nonzeros].sort(0)[1]]
        tokens = order.div(K, rounding_mode="trunc")
        y = self.one_by_one(rows[tokens], (gates > 0).long().sum(0).tolist()) * top[order][:, None]
        return torch.zeros_like(rows).index_add(0, tokens, y).view_as(x)


class BinsOfHits(Layer):
    """DeepSeek-MoE's code for inference, in training: counts that end with the last expert that was hit; sums by
    scatter_reduce."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        return self.add_up(rows, ids.view(-1), w.reshape(-1, 1)).view_as(x)

    def add_up(self, rows: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out, order = torch.zeros_like(rows), ids.argsort()
        ends, tokens = ids.bincount().cpu().numpy().cumsum(0), order // K
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            mine = tokens[start:end]
            y = self.experts[e](rows[mine])
            y = y.mul(w[order[start:end]])
            out = out.scatter_reduce(0, mine.view(-1, 1).repeat(1, rows.shape[-1]), y, reduce="sum")
        return out


class UniqueHits(Layer):
    """A loop over the different ids that there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in torch.unique(ids).tolist():
            mask = ids == e
            token = mask.any(-1).nonzero().squeeze(-1)
            weight = (w * mask)[token].sum(-1, keepdim=True)
            out[token] = out[token] + weight * self.experts[e](rows[token])
        return out.view_as(x)


class UniqueItems(Layer):
    """The same by a name, and numbers taken out one by one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out, hit = torch.zeros_like(rows), ids.unique()
        for e in hit:
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e.item()](rows[token]) * w[token, choice, None])
        return out.view_as(x)


SLICE_STYLES = (SlicesOfOrder, Searched, SplitOrder, NumpyOffsets, NumpyCounts, RoutingMap, PaddedRows, IfAny,
                NonzeroScores, ChunksOfHalves, ChunksSplit, BinsOfHits, UniqueHits, UniqueItems)  # fmt: skip


class SomeOfTheRows(PaddedRows):
    """What looks like the sum of all counts leaves out an expert."""

    def one_by_one(self, routed: Tensor, counts: list[int]) -> Tensor:
        counts = counts[:-1]
        return super().one_by_one(routed, counts)


class OtherIfNone(IfAny):
    def one_by_one(self, routed: Tensor, counts: list[int]) -> Tensor:
        found = super().one_by_one(routed, counts)
        return found if found.numel() > 0 else self.up.sum() + routed


SLICE_REFUSALS = {
    SomeOfTheRows: "rows are divided among experts by counts",
    OtherIfNone: "does more than leave it out",
}
