"""Every expert puts its rows into zeros of its own, and the zeros are summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.styles import D, E, K, Layer, Stacked


class AddedToOwnZeros(Layer):
    """Rows by index_add; idle experts are skipped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        gates = torch.zeros(rows.shape[0], E).scatter(1, ids, w)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = (ids == e).any(-1).nonzero().squeeze(-1)
            if mine.numel() == 0:
                continue
            out = out + torch.zeros_like(rows).index_add(0, mine, expert(rows[mine]) * gates[mine, e, None])
        return out.view_as(x)


class CopiedToOwnZeros(Stacked):
    """Stacked weights, rows by index_copy, from the number zero."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = 0
        for e in range(E):
            mine, choice = torch.where(ids == e)
            y = F.silu(rows[mine] @ self.up[e]) @ self.down[e] * w[mine, choice, None]
            out = out + torch.zeros_like(rows).index_copy(0, mine, y)
        return out.view_as(x)


class AssignedInOwnZeros(Layer):
    """Masks that are no top-k, over tokens with two axes, rows by assignment."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        out = x
        for e, expert in enumerate(self.experts):
            mask, own = p[..., e] > 0.25, torch.zeros_like(x)
            own[mask] = expert(x[mask]) * p[..., e][mask].unsqueeze(-1)
            out = own + out
        return out


SUM_STYLES = (AddedToOwnZeros, CopiedToOwnZeros, AssignedInOwnZeros)
