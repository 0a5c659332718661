"""Mixtures of experts as people write them: one small layer each, [B, S, D] -> [B, S, D]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

D, INNER, E, K = 16, 24, 4, 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, INNER), nn.GELU(), nn.Linear(INNER, D))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(mlp() for _ in range(E))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, D, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, D) * 0.3)


class SparseGates(Layer):
    """Softmax over top-k logits among minus infinities; masks of [B, S] and of all tokens; idle experts are skipped by
    a condition on values. The scores may be noisy."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.noise = nn.Linear(D, E) if noisy else None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.noise is not None and self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, chosen = logits.topk(K, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, chosen, top).softmax(-1)
        out = torch.zeros_like(x)
        rows, flat_gates = x.view(-1, x.size(-1)), gates.view(-1, gates.size(-1))
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(dim=-1)
            flat = mask.view(-1)
            if flat.any():
                y = expert(rows[flat]) * flat_gates[flat, e].unsqueeze(1)
                out[mask] += y.squeeze(1)
        return out


class Repeated(Layer):
    """A row for every choice, assigned by masks of the flat ids, then summed over the choices."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1, sorted=False)
        flat = ids.view(-1)
        repeated = rows.repeat_interleave(K, dim=0)
        y = torch.empty_like(repeated)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(repeated[flat == e])
        return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(dim=1).view(x.shape)


class Unbound(Stacked):
    """Stacked weights, one after the other; what the first one gives is cut into gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(E, INNER // 2, D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).sigmoid().topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, (both, down) in enumerate(zip(self.up.unbind(0), self.down.unbind(0))):
            token, choice = torch.where(ids == e)
            gate, up = (rows[token] @ both).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ down
            out = out.index_add(0, token, y * w[token, choice, None])
        return out.view_as(x)


class Counted(Layer):
    """Idle experts are skipped by the number of their tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if mask.sum().item() == 0:
                continue
            token, choice = mask.nonzero(as_tuple=True)
            out.index_add_(0, token, expert(rows[token]) * w[token, choice].unsqueeze(-1))
        return out.view_as(x)


class Dictionary(nn.Module):
    """Experts in a ModuleDict, of other width than the model, over unflattened tokens by index_put_."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleDict({f"expert_{e}": nn.Linear(D, INNER) for e in range(E)})
        self.back = nn.Linear(INNER, D)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = torch.topk(self.router(x), K, dim=-1)
        w = w.softmax(-1)
        out = x.new_zeros(*x.shape[:2], INNER)
        for e, expert in enumerate(self.experts.values()):
            b, s, k = torch.nonzero(ids.eq(e), as_tuple=True)
            out.index_put_((b, s), w[b, s, k, None] * expert(x[b, s]), accumulate=True)
        return self.back(out)


class Masked(Layer):
    """Every expert on every token, weights by comparison as floats."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        w, ids = scores.topk(K, dim=-1)
        out = 0
        for e in range(E):
            gate = ((ids == e).float() * w).sum(dim=-1)
            out = out + gate[..., None] * self.experts[e](x)
        return out


class Where(Layer):
    """Every expert on every token, and torch.where."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = torch.where((ids == e).unsqueeze(-1), w.unsqueeze(-1) * expert(x), out)
        return out


class Pairs(Layer):
    """A row for every choice, filled by (token, choice)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        y = rows.new_zeros(rows.shape[0], K, D)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            y[token, choice] = expert(rows[token])
        return torch.einsum("tkd,tk->td", y, w).view_as(x)


class Collected(Layer):
    """Results are collected in lists and added at once."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        tokens, results = [], []
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            tokens.append(token)
            results.append(expert(rows[token]) * w[token, choice, None])
        return torch.zeros_like(rows).index_add(0, torch.cat(tokens), torch.cat(results)).view_as(x)


class ScatterAdd(Layer):
    """An index for every entry of a row."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            index = token.unsqueeze(-1).expand(-1, D)
            out.scatter_add_(0, index, expert(torch.gather(rows, 0, index)) * w[token, choice, None])
        return out.view_as(x)


class Gathered(nn.Module):
    """The weights of the chosen experts, one copy for every token and choice, and batched matmuls."""

    def __init__(self, top_k: int = K) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(D, E)
        self.up = nn.Parameter(torch.randn(E, D, 2 * INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, D) * 0.3)
        self.bias = nn.Parameter(torch.randn(E, 2 * INNER))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        return self.experts(x, weights, ids)

    def experts(self, x_BSD: Tensor, weights_BSK: Tensor, ids_BSK: Tensor) -> Tensor:
        both = torch.einsum("bsd,bskdf->bskf", x_BSD, self.up[ids_BSK]) + self.bias[ids_BSK]
        gate, up = both.chunk(2, dim=-1)
        y_BSKD = torch.einsum("bskf,bskfd->bskd", F.silu(gate) * up, self.down[ids_BSK])
        return (y_BSKD * weights_BSK.unsqueeze(-1)).sum(2)


class GatheredRows(Gathered):
    """The same with one row for every token and choice."""

    def experts(self, x_BSD: Tensor, weights_BSK: Tensor, ids_BSK: Tensor) -> Tensor:
        flat, rows_TD = ids_BSK.reshape(-1), x_BSD.reshape(-1, D)
        token = torch.arange(rows_TD.shape[0], device=x_BSD.device).repeat_interleave(self.top_k)
        both = torch.baddbmm(self.bias[flat].unsqueeze(1), rows_TD[token].unsqueeze(1), self.up[flat])
        gate, up = both.chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, self.down[flat]).squeeze(1) * weights_BSK.reshape(-1, 1)
        return torch.zeros_like(rows_TD).index_add(0, token, y).view_as(x_BSD)


class GatheredOnce(Gathered):
    """One expert per token, in ids [T]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        gate, ids = self.router(rows).softmax(-1).max(dim=-1)
        both = torch.bmm(rows.unsqueeze(1), self.up[ids]).squeeze(1) + self.bias[ids]
        y = (F.gelu(both[:, ::2] * both[:, 1::2]).unsqueeze(1) @ self.down[ids]).squeeze(1)
        return (y * gate[:, None]).view_as(x)


class Dispatched(Layer):
    """The SparseDispatcher of many papers' code: nonzero gates, sorted, split among the experts, and stitched."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        top, chosen = self.choose(self.router(rows))
        gates = torch.zeros(rows.size(0), E).scatter(1, chosen, top / top.sum(1, keepdim=True))
        by_expert, order = torch.nonzero(gates).sort(0)
        experts = by_expert.split(1, dim=1)[1]
        tokens = torch.nonzero(gates)[order[:, 1], 0]
        parts = torch.split(rows[tokens].squeeze(1), (gates > 0).sum(0).tolist(), dim=0)
        mine = torch.gather(gates[tokens.flatten()], 1, experts)
        stitched = torch.cat([expert(part) for expert, part in zip(self.experts, parts)], 0).mul(mine)
        zeros = torch.zeros(rows.size(0), D, requires_grad=True)
        return zeros.index_add(0, tokens, stitched.float()).view_as(x)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.softmax(1).topk(K, dim=1)


class FirstOfMore(Dispatched):
    """One more than are chosen, as is usual to tell how near the next one came: by the cdf of a normal distribution."""

    def forward(self, x: Tensor) -> Tensor:
        near = Normal(torch.tensor([0.0]), torch.tensor([1.0])).cdf(self.router(x).topk(K + 1)[0][..., K:])
        return super().forward(x) * near

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top, chosen = logits.topk(K + 1, dim=1)
        return torch.softmax(top[:, :K], 1), chosen[:, :K]


class Lists(Layer):
    """Mixtral's and DBRX's first code: tensors are indexed by lists of Python, which was faster."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out, mask = torch.zeros_like(rows), F.one_hot(chosen, E).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            top, tokens = torch.where(mask[e])
            if tokens.shape[0] == 0:
                continue
            top_list, tokens_list = top.tolist(), tokens.tolist()
            y = expert(rows[None, tokens_list].reshape(-1, D)) * weights[tokens_list, top_list, None]
            out.index_add_(0, tokens, y)
        return out.view_as(x)


class CountedOnHost(Layer):
    """Idle experts are skipped by numbers on the host."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        y = torch.zeros_like(rows)
        counts = torch.bincount(chosen.flatten(), minlength=E).tolist()
        for e in range(E):
            if counts[e] == 0:
                continue
            tokens, top = torch.where(chosen == e)
            y[tokens] += self.experts[e](rows[tokens]) * weights[tokens, top, None]
        return y.view_as(x)


class EveryChoice(Layer):
    """One loop over the experts for every choice; the choices may come first or last."""

    outer = True

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, -1)
        out = torch.zeros_like(rows)
        for i in range(K * E):
            k, e = (i // E, i % E) if self.outer else (i % K, i // K)
            mask = chosen[:, k] == e
            out[mask] = out[mask] + self.experts[e](rows[mask]) * weights[mask, k].unsqueeze(-1)
        return out.view_as(x)


class EveryExpert(EveryChoice):
    outer = False


class SwitchLists(Layer):
    """labml's Switch: lists of tokens, all outputs, then all assignments, with full slices."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        gate, routes = torch.max(self.router(rows).softmax(-1), dim=-1)
        lists = [torch.eq(routes, e).nonzero(as_tuple=True)[0] for e in range(E)]
        outputs = [self.experts[e](rows[lists[e], :]) for e in range(E)]
        out = rows.new_zeros(rows.shape)
        for e in range(E):
            out[lists[e], :] = outputs[e]
        return (out * gate.view(-1, 1)).view_as(x)


class NonzeroGates(Layer):
    """The tokens of an expert are those with a weight that is not zero."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        scores = self.router(rows).softmax(-1)
        top, chosen = scores.topk(K, -1)
        gates = torch.zeros_like(scores).scatter_(-1, chosen, top)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            tokens = gates[:, e].nonzero(as_tuple=True)[0]
            if tokens.numel() > 0:
                out[tokens] += expert(rows[tokens]) * gates[tokens, e].unsqueeze(-1)
        return out.view_as(x)


class OneHotScores(Layer):
    """Scores of all experts as a product with one-hot choices."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        top, chosen = self.router(rows).softmax(-1).topk(K, -1)
        scores = torch.einsum("tk,tke->te", top, F.one_hot(chosen, E).to(top.dtype))
        outputs = torch.stack([expert(rows) for expert in self.experts], 1)
        return torch.einsum("te,ted->td", scores, outputs).view_as(x)


class Chunks(Layer):
    """DeepSpeed's experts: each gets its chunk of the blocks; what they make of them is concatenated, or stacked."""

    stacks = False

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        top, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        hot = F.one_hot(chosen, E)
        place = hot.transpose(0, 1).reshape(-1, E).cumsum(0).view(K, -1, E).transpose(0, 1) - 1
        capacity = max(4, math.ceil(1.25 * K * rows.shape[0] / E))
        hot = hot * (place < capacity)
        scores = torch.einsum("tk,tke,tkc->tec", top, hot.to(x.dtype),
                              F.one_hot((place * hot).sum(-1), capacity).to(x.dtype))  # fmt: skip
        blocks = torch.einsum("sec,sm->ecm", scores.bool().type_as(x), rows)
        if self.stacks:
            made = torch.stack([self.experts[e](blocks[e]) for e in range(E)])
        else:
            chunks = blocks.reshape(1, E, -1, D).chunk(E, dim=1)
            made = torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts)], dim=1).reshape(E, -1, D)
        return torch.einsum("sec,ecm->sm", scores, made).view_as(x)


