"""Two levels: each expert is a mixture itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import D, E, K, Layer, Stacked

GROUPS = 3


class Loop(Layer):
    """A mixture of rows [T, D], of no rows as well."""

    def forward(self, rows: Tensor) -> Tensor:
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out


class AllRows(Layer):
    """A mixture whose experts see all rows."""

    def forward(self, rows: Tensor) -> Tensor:
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        gates = torch.zeros(rows.shape[0], E).scatter(1, chosen, weights)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            out = out + gates[:, e : e + 1] * expert(rows)
        return out


class Grouped(Stacked):
    """A mixture by sorted rows."""

    def forward(self, rows: Tensor) -> Tensor:
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=E).cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(rows[order // K], self.up, offs=offs))
        y = F.grouped_mm(hidden, self.down, offs=offs) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // K, y)


class Groups(nn.Module):
    """Every token chooses two groups, and in each of them two experts."""

    def __init__(self, group: type[nn.Module] = Loop) -> None:
        super().__init__()
        self.router = nn.Linear(D, GROUPS)
        self.groups = nn.ModuleList(group() for _ in range(GROUPS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        return self.mixed(rows, weights, chosen).view_as(x)

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for g, group in enumerate(self.groups):
            token, choice = torch.where(chosen == g)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, group(rows[token]) * weights[token, choice, None])
        return out


class GroupsByMask(Groups):
    def __init__(self) -> None:
        super().__init__(AllRows)

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for g, group in enumerate(self.groups):
            mask = (chosen == g).any(-1)
            out[mask] += group(rows[mask]) * ((chosen == g) * weights).sum(-1)[mask].unsqueeze(-1)
        return out


class GroupsOfAllTokens(Groups):
    def __init__(self) -> None:
        super().__init__(Grouped)

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for g, group in enumerate(self.groups):
            out = out + ((chosen == g) * weights).sum(-1, keepdim=True) * group(rows)
        return out


LEVEL_STYLES = (Groups, GroupsByMask, GroupsOfAllTokens)
