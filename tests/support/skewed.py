"""A mixture whose routing the caller may skew, trained step by step beside one device, for placements of experts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefx.model.stats import RegionStats
from tests.support.parity import compare, gradients

E, K, D, INNER = 6, 2, 8, 12
SPARE = 2
ROW, EXPERT, MESSAGE = D * 4, 2 * D * INNER * 4, 512  # bytes
Step = tuple[list[Tensor], Tensor]  # tokens of every rank, and what is added to the scores of experts


class Skewed(nn.Module):
    """Experts that are chosen by tokens, or by whoever calls."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        if stacked:
            self.up, self.down = nn.Parameter(torch.randn(E, D, INNER)), nn.Parameter(torch.randn(E, INNER, D))
        else:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, INNER, False), nn.SiLU(),
                                                       nn.Linear(INNER, D, False)) for _ in range(E))  # fmt: skip
        self.stacked = stacked

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        weights, ids = (self.router(x) + bias).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            y = F.silu(x[token] @ self.up[e]) @ self.down[e] if self.stacked else self.experts[e](x[token])
            out = out.index_add(0, token, y * weights[token, choice, None])
        return out


def skews(ranks: int) -> list[Step]:
    """By tokens; all to two experts of one rank; some experts without rows, and one rank without tokens; Zipf."""
    hot, idle = torch.zeros(E), torch.zeros(E)
    hot[:2], idle[2:5] = 40.0, -40.0
    return [([torch.randn(count + rank, D) for rank in range(ranks)], bias) for count, bias in
            ((9, torch.zeros(E)), (14, hot), (0, idle), (40, 4.0 / (1 + torch.arange(E))))]  # fmt: skip


def reference(model: nn.Module, step: Step) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What every rank gets of one device, and the mean of the gradients."""
    model = copy.deepcopy(model)
    outs = [model(x, step[1]) for x in step[0]]
    (sum(out.square().sum() for out in outs) / len(outs)).backward()
    return [out.detach() for out in outs], gradients(model)


NOTED = threading.local()  # seen: what this rank planned, tables and rows, and the plans by which its rows travelled


def noting(function: Any) -> Any:
    def noted(*args: Any) -> Any:
        found = function(*args)
        getattr(NOTED, "seen", []).append(found)
        return found

    return noted


def trained(rank: int, compiled: Any, steps: list[Step], wanted: list) -> Iterator[tuple[int, RegionStats]]:
    """What the region did in every step, whose numbers are compared; behind them, those of all steps in flight."""
    for number, ((tokens, bias), (outs, grads)) in enumerate(zip(steps, wanted)):
        compiled.zero_grad()
        NOTED.seen.clear()
        y = compiled(tokens[rank], bias)
        y.square().sum().backward()
        compare({"y": y.detach()} | gradients(compiled), {"y": outs[rank]} | grads).check(f"{number}, rank {rank}")
        (stats,) = compiled.moe_stats().values()
        yield number, stats
    in_flight(rank, compiled, steps, wanted)


def in_flight(rank: int, compiled: Any, steps: list[Step], wanted: list) -> None:
    """All forwards, then all backwards from the last to the first, whose gradients are held back."""
    compiled.zero_grad()
    with compiled.no_sync():
        losses = [compiled(tokens[rank], bias).square().sum() for tokens, bias in steps[:-1]]
        for loss in losses[::-1]:
            loss.backward()
    compiled(steps[-1][0][rank], steps[-1][1]).square().sum().backward()
    total = {name: sum(grads[name] for _, grads in wanted) for name in wanted[0][1]}
    compare(gradients(compiled), total).check(f"in flight, rank {rank}")


def sent(compiled: Any) -> dict[str, int]:
    """Bytes of every kind that this rank has sent for the region."""
    found = dict.fromkeys(("all_gather", "all_to_all", "gather_experts", "scatter_experts"), 0)
    for entry in compiled._session.trace:
        if entry.kind in found and entry.region != "the backward":
            found[entry.kind] += entry.num_bytes
    return found
