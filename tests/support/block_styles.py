"""Experts on static blocks [.., E, .., C, D], by einsum or batched products: places of a capacity, all tokens, or the
slots of soft mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, D, E, K, Layer, Stacked


class SwitchCapacity(Stacked):
    """Top-1 with a place for every token by a cumulative sum; what finds no place is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        capacity = 8
        gate, ids = self.router(rows).softmax(-1).max(dim=-1)
        mask = F.one_hot(ids, E)
        place = mask.cumsum(0) * mask - 1
        mask = mask * (place < capacity)
        place = (place * mask).sum(-1)
        sent = mask.to(x.dtype).unsqueeze(-1) * F.one_hot(place, capacity).to(x.dtype).unsqueeze(1)
        blocks = torch.einsum("tec,td->ecd", sent, rows)
        y = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", blocks, self.up).relu(), self.down)
        return torch.einsum("tec,ecd->td", sent * gate[:, None, None], y).view(x.shape)


class ShareOfTokens(Layer):
    """Blocks by matmuls of masks that are written as matrices; the capacity is a factor's share of the tokens."""

    factor = 1.25

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        capacity = int(self.factor * len(rows) * K / E)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        mask = F.one_hot(chosen.t().reshape(-1), E)
        place = mask.cumsum(0) * mask - 1
        sent = F.one_hot(place.clamp(0, capacity - 1), capacity) * (mask * (place < capacity)).unsqueeze(-1)
        sent = sent.view(K, len(rows), E, capacity).to(x.dtype)
        gates = (sent * weights.t()[..., None, None]).sum(0)
        blocks = torch.matmul(sent.sum(0).permute(1, 2, 0), rows)
        y = torch.stack([expert(block) for expert, block in zip(self.experts, blocks)])
        return torch.matmul(gates.view(len(rows), -1), y.view(-1, D)).view(x.shape)


class GShardRows(Stacked):
    """GShard as published: every row of the batch is a group with places of its own."""

    def forward(self, x: Tensor) -> Tensor:
        places = max(2, int(x.shape[1] * 1.5 // E))
        gate, chosen = self.router(x).softmax(-1).max(-1)
        mask = F.one_hot(chosen, E)
        position = (mask.cumsum(1) * mask).sum(-1) - 1
        kept = mask.to(x.dtype) * (position < places).unsqueeze(-1)
        dispatch = torch.einsum("gse,gsc->gsec", kept, self.one_hot(position, places).to(x.dtype))
        combine = dispatch * gate[..., None, None]
        blocks = torch.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = F.relu(torch.einsum("egcm,emh->egch", blocks, self.up))
        y = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, y)

    @staticmethod
    def one_hot(position: Tensor, places: int) -> Tensor:
        return F.one_hot(position.clamp(max=places - 1), places)


class WidthOfData(GShardRows):
    """As many classes as there are tokens of the fullest expert, of which the places are cut; the number of places
    follows from the batch."""

    @staticmethod
    def one_hot(position: Tensor, places: int) -> Tensor:
        width = max(position.max() + 1, places)
        return F.one_hot(position, width)[..., :places]


class EinsumDense(Stacked):
    """Every expert on every token of [B, S, D], by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        top, chosen = logits.topk(K, dim=-1)
        scores = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        hidden = F.gelu(torch.einsum("bsd,edh->bseh", x, self.up))
        return torch.einsum("bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", hidden, self.down), scores)


class BiasOfBlocks(Stacked):
    """Switch by one-hot blocks of a fixed capacity, with the biases in the batched matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, INNER)), nn.Parameter(torch.randn(E, D))

    def forward(self, x: Tensor) -> Tensor:
        rows, capacity = x.reshape(-1, D), 8
        gate, chosen = self.router(rows).softmax(-1).max(dim=-1)
        hot = F.one_hot(chosen, E)
        place = (hot.cumsum(0) - 1) * hot
        kept = hot * (place < capacity)
        dispatch = (kept.unsqueeze(-1) * F.one_hot(place.clamp(max=capacity - 1), capacity)).to(x.dtype)
        h = torch.baddbmm(self.up_bias[:, None], torch.einsum("tec,td->ecd", dispatch, rows), self.up).relu()
        h = torch.baddbmm(self.down_bias[:, None], h, self.down)
        return torch.einsum("tec,ecd->td", dispatch * gate[:, None, None], h).view_as(x)


class SoftSlots(Stacked):
    """A soft mixture: the slots of an expert are means of all tokens of a sequence, and each token is a mean of what
    comes out of all. The biases have a dim for the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(D, E, 2) * 0.3)
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(E, INNER)), nn.Parameter(torch.randn(1, E, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bsd,dep->bsep", x, self.slots)
        slots = torch.einsum("bsd,bsep->bepd", x, scores.softmax(dim=1))
        hidden = F.gelu(torch.einsum("bepd,edh->beph", slots, self.up) + self.up_bias[None, :, None])
        y = torch.einsum("beph,ehd->bepd", hidden, self.down) + self.down_bias
        return torch.einsum("bepd,bsep->bsd", y, scores.flatten(2).softmax(-1).view_as(scores))


class SoftSlotsOfModules(Layer):
    """A soft mixture of a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.scale = nn.Parameter(torch.randn(D, E, 2) * 0.3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        directions = self.scale * F.normalize(self.slots, dim=0)
        scores = torch.einsum("bsd,dep->bsep", F.normalize(x, dim=-1), directions)
        slots = torch.einsum("bsd,bsep->bepd", x, scores.softmax(dim=1))
        y = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], dim=1)
        return torch.einsum("bepd,bsep->bsd", y, scores.flatten(2).softmax(-1).view_as(scores))


class TokensOfAll(Stacked):
    """As Llama 4 was first: every expert gets all tokens by a gather, times sigmoids that are zero if not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        logits = self.router(rows)
        top, ids = logits.topk(K, dim=-1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, top).transpose(0, 1).sigmoid()
        token = torch.arange(len(rows)).view(1, -1).expand(E, -1).reshape(-1, 1).expand(-1, D)
        blocks = (torch.gather(rows, 0, token) * scores.reshape(-1, 1)).view(E, -1, D)
        y = torch.bmm(F.silu(torch.bmm(blocks, self.up)), self.down).view(-1, D)
        return (rows * 0.5).scatter_add_(0, token, y).view_as(x)


BLOCK_STYLES = (SwitchCapacity, GShardRows, EinsumDense, BiasOfBlocks, SoftSlots, SoftSlotsOfModules, TokensOfAll)