class ChunksStacked(Chunks):
    stacks = True


class MultiHead(nn.Module):
    """Every token is cut in two, whose halves are routed by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D // 2, E)
        self.experts = nn.ModuleList(nn.Linear(D // 2, D // 2) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        rows = x.reshape(b * s * 2, d // 2)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(chosen == e)
            out.index_add_(0, t, expert(rows[t]) * weights[t, k, None])
        return out.reshape(b, s, d)


class ProductKeys(nn.Module):
    """Doge's experts: one neuron each, found by product keys."""

    def __init__(self, keys: int = 4) -> None:
        super().__init__()
        self.keys = keys
        self.router = nn.Linear(D, 2 * keys)
        self.down, self.up = nn.Embedding(keys**2, D), nn.Embedding(keys**2, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        (a, b), (i, j) = self.router(rows).view(-1, 2, self.keys).transpose(0, 1).topk(self.keys, dim=-1)
        scores = (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2)
        top, places = scores.topk(K, dim=-1)
        chosen = (i.unsqueeze(-1) * self.keys + j.unsqueeze(-2)).flatten(-2).gather(-1, places)
        hidden = F.silu(torch.matmul(self.down(chosen), rows.unsqueeze(-1)).squeeze(-1)) * top.softmax(-1)
        return torch.matmul(hidden.unsqueeze(1), self.up(chosen)).squeeze(1).view_as(x)


class OwnIds(Layer):
    """An expert finds its scores by comparing the ids of its own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t = (chosen == e).any(-1).nonzero().squeeze(-1)
            scores = torch.where(chosen[t] == e, weights[t], torch.zeros_like(weights[t])).sum(-1, keepdim=True)
            out.index_add_(0, t, expert(rows[t]) * scores)
        return out.view_as(x)


class OwnMask(Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            if mask.any():
                out[mask] += expert(rows[mask]) * (weights[mask] * (chosen[mask] == e)).sum(-1)[:, None]
        return out.view_as(x)


class ZeroExperts(Layer):
    """The last two experts give back their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E + 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E + 2):
            t, k = torch.where(chosen == e)
            y = self.experts[e](rows[t]) if e < E else rows[t]
            out.index_add_(0, t, y * weights[t, k, None])
        return out.view_as(x)


