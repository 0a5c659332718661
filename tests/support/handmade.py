"""Mixture-of-experts language models written by hand, in the styles that people use, with a knob for every habit.

T tokens, D width, I inner width, E experts, K choices per token, C capacity, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, D, INNER = 64, 16, 24


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


@dataclass(frozen=True)
class Loop:
    """A loop over a ModuleList of experts."""

    num_experts: int = 8
    top_k: int = 2
    scores: str = "softmax"  # softmax | sigmoid
    renormalise: bool = True
    weigh: str = "after"  # after | before: where the scores meet the experts
    gather: str = "where"  # where | nonzero | continue (nonzero, idle experts skipped) | mask
    # | dense (all tokens) | stack (all tokens, all experts at once) | assign (ids [T] of one expert per token)
    # | hash (ids that no router chose) | put (where of several axes, index_put)
    # | split (sorted, cut by counts) | offsets (sorted, cut from offset to offset)
    # | cut (masks, of which a capacity keeps the first) | threshold (all experts above a score) | every (all of them)
    shape: str = "TD"  # TD | BSD | BHWC: the axes of the tokens in the layer; for mask, dense, put and assign
    scatter: str = "index_add_"  # index_add_ | index_add | setitem
    shared: str = ""  # "" | plain | gated
    twice: bool = False  # the same layer again, on what came out of it
    router_bias: bool = False
    correction: bool = False  # a buffer is added to the scores for the choice alone
    counting: bool = False  # forward adds to the buffer tokens_per_expert
    bias: bool = False
    gated: bool = True
    activation: str = "silu"
    clamp: float = 0.0
    dropout: float | None = None
    weights: str = ""  # "" | normed | merged | rounded | masked: what is done to them before use


@dataclass(frozen=True)
class Capacity:
    """GShard's one-hot einsums with a fixed number of places per expert; what does not fit is dropped."""

    num_experts: int = 8
    top_k: int = 2
    groups: int = 0  # 0: einsums over [T, E, C]; otherwise over [G, S, E, C]
    capacity_factor: float = 1.0
    gated: bool = False
    bias: bool = False
    renormalise: bool = True


class Expert(nn.Module):
    def __init__(self, style: Loop) -> None:
        super().__init__()
        self.style = style
        self.up = nn.Linear(D, INNER, bias=style.bias)
        self.gate = nn.Linear(D, INNER, bias=style.bias) if style.gated else None
        self.down = nn.Linear(INNER, D, bias=style.bias)
        self.drop = None if style.dropout is None else nn.Dropout(style.dropout)
        if style.weights == "merged":
            self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.3), nn.Parameter(torch.randn(INNER, 2) * 0.3)
        if style.weights == "masked":
            self.register_buffer("mask", (torch.arange(INNER) % 3 > 0).to(torch.get_default_dtype()))

    def up_weight(self) -> Tensor:
        w, how = self.up.weight, self.style.weights
        if how == "normed":
            return F.normalize(w, dim=-1)
        if how == "merged":
            return w + self.b @ self.a * 0.5
        if how == "rounded":  # the gradient passes straight through
            return w + ((w / 0.25).round().clamp(-1, 1) * 0.25 - w).detach()
        return w * self.mask[:, None] if how == "masked" else w

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(F, self.style.activation)
        up = F.linear(x, self.up_weight(), self.up.bias) if self.style.weights else self.up(x)
        if self.style.clamp:
            up = up.clamp(-self.style.clamp, self.style.clamp)
        hidden = act(up) if self.gate is None else act(self.gate(x)) * up
        if self.drop is not None:
            hidden = self.drop(hidden)
        return self.down(hidden)


