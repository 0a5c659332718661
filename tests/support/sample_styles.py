"""Samples that are routed as a whole, [S, D] at once, by gates of their means; and one gate for everything."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.styles import K, Layer


class SamplesPicked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.mean(1)).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            samples, choice = torch.where(chosen == e)
            out[samples] += weights[samples, choice, None, None] * expert(x[samples])
        return out


class SamplesOfOne(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.mean(1)).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mine = chosen == e
            out[mine] = expert(x[mine]) * weights[mine].view(-1, 1, 1)
        return out


class SamplesMasked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.mean(1)).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == e)).sum(-1)[:, None, None]
        return out


class SamplesSoft(Layer):
    """Every expert computes every sample."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x.mean(1)).softmax(-1)
        return sum(gates[:, e, None, None] * expert(x) for e, expert in enumerate(self.experts))


class SamplesStacked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x[:, 0]).softmax(-1)
        return torch.einsum("be,ebsd->bsd", gates, torch.stack([expert(x) for expert in self.experts]))


class OneGate(Layer):
    """All tokens of a step have the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x.mean((0, 1))).softmax(-1)
        return sum(gates[e] * expert(x) for e, expert in enumerate(self.experts))


SAMPLE_STYLES = (SamplesPicked, SamplesOfOne, SamplesMasked, SamplesSoft, SamplesStacked, OneGate)
