"""placement="exact": every rank computes as many rows as any other, and the numbers are those of one device."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.runtime.plan import RoutePlan
from tests.support.parity import compare, gradients
from tests.support.sharing import run_sharing

E, K, D, INNER = 6, 2, 8, 12
ROW, EXPERT = D * 4, 2 * D * INNER * 4  # bytes
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
    return [out.detach() for out in outs], {name: p.grad for name, p in model.named_parameters()}


SEEN: dict[int, list[RoutePlan]] = defaultdict(list)  # the plans by which rows travelled, by thread


def noted(traffic: Any, rank: int) -> RoutePlan:
    SEEN[threading.get_ident()].append(plan := ORIGINAL(traffic, rank))
    return plan


ORIGINAL = RoutePlan.of


def balanced(rank: int, world: int, model: nn.Module, steps: list[Step], wanted: list, dims: tuple, options: dict,
             ) -> list[int]:  # fmt: skip
    """The rows that this rank computes in every step."""
    mesh, mine, found = init_device_mesh("cpu", dims[0], mesh_dim_names=dims[1]), SEEN[threading.get_ident()], []
    with closing(moefx.compile(copy.deepcopy(model), mesh, moefx.Options(placement="exact", **options))) as compiled:
        for number, ((tokens, bias), (outs, grads)) in enumerate(zip(steps, wanted)):
            compiled.zero_grad()
            mine.clear()
            y = compiled(tokens[rank], bias)
            y.square().sum().backward()
            grads = {f"grad.{name}": grad for name, grad in grads.items()}
            actual = {"y": y.detach()} | gradients(compiled)
            compare(actual, {"y": outs[rank]} | grads).check(f"step {number}, rank {rank}")
            found.append(sum(plan.num_received for plan in mine))
    return found


@pytest.mark.parametrize(("stacked", "dims", "options"), [
    (True, ((3,), ("ep",)), {"spare": 2}),
    (False, ((2, 2), ("dp", "ep")), {"spare": 2, "chunks": 3, "verify": 2}),
], ids=["stacked, uneven", "modules in chunks"])  # fmt: skip
def test_every_rank_computes_as_many_rows(stacked, dims, options):
    torch.manual_seed(0)
    ranks = torch.Size(dims[0]).numel()
    model, steps = Skewed(stacked=stacked), skews(ranks)
    wanted = [reference(model, step) for step in steps]
    with mock.patch.object(RoutePlan, "of", noted):
        rows = run_sharing(ranks, balanced, model, steps, wanted, dims, options)
    for number, (tokens, _) in enumerate(steps):
        for group in torch.arange(ranks).view(-1, dims[0][-1]).tolist():  # along ep
            computed = [rows[rank][number] for rank in group]
            assert sum(computed) == K * sum(tokens[rank].shape[0] for rank in group)
            assert max(computed) - min(computed) <= 1, (number, computed)