class LoopMoE(nn.Module):
    def __init__(self, style: Loop) -> None:
        super().__init__()
        self.style = style
        self.router = nn.Linear(D, style.num_experts, bias=style.router_bias)
        self.experts = nn.ModuleList(Expert(style) for _ in range(style.num_experts))
        self.shared = Expert(style) if style.shared else None
        self.shared_gate = nn.Linear(D, 1, bias=False) if style.shared == "gated" else None
        if style.correction:
            self.register_buffer("correction", torch.zeros(style.num_experts))
        if style.counting:
            self.register_buffer("tokens_per_expert", torch.zeros(style.num_experts))

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x_TD)
        scores = logits.softmax(-1) if self.style.scores == "softmax" else logits.sigmoid()
        if self.style.correction:
            idx = torch.topk(scores + self.correction, self.style.top_k, dim=-1).indices
            weights = scores.gather(-1, idx)
        else:
            weights, idx = torch.topk(scores, self.style.top_k, dim=-1)
        if self.style.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.style.counting:
            with torch.no_grad():
                counts = F.one_hot(idx, self.style.num_experts).sum((0, 1))
                self.tokens_per_expert.add_(counts.to(self.tokens_per_expert.dtype))
        return weights, idx

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) if self.style.twice else self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        if self.style.shape == "BHWC":
            return self.tokens(x.unsqueeze(1)).squeeze(1)
        return self.tokens(x if self.style.shape == "BSD" else x.reshape(-1, x.shape[-1])).view_as(x)

    def tokens(self, x_TD: Tensor) -> Tensor:
        style = self.style
        weights_TK, idx_TK = self.route(x_TD)
        hashed_T = (x_TD.detach().sum(-1).abs() * 1000).long() % style.num_experts
        out = torch.zeros_like(x_TD)
        at_once = {"stack": self.by_stack, **dict.fromkeys(("split", "offsets"), self.by_slices),
                   **dict.fromkeys(("cut", "threshold", "every"), self.by_masks)}.get(style.gather)  # fmt: skip
        if at_once is not None:
            out = at_once(x_TD, weights_TK, idx_TK)
        for e, expert in enumerate(self.experts if at_once is None else ()):
            if style.gather == "hash":
                token = torch.where(hashed_T == e)[0]
                out.index_add_(0, token, expert(x_TD[token]))
                continue
            if style.gather == "assign":
                mine = idx_TK.squeeze(-1) == e
                out[mine] = expert(x_TD[mine]) * weights_TK.squeeze(-1)[mine].unsqueeze(-1)
                continue
            if style.gather in ("mask", "dense"):
                chosen = idx_TK == e
                weight = (weights_TK * chosen).sum(-1, keepdim=True)
                if style.gather == "dense":
                    out = out + expert(x_TD) * weight
                else:
                    token = chosen.any(-1)
                    out[token] += expert(x_TD[token]) * weight[token]
                continue
            if style.gather == "put":
                *token, choice = torch.where(idx_TK == e)
                rows = expert(x_TD[tuple(token)]) * weights_TK[(*token, choice)].unsqueeze(-1)
                out = out.index_put(tuple(token), rows, accumulate=True)
                continue
            if style.gather == "where":
                token, choice = torch.where(idx_TK == e)
            else:
                token, choice = (idx_TK == e).nonzero(as_tuple=True)
            if style.gather == "continue" and token.numel() == 0:
                continue
            rows, weight = x_TD[token], weights_TK[token, choice].unsqueeze(-1)
            rows = expert(rows * weight) if style.weigh == "before" else expert(rows) * weight
            if style.scatter == "index_add_":
                out.index_add_(0, token, rows)
            elif style.scatter == "index_add":
                out = out.index_add(0, token, rows)
            else:
                out[token] += rows
        if self.shared is not None:
            shared = self.shared(x_TD)
            out = out + (shared if self.shared_gate is None else self.shared_gate(x_TD).sigmoid() * shared)
        return out


    def by_stack(self, x_TD: Tensor, weights_TK: Tensor, idx_TK: Tensor) -> Tensor:
        full_TE = x_TD.new_zeros(x_TD.shape[0], self.style.num_experts).scatter(1, idx_TK, weights_TK)
        return torch.einsum("te,ted->td", full_TE, torch.stack([expert(x_TD) for expert in self.experts], dim=1))

    def by_masks(self, x_TD: Tensor, weights_TK: Tensor, idx_TK: Tensor) -> Tensor:
        """Tokens of an expert are no plain top-k."""
        out, p_TE = torch.zeros_like(x_TD), self.router(x_TD).softmax(-1)
        for e, expert in enumerate(self.experts):
            if self.style.gather == "every":
                out = out + expert(x_TD) * p_TE[:, e : e + 1]
            elif self.style.gather == "threshold":
                token = (p_TE[:, e] > 1 / self.style.num_experts).nonzero(as_tuple=True)[0]
                out.index_add_(0, token, expert(x_TD[token]) * p_TE[token, e].unsqueeze(-1))
            else:
                chosen = idx_TK == e
                mine, weight = chosen.any(-1), (weights_TK * chosen).sum(-1)
                mine = mine & (mine.cumsum(0) <= 3)
                out[mine] += expert(x_TD[mine]) * weight[mine].unsqueeze(-1)
        return out

    def by_slices(self, x_TD: Tensor, weights_TK: Tensor, idx_TK: Tensor) -> Tensor:
        """Rows are sorted by expert; each expert computes its slice of them."""
        style, ids = self.style, idx_TK.flatten()
        order, counts = ids.argsort(), torch.bincount(ids, minlength=style.num_experts)
        token, weights = order // style.top_k, weights_TK.flatten()[order].unsqueeze(-1)
        rows = x_TD[token] * weights if style.weigh == "before" else x_TD[token]
        if style.gather == "split":
            out = [expert(part) for expert, part in zip(self.experts, rows.split(counts.tolist()))]
        else:
            out, ends = [], counts.cumsum(0).tolist()
            for e, expert in enumerate(self.experts):
                start = 0 if e == 0 else ends[e - 1]
                if start == ends[e]:
                    continue
                out.append(expert(rows[start : ends[e]]))
        rows = torch.cat(out) if style.weigh == "before" else torch.cat(out) * weights
        if style.scatter == "index_add_":
            return torch.zeros_like(x_TD).index_add_(0, token, rows)
        if style.scatter == "index_add":
            return rows[order.argsort()].view(*idx_TK.shape, -1).sum(1)
        pairs = torch.empty_like(rows)
        pairs[order] = rows
        return pairs.view(*idx_TK.shape, -1).sum(1)


