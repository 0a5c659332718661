"""What stands in forwards beside a mixture, or around it, and what no graph holds as it is written."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.styles import D, E, K, Layer

log = logging.getLogger(__name__)


def asserts(layer: Layer, scores: Tensor) -> None:
    """Here pytest does not write assertions anew."""
    assert torch.isfinite(scores).all(), f"{scores.shape} hold no numbers"


class Checked(Layer):
    """Values are looked at, raised for, and written about; what is not a number would be mended."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        logits = self.router(rows)
        if torch.isnan(logits).any():
            print("no numbers")
            logits[torch.isnan(logits)] = 0
        if not torch.isfinite(rows).all():
            rows = torch.nan_to_num(rows)
        w, ids = logits.softmax(-1).topk(K, dim=-1)
        self.look(w, ids)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, expert(rows[token]) * w[token, choice, None])
        if not torch.isfinite(out).all():
            log.warning("%s has other numbers, such as %s", type(self).__name__, out.max().item())
        return out.view_as(x)

    def look(self, w: Tensor, ids: Tensor) -> None:
        assert torch.isfinite(w).all(), f"{w.shape} are no numbers"
        with torch.no_grad():
            if ids.max() >= E or ids.min() < 0:
                raise IndexError(ids.max())
        if w.sum(-1).max().item() > 1.001:
            message = f"{w.shape} are no probabilities"
            raise ValueError(message)
        if not torch.allclose(F.normalize(w, dim=-1).norm(dim=-1), torch.tensor(1.0), atol=1e-3):
            print("these are not normal")


class KeepsLoss(Layer):
    """The router's loss takes the place of a buffer. Counts are tensors, which are compared with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loss", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        scores = self.router(rows).softmax(-1)
        self.loss = scores.mean(0).pow(2).sum()
        w, ids = scores.topk(K, dim=-1)
        order = ids.flatten().argsort()
        token, counts = order // K, F.one_hot(ids.flatten(), E).sum(0)
        given, parts, start = rows[token], [], 0
        for e in range(E):
            count = counts[e]
            if count == 0:
                continue
            parts.append(self.experts[e](given[start : start + count]))
            start = start + count
        made = torch.cat(parts) * w.flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, token, made).view_as(x)


class Runs(Layer):
    """Experts that were hit, with the numbers of their rows, of sorted ids."""


    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        order = ids.flatten().argsort()
        token, w = order // K, w.flatten()[order]
        experts, counts = torch.unique_consecutive(ids.flatten()[order], return_counts=True)
        parts = rows[token].split(counts.tolist())
        made = []
        for i in range(experts.size(0)):
            made.append(self.experts[experts[i].item()](parts[i]))
        return torch.zeros_like(rows).index_add_(0, token, torch.cat(made) * w[:, None]).view_as(x)


class Hit(Layer):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, D)
        w, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        experts, counts = torch.unique(ids, return_counts=True)
        out = torch.zeros_like(rows)
        for e, count in zip(experts.tolist(), counts.tolist()):
            if count == 0:
                continue
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](rows[token]) * w[token, choice, None])
        return out.view_as(x)


CAPTURE_STYLES = [Checked, KeepsLoss, Runs, Hit]
