"""Code beside a mixture of experts that looks like one, and is none: branches that mix tokens, or differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.styles import D, Pairs


class Beside(nn.Module):
    """A mixture, and what `other` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.gate = Pairs(), nn.Linear(D, 2)
        self.parts = nn.ModuleList(self.part() for _ in range(2))

    def part(self) -> nn.Module:
        return nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.other(x)


class Convolutions(Beside):
    def part(self) -> nn.Module:
        return nn.Conv1d(D, D, 3, padding=1)

    def other(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        parts = [part(x.transpose(1, 2)).transpose(1, 2) for part in self.parts]
        return sum(part * gates[..., e : e + 1] for e, part in enumerate(parts))


class MixesTokens(Beside):
    def other(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        parts = [part(x) + part(x).mean(1, keepdim=True) for part in self.parts]
        return sum(part * gates[..., e : e + 1] for e, part in enumerate(parts))


class MixesPickedTokens(Beside):
    def other(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        out = torch.zeros_like(rows)
        for e, part in enumerate(self.parts):
            mine = rows[:, e] > 0.2
            out[mine] += part(rows[mine]) + part(rows[mine]).sum(0, keepdim=True)
        return out.view_as(x)


class DifferentParts(Beside):
    def other(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        return self.parts[0](x) * gates[..., 0:1] + self.parts[1](x).relu() * gates[..., 1:2]


NO_EXPERTS = (Convolutions, MixesTokens, MixesPickedTokens, DifferentParts)