class ChosenWithoutGradient(Layer):
    """The router runs twice: without gradients to choose, with them to weigh; some scores are masked by a constant."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        with torch.no_grad():
            masked = self.router(rows).softmax(-1) * torch.tensor([1.0, 0.9, 1.1, 1.0])
            masked[masked < 0.05] = -1.0
            ids = masked.topk(K, dim=-1).indices
        weights = self.router(rows).softmax(-1).gather(-1, ids)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class SharedFirst(Layer):
    """Routed experts add to what a shared one gave, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = mlp()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        with torch.autocast("cpu", enabled=False):
            weights, ids = self.router(rows.float()).softmax(-1).topk(K, dim=-1)
        out = self.shared(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out[token] += expert(rows[token]) * weights[token, choice, None]
        return out.view_as(x)


class Pieces(nn.Module):
    """DBRX as published: the weights of all experts as rows of one matrix, viewed, cut to pieces and squeezed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up, self.gate, self.down = (nn.Parameter(torch.randn(E * INNER, D) * 0.3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        weights = weights / torch.norm(weights, p=1, dim=-1, keepdim=True)
        mask = F.one_hot(chosen, num_classes=E).permute(2, 1, 0)
        up, gate, down = ([piece.squeeze(0) for piece in w.view(E, INNER, D).chunk(E, dim=0)]
                          for w in (self.up, self.gate, self.down))  # fmt: skip
        out = torch.zeros_like(rows)
        for e in range(E):
            choice, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            mine = rows[None, token].reshape(-1, D)
            y = (F.silu(mine.matmul(gate[e].t())) * mine.matmul(up[e].t())).matmul(down[e])
            out.index_add_(0, token, y * weights[token, choice, None])
        return out.reshape(x.shape)


class NormedExperts(Pairs):
    """Experts with parameters other than those of matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, INNER), nn.GroupNorm(4, INNER), nn.PReLU(INNER), nn.Linear(INNER, D), nn.PReLU())
            for _ in range(E)
        )


class OwnNumbers(Layer):
    """Rows of an expert times its scale in a buffer, over how many it got, weighed by its share of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(E) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        weights, chosen = p.topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            y = expert(rows[token]) * self.scale[e] / (chosen == e).sum().clamp(min=1)
            out.index_add_(0, token, y * (weights[token, choice] * p[:, e].mean()).unsqueeze(-1))
        return out.view_as(x)


class Table(Layer):
    """Experts stand elsewhere than the router thinks: a table says where."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place_of", torch.arange(E).roll(1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        places, out = self.place_of[chosen], torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(places == e)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


STYLES = (SparseGates, Repeated, Unbound, Counted, Dictionary, Masked, Where, Pairs, Collected, ScatterAdd, Gathered,
          GatheredRows, GatheredOnce, Dispatched, CountedOnHost, Lists, EveryChoice, EveryExpert, SwitchLists,
          NonzeroGates, OneHotScores, OwnIds, OwnMask, ZeroExperts, ChosenWithoutGradient, SharedFirst, Pieces,
          NormedExperts, OwnNumbers, Chunks, ChunksStacked, MultiHead, ProductKeys, Table,
          FirstOfMore)  # fmt: skip
