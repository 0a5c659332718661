"""Experts whose weights are computed before use: merged, normalised, rounded, pruned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.styles import INNER, D, E, K, Layer, Stacked


class Lora(nn.Module):
    """A frozen weight with a trained correction of low rank."""

    def __init__(self, inner: int, outer: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) * 0.3, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inner) * 0.3), nn.Parameter(torch.randn(outer, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.5 * (self.b @ self.a))


class Listed(Layer):
    """A loop over experts of a list."""

    leaves_out_idle = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.expert() for _ in range(E))

    def expert(self) -> nn.Module:
        return nn.Sequential(Lora(D, INNER), nn.SiLU(), Lora(INNER, D))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            if self.leaves_out_idle and token.numel() == 0:
                continue
            out = out.index_add(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class WeightNorm(Listed):
    def expert(self) -> nn.Module:
        norm = parametrizations.weight_norm
        return nn.Sequential(norm(nn.Linear(D, INNER)), nn.SiLU(), norm(nn.Linear(INNER, D), dim=1))


class Pruned(Listed):
    """Parameters times masks in buffers."""

    def expert(self) -> nn.Module:
        expert = nn.Sequential(nn.Linear(D, INNER), nn.SiLU(), nn.Linear(INNER, D))
        prune.random_unstructured(expert[0], "weight", 0.5)
        prune.random_structured(expert[2], "weight", 0.25, dim=0)
        return expert


class Fused(nn.Module):
    """Both projections of a gated expert in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Parameter(torch.randn(2 * INNER, D) * 0.3), nn.Parameter(torch.randn(D, INNER) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both.chunk(2)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), self.down[:, :INNER])


class FusedInOne(Listed):
    def expert(self) -> nn.Module:
        return Fused()


class Quantized(nn.Module):
    """Whole numbers and a scale in buffers, with a trained correction."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer, 1) * 0.01)
        self.a, self.b = nn.Parameter(torch.randn(2, inner) * 0.3), nn.Parameter(torch.randn(outer, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q.float() * self.scale) + F.linear(F.linear(x, self.a), self.b)


class QuantizedBuffers(Listed):
    def expert(self) -> nn.Module:
        return nn.Sequential(Quantized(D, INNER), nn.SiLU(), Quantized(INNER, D))


def ternary(w: Tensor) -> Tensor:
    """BitNet's weights of three values, the gradient passed straight through."""
    scale = w.abs().mean(dim=(-2, -1), keepdim=True).clamp(min=1e-5)
    return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


class TernaryOfOne(Stacked):
    """The weight of an expert is rounded where it is used."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            y = F.silu(rows[token] @ ternary(self.up[e])) @ ternary(self.down[e])
            out.index_add_(0, token, y * weights[token, choice, None])
        return out.view_as(x)


class NormedStack(Stacked):
    """nGPT's rows of unit length, of all experts at once, before a loop."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        up, down = F.normalize(self.up, dim=-1), F.normalize(self.down, dim=1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            out.index_add_(0, token, F.silu(rows[token] @ up[e]) @ down[e] * weights[token, choice, None])
        return out.view_as(x)


class AdaptedStack(Stacked):
    """PEFT's adapters of stacked experts: one matrix of E * r rows, one of E * r columns. The weights are gathered, and
    stand in an einsum of three."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INNER, E * rank, bias=False), nn.Linear(E * rank, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        a, b = self.a.weight.reshape(E, -1, INNER), self.b.weight.reshape(D, -1, E)
        down = self.down + torch.einsum("ore,eri->eio", b, a) * 0.5
        hidden = F.silu(torch.einsum("td,tkdh->tkh", rows, self.up[chosen]))
        return torch.einsum("tkh,tkhd,tk->td", hidden, down[chosen], weights).view_as(x)


class Correction(nn.Module):
    """A parametrization: a product of low rank is added, by one op."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, self.b, self.a, alpha=0.5)


