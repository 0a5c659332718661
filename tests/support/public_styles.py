"""Spellings that much public code has: rows added by `out[rows] += y` to what is read as a whole afterwards, masks by
comparison with all experts at once, and experts that a forward moves to where they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.styles import INNER, D, E, K, Layer


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(D, INNER), nn.Linear(INNER, D), nn.Linear(D, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupGate(nn.Module):
    """Sigmoid scores; two groups of experts, of which the one with the best two scores counts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(experts, D)), nn.Parameter(torch.zeros(experts))
        self.groups, self.scale = 2, 2.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = F.linear(x, self.weight).sigmoid()
        scores = (own + self.bias).view(x.size(0), self.groups, -1)
        best = scores.topk(2, dim=-1)[0].sum(dim=-1).topk(1, dim=-1)[1]
        others = scores.new_ones(x.size(0), self.groups, dtype=torch.bool).scatter_(1, best, False)
        scores = scores.masked_fill_(others.unsqueeze(-1), float("-inf")).flatten(1)
        ids = torch.topk(scores, K, dim=-1)[1]
        weights = own.gather(1, ids)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights *= self.scale
        return weights.type_as(x), ids


class AddsAtRows(nn.Module):
    """DeepSeek-V3's reference code on one device: `y[rows] += ..`, beside a shared expert.

    adds: (y, rows, what an expert computed of them); reads: (y, of the shared expert)."""

    def __init__(self, adds: Callable | None = None, reads: Callable | None = None) -> None:
        super().__init__()
        self.gate, self.shared = GroupGate(E), Gated()
        self.experts = nn.ModuleList(Gated() for _ in range(E))
        self.adds, self.reads = adds, reads

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, D)
        weights, ids = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        for i in range(len(self.experts)):
            if counts[i] == 0:
                continue
            idx, top = torch.where(ids == i)
            if self.adds is None:
                y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
            else:
                self.adds(y, idx, self.experts[i](x[idx]) * weights[idx, top, None])
        z = self.shared(x)
        return (y + z if self.reads is None else self.reads(y, z)).view(shape)


def _of_all(y: Tensor, rows: Tensor, new: Tensor) -> None:
    y[rows, :] += new


def _assigned(y: Tensor, rows: Tensor, new: Tensor) -> None:
    y[rows] = new + y[rows]


def _put(y: Tensor, rows: Tensor, new: Tensor) -> None:
    y.index_put_((rows,), new, accumulate=True)


def _in_place(y: Tensor, z: Tensor) -> Tensor:
    y += z
    return y


ADDS = {"all columns": _of_all, "assigned": _assigned, "put": _put}
READS = {
    "itself": lambda y, z: y + 0.0,
    "times": lambda y, z: y * z.sigmoid(),
    "in place": _in_place,
    "twice": lambda y, z: F.silu(y) + y - z,
}


class ComparedWithAll(Layer):
    """Masks of all experts by one comparison, zipped with the experts. masks: (ids [T, K], 0, 1, .. E - 1) ->
    [E, K, T]; no `masks`: the most usual way, with numbers made anew."""

    def __init__(self, masks: Callable | None = None) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(E))
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        if self.masks is None:
            masks = (ids[..., None] == torch.arange(E, device=ids.device)).permute(2, 1, 0)
        else:
            masks = self.masks(ids, self.numbers)
        out = torch.zeros_like(rows)
        for expert, mask in zip(self.experts, masks):
            choice, token = torch.where(mask)
            out.index_add_(0, token, expert(rows[token]) * w[token, choice, None])
        return out.view_as(x)


MASKS = {
    "a method, a buffer": lambda ids, numbers: ids.unsqueeze(-1).eq(numbers).permute(2, 1, 0),
    "swapped, unbound": lambda ids, numbers: (numbers == ids[..., None]).permute(2, 1, 0).unbind(0),
    "of three axes": lambda ids, numbers: (ids.unsqueeze(2) == numbers[None, None, :]).transpose(0, 1).unbind(-1),
    "of literals": lambda ids, numbers: (ids.unsqueeze(2) == torch.tensor([0, 1, 2, 3])).long().permute(2, 1, 0),
}


class Stays(Layer):
    """Every expert is moved to where it is, and cast to what it is. stays: (module, x) -> module."""

    def __init__(self, stays: Callable | None = None) -> None:
        super().__init__()
        self.stays = stays

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            y = rows[token]
            expert = self.experts[e].to(x.device, x.dtype) if self.stays is None else self.stays(self.experts[e], y)
            out[token] += expert(y) * w[token, choice, None].to(x.device)
        return out.view_as(x)


def _of_parameters(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    first, act, last = module
    return lambda y: F.linear(act(F.linear(y, first.weight.to(x.device), first.bias.to(x))),
                              last.weight.to(x.dtype), last.bias.float())  # fmt: skip


STAYS = {
    "on its device": lambda module, x: module.to(x.device),
    "as floats": lambda module, x: module.float().to(dtype=x.dtype),
    "on the CPU": lambda module, x: module.cpu().type(x.dtype).to(x),
    "its parameters": _of_parameters,
}
CONVERTS = {
    "float32 on cpu becomes torch.bfloat16 on cpu": lambda module, x: module.to(torch.bfloat16),
    "float32 on cpu becomes torch.float64 on cpu": lambda module, x: module.double(),
    "float32 on cpu becomes torch.float32 on meta": lambda module, x: module.to("meta"),
}

