"""Mixtures without a plain top-k: tokens picked by thresholds, capacities, padding; or all tokens for all experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, D, E, K, Layer, mlp


class Threshold(Layer):
    """Every expert with a probability above a bound."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = (p[:, e] > 0.25).nonzero(as_tuple=True)[0]
            out.index_add_(0, token, expert(rows[token]) * p[token, e, None])
        return out.view_as(x)


class TopP(nn.Module):
    """As many experts as make up a share of the probability; stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.Parameter(torch.randn(E, D, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, D) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        best, order = p.sort(-1, descending=True)
        chosen = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, best.cumsum(-1) - best < 0.6)
        weights = p * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for e in range(E):
            token = torch.where(chosen[:, e])[0]
            y = F.silu(rows[token] @ self.up[e]) @ self.down[e]
            out = out.index_add(0, token, y * weights[token, e].unsqueeze(1))
        return out.view_as(x)


class ReluRouter(Layer):
    """ReMoE: experts with a positive gate, found by nonzero of the gates themselves."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        gates = self.router(rows).relu()
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = gates[:, e].nonzero().squeeze(-1)
            out = out.index_add(0, token, expert(rows[token]) * gates[token, e].unsqueeze(1))
        return out.view_as(x)


class OneColumn(Layer):
    """The gates of a choice, or of an expert, as columns that stay columns."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                mine = chosen[:, k] == e
                out[mine] += weights[mine, k : k + 1] * expert(rows[mine])
        return out.view_as(x)


class ColumnOfPicked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        gates = torch.zeros(rows.shape[0], E).scatter(1, chosen, weights)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = (chosen == e).any(-1)
            out[mine] += expert(rows[mine]) * gates[mine][:, e : e + 1]
        return out.view_as(x)


class Padding(Layer):
    """No expert for tokens of padding; sums over the choices as scores."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        real = rows[:, 0] > 0
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1) & real
            if mask.any():
                out[mask] += expert(rows[mask]) * ((chosen == e) * weights).sum(-1)[mask, None]
        return out.view_as(x)


class PaddingOfPairs(Layer):
    """The mask is turned for every expert anew."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        padding = rows[:, 0] <= 0
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where((chosen == e) & ~padding[:, None])
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


class CapacityByCumsum(Layer):
    """The first tokens of every expert, whichever choice they are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            mask = mask & (mask.cumsum(0) <= 5)
            out[mask] = out[mask] + expert(rows[mask]) * ((chosen == e) * weights).sum(-1)[mask, None]
        return out.view_as(x)


class FirstOfEvery(Layer):
    """makeMoE with a capacity: the first places of every expert's tokens; gates of [.., E]."""

    def forward(self, x: Tensor) -> Tensor:
        top, chosen = self.router(x).topk(K, dim=-1)
        gates = torch.full((*x.shape[:-1], E), float("-inf")).scatter(-1, chosen, top).softmax(-1)
        rows, flat = x.view(-1, D), gates.view(-1, E)
        capacity = int(rows.shape[0] * K / E * 0.8)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mine = torch.nonzero((chosen == e).any(dim=-1).view(-1)).squeeze(-1)
            token = mine[:capacity] if mine.numel() > capacity else mine
            if token.numel() > 0:
                out.index_add_(0, token, expert(rows[token]) * flat[token, e].unsqueeze(1))
        return out.view_as(x)


class SwitchDropsPass(Layer):
    """Switch Transformers of old: one-hot ids cut by a capacity per row of the batch; dropped tokens pass unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        one_hot = F.one_hot(p.argmax(-1), E)
        one_hot = one_hot * (one_hot.cumsum(-2) <= 3)
        out = x.clone()
        for e, expert in enumerate(self.experts):
            mine = one_hot[:, :, e].bool()
            out[mine] = expert(x[mine])
        return p.max(-1).values.unsqueeze(-1) * out


class LastOneStands(Layer):
    """Rows of several experts are put at one place: the last one's stay."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = p[:, e] > 0.25
            out[mask] = expert(rows[mask]) * p[mask, e, None]
        return out.view_as(x)