class CapacityMoE(nn.Module):
    def __init__(self, style: Capacity) -> None:
        super().__init__()
        self.style, e = style, style.num_experts
        self.router = nn.Linear(D, e, bias=False)
        self.wi = nn.Parameter(torch.empty(e, D, INNER))
        self.wg = nn.Parameter(torch.empty(e, D, INNER)) if style.gated else None
        self.wo = nn.Parameter(torch.empty(e, INNER, D))
        self.wi_bias = nn.Parameter(torch.empty(e, INNER)) if style.bias else None
        self.wo_bias = nn.Parameter(torch.empty(e, D)) if style.bias else None

    def masks(self, x_GSD: Tensor) -> Tensor:
        """The combine weights [G, S, E, C]: zero where a token is not sent or was dropped."""
        style, e = self.style, self.style.num_experts
        groups, length = x_GSD.shape[:2]
        capacity = max(1, int(style.capacity_factor * style.top_k * length / e))
        weights, idx = torch.topk(self.router(x_GSD).softmax(-1), style.top_k, dim=-1)
        if style.renormalise and style.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        combine = torch.zeros(groups, length, e, capacity, dtype=x_GSD.dtype, device=x_GSD.device)
        used = torch.zeros(groups, 1, e, dtype=torch.long, device=x_GSD.device)
        for k in range(style.top_k):
            mask = F.one_hot(idx[..., k], e)
            place = mask.cumsum(1) - 1 + used
            used = used + mask.sum(1, keepdim=True)
            mask = mask * (place < capacity)
            place = (place * mask).sum(-1)
            gate = weights[..., k] * mask.sum(-1)
            combine = combine + torch.einsum(
                "gs,gse,gsc->gsec", gate, mask.to(gate.dtype), F.one_hot(place, capacity).to(gate.dtype)
            )
        return combine

    def forward(self, x: Tensor) -> Tensor:
        groups, d = self.style.groups, x.shape[-1]
        x_GSD = x.reshape(max(groups, 1), -1, d)
        combine = self.masks(x_GSD)
        dispatch = (combine > 0).to(x.dtype)
        if groups:
            rows = torch.einsum("gsec,gsd->egcd", dispatch, x_GSD)
            out = torch.einsum("gsec,egcd->gsd", combine, self.experts(rows, "egcd,edi->egci", "egci,eid->egcd"))
        else:
            rows = torch.einsum("tec,td->ecd", dispatch[0], x_GSD[0])
            out = torch.einsum("tec,ecd->td", combine[0], self.experts(rows, "ecd,edi->eci", "eci,eid->ecd"))
        return out.reshape(x.shape)

    def experts(self, rows: Tensor, up: str, down: str) -> Tensor:
        dims = (len(self.wi),) + (1,) * (rows.dim() - 2) + (-1,)
        hidden = torch.einsum(up, rows, self.wi)
        if self.wi_bias is not None:
            hidden = hidden + self.wi_bias.view(dims)
        hidden = F.gelu(hidden) if self.wg is None else F.silu(torch.einsum(up, rows, self.wg)) * hidden
        out = torch.einsum(down, hidden, self.wo)
        return out if self.wo_bias is None else out + self.wo_bias.view(dims)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), mlp
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = self.norm2(x)
        if self.checkpointed and self.training:
            return x + checkpoint(self.mlp, hidden, use_reentrant=False)
        return x + self.mlp(hidden)


