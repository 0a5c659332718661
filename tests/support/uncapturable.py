"""Models that cannot be captured as a whole: control flow on values stands around their mixtures of experts."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.handmade import LanguageModel, Loop, output_of
from tests.support.op_styles import StackedLoop
from tests.support.routed_experts import Router

TOKENS = torch.arange(16).view(2, 8)


class Branching(nn.Module):
    """A model behind control flow on values, which no capture follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels=None):
        if int(input_ids.sum()) % 2:
            input_ids = input_ids + 0
        return self.model(input_ids, labels=labels)


class Deciding(LanguageModel):
    """Control flow on values between its layers."""

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x if x.abs().max().item() < 1e6 else x / 2)
        return output_of(self.head(self.norm(x)), labels)


def simple() -> nn.Module:
    return Deciding(Loop(bias=True))


class Layers(nn.Module):
    """Layers that are no experts, in lists, beside those with some; a table with three axes; a loss of a layer that
    stands in its attribute; a parameter that no loss comes of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.before = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(StackedLoop() for _ in range(2))
        self.table, self.unused = nn.Parameter(torch.randn(2, 8, 16)), nn.Parameter(torch.randn(3))
        self.head = nn.Linear(16, 64)
        for layer in self.layers:
            layer.register_forward_hook(keep_loss)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids) + self.table[0, : input_ids.shape[1]]
        for linear, norm in zip(self.before, self.norms):
            if x.abs().max().item() < 1e9:
                x = x + norm(linear(x))
        for layer in self.layers:
            x = x + layer(x)
        out = output_of(self.head(x), labels)
        return out._replace(loss=out.loss + 0.1 * sum(layer.penalty for layer in self.layers))


def keep_loss(module, args, output):
    module.penalty = output.pow(2).mean()


class Handed(Layers):
    """Experts that are handed a routing, of several kinds."""

    def __init__(self, kinds) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router(kind()) for kind in kinds)
        for layer in self.layers:
            layer.register_forward_hook(keep_loss)