class TwoRouters(Layer):
    """Tokens that either of two routers gives an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(D, E)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p, q = self.router(rows).softmax(-1), self.second(rows).softmax(-1)
        a, b = p.argmax(-1), q.argmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask, weight = (a == e) | (b == e), p[:, e] + q[:, e]
            out[mask] += expert(rows[mask]) * weight[mask, None]
        return out.view_as(x)


class OneHotCapacity(Layer):
    """Top-2 one-hot blocks with a capacity for every choice, summed to masks and gates [T, E]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        one_hot = F.one_hot(chosen, E)
        kept = one_hot * (one_hot.cumsum(0) <= 4)
        picked, gates = kept.sum(1).bool(), (kept * weights.unsqueeze(-1)).sum(1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token = torch.nonzero(picked[:, e]).squeeze(-1)
            out = out.index_add(0, token, expert(rows[token]) * gates[token, e].unsqueeze(1))
        return out.view_as(x)


class AllExperts(Layer):
    """A softmax over all experts."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1).split(1, dim=-1)
        return sum(gate * expert(x) for gate, expert in zip(gates, self.experts))


class InfinitiesOut(Layer):
    """Scores outside of the top-k are minus infinity; every expert computes every token."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        least = scores.topk(K, dim=-1).values[..., -1:]
        gates = scores.masked_fill(scores < least, float("-inf")).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], -2) * gates.unsqueeze(-1)).sum(-2)


class SwitchOfSequences(Layer):
    """Switch without a capacity, on [B, S, D]: masks are columns of the one-hot choices."""

    def forward(self, x: Tensor) -> Tensor:
        gate, best = self.router(x).softmax(-1).max(-1)
        chosen, out = F.one_hot(best, E), x.clone()
        for e, expert in enumerate(self.experts):
            token = chosen[:, :, e].bool()
            out[token] = expert(x[token])
        return gate.unsqueeze(-1) * out


class LengthsOfLists(Layer):
    """labml's Switch with its balance loss: the lengths of the lists of tokens are its counts."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        p = self.router(rows).softmax(-1)
        gate, routes = p.max(-1)
        lists = [torch.eq(routes, e).nonzero(as_tuple=True)[0] for e in range(E)]
        out = rows.new_zeros(rows.shape)
        for tokens, expert in zip(lists, self.experts):
            out[tokens, :] = expert(rows[tokens, :])
        return (out * gate.view(-1, 1) * (1 + self.balance(rows, lists, p.mean(0)))).view_as(x)

    def balance(self, rows: Tensor, lists: list[Tensor], share: Tensor) -> Tensor:
        counts = rows.new_tensor([len(tokens) for tokens in lists])
        return E * (counts / counts.sum() * share).sum()


class LengthsAsNumbers(LengthsOfLists):
    def balance(self, rows: Tensor, lists: list[Tensor], share: Tensor) -> Tensor:
        return sum(share[e] * len(tokens) for e, tokens in enumerate(lists)) / len(rows)


class TwoTasks(Layer):
    """PLE: two mixtures, each with experts of its own besides those that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.ModuleList(mlp() for _ in range(E)) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(D, 2 * E) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared, out = [expert(x) for expert in self.experts], x
        for gate, own in zip(self.gates, self.own):
            every = torch.stack(shared + [expert(x) for expert in own], dim=-2)
            out = out + (every * gate(x).softmax(-1).unsqueeze(-1)).sum(-2).tanh()
        return out


class TwoGates(Layer):
    """MMoE as libraries of recommenders write it: every task weighs the same outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(D, E), nn.Softmax(dim=1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        every = torch.cat([expert(rows).unsqueeze(1) for expert in self.experts], dim=1)
        first, second = [torch.bmm(gate(rows).unsqueeze(1), every).squeeze(1) for gate in self.gates]
        return (first.tanh() + second).view_as(x)


class TwoGatesBehind(TwoGates):
    """The same on [B, S, D], with the experts on the last axis, or in front of it."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [expert(x) for expert in self.experts]
        first, second = [gate[0](x).softmax(-1) for gate in self.gates]
        last = torch.cat([y[..., None] for y in outputs], dim=-1) @ first[..., None]
        return last.squeeze(-1).tanh() + (torch.cat([y[:, :, None] for y in outputs], 2) * second.unsqueeze(-1)).sum(2)