def make_moe(style: Loop | Capacity) -> nn.Module:
    return LoopMoE(style) if isinstance(style, Loop) else CapacityMoE(style)


def output_of(logits: Tensor, labels: Tensor | None) -> Output:
    loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    return Output(loss, logits)


class OneLayer(nn.Module):
    """Embedding, one MoE layer, head: what a test needs that draws many models, for it compiles in half the time."""

    def __init__(self, style: Loop | Capacity) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(VOCAB, D), nn.LayerNorm(D), make_moe(style)
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        return output_of(self.head(x + self.mlp(self.norm(x))), labels)


def with_layer(make: Callable[[], nn.Module]) -> nn.Module:
    """`OneLayer` with another layer, [B, S, D] -> [B, S, D]."""
    model = OneLayer(Loop())
    model.mlp = make()
    return model


class LanguageModel(nn.Module):
    """Embedding, an MoE block, a dense block, an MoE block, head. Labels stand at their own position (no shift)."""

    def __init__(self, style: Loop | Capacity, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        dense = nn.Sequential(nn.Linear(D, INNER), nn.GELU(), nn.Linear(INNER, D))
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block(mlp, checkpointed) for mlp in (make_moe(style), dense, make_moe(style)))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return output_of(self.head(self.norm(x)), labels)


# Any of them


def loops() -> st.SearchStrategy[Loop]:
    """Dropless layers of 5 to 16 experts. The router has a bias, by which routing can be skewed."""
    return st.builds(
        Loop,
        num_experts=st.sampled_from([8, 12, 16, 10, 5]),
        top_k=st.integers(1, 4),
        scores=st.sampled_from(["softmax", "sigmoid"]),
        renormalise=st.booleans(),
        weigh=st.sampled_from(["after", "before"]),
        gather=st.sampled_from(["where", "nonzero", "continue", "mask", "dense", "split", "offsets", "cut", "threshold",
                                "every"]),
        scatter=st.sampled_from(["index_add_", "index_add", "setitem"]),
        shared=st.sampled_from(["", "plain", "gated"]),
        router_bias=st.just(True),
        bias=st.booleans(),
        gated=st.booleans(),
        weights=st.sampled_from(["", "", "", "", "normed", "merged", "rounded", "masked"]),
    )


def capacities() -> st.SearchStrategy[Capacity]:
    return st.builds(
        Capacity,
        num_experts=st.sampled_from([8, 12]),
        top_k=st.integers(1, 3),
        groups=st.sampled_from([0, 2]),
        capacity_factor=st.sampled_from([0.5, 1.0, 4.0]),
        gated=st.booleans(),
        bias=st.booleans(),
        renormalise=st.booleans(),
    )