class LoopOverStack(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            y = F.silu(rows[token] @ self.up[e]) @ self.down[e]
            out.index_add_(0, token, y * weights[token, choice, None])
        return out.view_as(x)


class ParametrizedForACall(nn.Module):
    """PEFT's wrapper: the weights of a layer are parametrized while its forward runs, and then no longer."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.layer = LoopOverStack()
        self.a, self.b = nn.Parameter(torch.randn(E, rank, D) * 0.3), nn.Parameter(torch.randn(E, INNER, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.layer, "down", Correction(self.a, self.b))
        try:
            with parametrize.cached():
                return self.layer(x)
        finally:
            parametrize.remove_parametrizations(self.layer, "down", leave_parametrized=False)


class GatheredParts(Stacked):
    """Gathered weights that are scaled and corrected before they meet their token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E) + 0.5)
        self.a, self.b = nn.Parameter(torch.randn(E, D, 2) * 0.3), nn.Parameter(torch.randn(E, 2, INNER) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        up = self.up[chosen] * self.scale[chosen][..., None, None] + self.a[chosen] @ self.b[chosen] * 0.5
        hidden = F.silu(torch.einsum("td,tkdh->tkh", rows, up))
        return torch.einsum("tkh,tkhd,tk->td", hidden, self.down[chosen], weights).view_as(x)


class StackedList(Layer):
    """The weights of a list of experts, stacked where they are used; all experts for every token."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        gates = torch.zeros(rows.shape[0], E).scatter(1, chosen, weights)
        up = torch.stack([expert[0].weight.t() for expert in self.experts])
        down = torch.cat([expert[2].weight for expert in self.experts]).view(E, D, INNER)
        hidden = F.gelu(torch.einsum("td,edh->teh", rows, up))
        return torch.einsum("teh,edh,te->td", hidden, down, gates).view_as(x)


class ReadWhole(Stacked):
    """Statistics of all experts' weights, in the loop and in what the layer gives; arguments by name; DoRA's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E, INNER) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        down = torch.cat(tensors=(self.down[..., :4], self.down[..., 4:]), dim=-1).transpose(dim0=1, dim1=2).mT
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(chosen == e)
            up = self.up[e] / self.up.norm() - self.up.mean(0)
            hidden = F.silu(rows[token] @ up) * (self.scale[e] / self.up[e].norm(dim=0)).view(1, -1)
            out.index_add_(0, token, hidden @ down[e] * weights[token, choice, None])
        return (out + self.up.pow(2).mean()).view_as(x)


class PenaltyOfList(Listed):
    """What the layer stacks of its experts' weights is no weight of experts there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.stack([expert[0].weight for expert in self.experts]).pow(2).mean()


class GatheredTwice(Stacked):
    """A gathered weight that is read by itself and computed with again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        half = self.up[chosen] * self.scale[chosen][:, :, None, None]
        hidden = F.silu(torch.einsum("td,tkdh->tkh", rows, half))
        return torch.einsum("tkh,tkdh,tk->td", hidden, half - self.up[chosen] * 2, weights).view_as(x)


class Heads(Stacked):
    """SwitchHead: values and outputs of attention by one choice of experts; between the two tokens are mixed."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        values = (torch.einsum("bsd,bskdh->bskh", x, self.up[chosen]) * weights[..., None]).sum(2)
        scores = (x @ x.transpose(1, 2)).tril().softmax(-1)
        return (torch.einsum("bsh,bskhd->bskd", scores @ values, self.down[chosen]) * weights[..., None]).sum(2)


class SharedPart(Stacked):
    """Experts that differ from a common weight by their own; on static blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.randn(D, INNER) * 0.3)
        self.scale = nn.Parameter(torch.rand(E) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        gates, chosen = self.router(rows).softmax(-1).max(-1)
        one_hot = F.one_hot(chosen, E)
        place = (one_hot.cumsum(0) - 1) * one_hot
        kept = F.one_hot(place.sum(-1).clamp(max=rows.shape[0] - 1), rows.shape[0]).to(x.dtype)
        put = one_hot.to(x.dtype)[:, :, None] * kept[:, None]
        blocks = torch.einsum("tec,td->ecd", put, rows)
        up = self.common + self.up * self.scale[:, None, None]
        hidden = F.silu(torch.einsum("ecd,edh->ech", blocks, up))
        out = torch.einsum("ech,ehd->ecd", hidden, self.down.softmax(dim=-1))
        return (torch.einsum("tec,ecd->td", put, out) * gates[:, None]).view_as(x)


WEIGHT_STYLES = (Listed, WeightNorm, Pruned, FusedInOne, QuantizedBuffers, TernaryOfOne, NormedStack, AdaptedStack,
                 ParametrizedForACall, GatheredParts, StackedList, ReadWhole, PenaltyOfList, GatheredTwice, Heads,
                 SharedPart)  # fmt: skip