class Normed(TwoGates):
    """Statistics of an expert's rows, which all tokens have a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(mlp(), nn.BatchNorm1d(D)) for _ in range(E))


class NormedTop(Normed):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            out = out + expert(rows) * (weights * (chosen == e)).sum(-1, keepdim=True)
        return out.view_as(x)


class SharedWeight(Layer):
    """The first matrix belongs to all experts."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert[0].weight = self.experts[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, choice, None])
        return out.view_as(x)


def switch_transformers() -> nn.Module:
    from transformers.models.switch_transformers import modeling_switch_transformers as model

    config = model.SwitchTransformersConfig(d_model=D, d_ff=INNER, num_experts=E, expert_capacity=3,
                                            router_jitter_noise=0.0, dropout_rate=0.0)  # fmt: skip
    return model.SwitchTransformersSparseMLP(config)


def nllb_moe() -> nn.Module:
    from transformers.models.nllb_moe import modeling_nllb_moe as model

    config = model.NllbMoeConfig(d_model=D, num_experts=E, expert_capacity=3, activation_dropout=0.0,
                                 moe_token_dropout=0.0, second_expert_policy="all")  # fmt: skip
    return model.NllbMoeSparseMLP(config, INNER)


class OneOfEachGroup(Layer):
    """PanGu's MoGE: the best expert of every group; a token's experts differ, since they are of different groups."""

    def forward(self, x: Tensor) -> Tensor:
        rows, size = x.reshape(-1, D), E // 2
        w, ids = self.router(rows).softmax(-1).view(-1, 2, size).max(-1)
        ids = ids + torch.arange(0, E, size)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out[token] += expert(rows[token]) * w[token, choice, None]
        return out.view_as(x)


class WeighedFirst(Layer):
    """Products with a softmax over all experts are stacked, and summed up."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        return torch.stack([expert(x) * gate[..., e : e + 1] for e, expert in enumerate(self.experts)]).sum(0)


class WeighedLast(Layer):
    """The same on a last axis, and a choice whose gradient passes straight through."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        gate = torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1.0) - p.detach() + p
        found = [expert(x) * gate[..., e, None] for e, expert in enumerate(self.experts)]
        return torch.stack(found, dim=-1).sum(dim=-1)


class LoRAs(nn.Module):
    """Adapters of one frozen matrix, weighed by a router; numbers that scale stand behind the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.router = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        self.down = nn.ModuleList(nn.Linear(D, 3, bias=False) for _ in range(E))
        self.up = nn.ModuleList(nn.Linear(3, D, bias=False) for _ in range(E))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.base(x), self.router(x).softmax(-1, dtype=torch.float32)
        for e, (down, up) in enumerate(zip(self.down, self.up)):
            y = y + gate[..., e].unsqueeze(-1) * up(down(x)) * 2.0 / 3.0 * self.scale
        return y


class ReadOfEveryRow(Layer):
    """The outputs of all experts, of which those of the chosen ones are read by index."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        every = torch.stack([expert(rows) for expert in self.experts], dim=1)
        return torch.einsum("tk,tkd->td", w, every[torch.arange(len(rows)).unsqueeze(1), ids]).view_as(x)


MASK_STYLES = (Threshold, TopP, ReluRouter, OneColumn, ColumnOfPicked, Padding, PaddingOfPairs, CapacityByCumsum,
               FirstOfEvery, SwitchDropsPass, SwitchOfSequences, LastOneStands, TwoRouters, OneHotCapacity, AllExperts,
               InfinitiesOut, TwoTasks, TwoGates, TwoGatesBehind, LengthsOfLists, LengthsAsNumbers, WeighedFirst,
               WeighedLast, OneOfEachGroup, LoRAs, ReadOfEveryRow, switch_transformers, nllb_moe)  # fmt: skip
MASK_REFUSALS = dict.fromkeys((Normed, NormedTop), "BatchNorm, whose statistics mix the rows of an expert")
MASK_REFUSALS[SharedWeight] = "all experts share the weight mlp_experts_0_0_weight"
