"""An expert-parallel MoE layer written by hand in eager PyTorch, as a good engineer writes it: the yardstick.

T tokens of this rank, K choices per token, D width, I inner width, E experts, S = E / n experts of this rank, R rows
received. Nothing here uses moefx.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Exchange = Callable[..., object]
"""As dist.all_to_all_single: (out, rows, receives, sends), or (out, rows) for equal shares."""


class AllToAll(torch.autograd.Function):
    """Rows [sum(sends), ...] -> rows [sum(receives), ...]; the gradient travels back."""

    @staticmethod
    def forward(ctx, rows: Tensor, receives: list[int], sends: list[int], exchange: Exchange) -> Tensor:
        ctx.route = sends, receives, exchange
        out = rows.new_empty(sum(receives), *rows.shape[1:])
        exchange(out, rows.contiguous(), receives, sends)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        sends, receives, exchange = ctx.route
        return AllToAll.apply(grad, sends, receives, exchange), None, None, None


class EagerEPMoE(nn.Module):
    """Softmax router, top-k, dropless experts (SwiGLU) spread over the ranks of `group`.

    router [E, D] is the same on all ranks; gate_up [S, 2I, D] and down [S, D, I] are this rank's experts. exchange:
    who exchanges rows between the ranks of the group; PyTorch, by default.
    """

    def __init__(self, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, group: dist.ProcessGroup,
                 exchange: Exchange | None = None) -> None:  # fmt: skip
        super().__init__()
        self.exchange = exchange or partial(dist.all_to_all_single, group=group)
        self.router, self.top_k, self.group = nn.Parameter(router.clone()), top_k, group
        n, me = dist.get_world_size(group), dist.get_rank(group)
        self.gate_up = nn.Parameter(gate_up.chunk(n)[me].clone())
        self.down = nn.Parameter(down.chunk(n)[me].clone())

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        scores = F.softmax(F.linear(x_TD, self.router), dim=-1, dtype=torch.float)
        weights_TK, idx_TK = torch.topk(scores, self.top_k, dim=-1)
        weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(x.dtype)

        n, num_experts = dist.get_world_size(self.group), self.router.shape[0]
        order = idx_TK.flatten().argsort(stable=True)
        counts = idx_TK.flatten().bincount(minlength=num_experts)
        theirs = torch.empty_like(counts)
        self.exchange(theirs, counts)
        sends = counts.view(n, -1).sum(1).tolist()
        receives = theirs.view(n, -1).sum(1).tolist()

        rows = AllToAll.apply(x_TD[order // self.top_k], receives, sends, self.exchange)
        slots = torch.arange(num_experts // n, device=x.device).repeat(n).repeat_interleave(theirs)
        by_slot = slots.argsort(stable=True)
        out = self.experts(rows[by_slot], theirs.view(n, -1).sum(0).tolist())
        back = torch.empty_like(by_slot).scatter_(0, by_slot, torch.arange(len(by_slot), device=x.device))
        rows = AllToAll.apply(out[back], sends, receives, self.exchange)
        rows = rows * weights_TK.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order // self.top_k, rows).view_as(x)

    def experts(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """rows [R, D], the rows of each of this rank's experts one after the other -> [R, D]."""
        out = []
        for rows_of_one, gate_up, down in zip(rows.split(sizes), self.gate_up, self.down):
            gate, up = F.linear(rows_of_one, gate_up).chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(out)

    def average_gradients(self) -> None:
        """After backward: router gradients averaged over the ranks, expert gradients scaled alike."""
        n = dist.get_world_size(self.group)
        dist.all_reduce(self.router.grad, group=self.group)
        for param in self.parameters():
            param.grad /= n
