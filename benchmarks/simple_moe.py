"""`simple`: a blocking, dropless expert-parallel MoE layer in eager PyTorch, written as well as one can.

T tokens of this rank, k choices per token, M width, H inner width, E experts, n ranks, S = E / n experts of this rank.
Nothing here uses moefx. Nothing is padded or computed twice; nothing overlaps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    """Rows by receiving rank -> rows by sending rank; the gradient travels back."""

    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.route = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return Exchange.apply(grad.contiguous(), *ctx.route), None, None, None


class SimpleMoE(nn.Module):
    """Softmax router, the k best choices with weights that sum to one, SwiGLU experts without bias.

    router [E, M] equal on all ranks; gate_up [S, 2H, M] and down [S, M, H] are this rank's experts. Subclasses may
    replace `exchange`.
    """

    def __init__(self, router: Tensor, gate_up: Tensor, down: Tensor, k: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.k, self.group, self.n = k, group, dist.get_world_size(group)
        self.router = nn.Parameter(router)
        self.gate_up, self.down = nn.ParameterList(gate_up.unbind()), nn.ParameterList(down.unbind())

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return Exchange.apply(rows, received, sent, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, M] -> [T, M]."""
        weights, experts = F.linear(x, self.router).softmax(-1).topk(self.k)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        order = experts.flatten().argsort(stable=True)
        mine = experts.flatten().bincount(minlength=len(self.router))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        blocks = theirs.view(self.n, -1)  # rows that each rank sends to each of this rank's experts
        sent, received = mine.view(self.n, -1).sum(1).tolist(), blocks.sum(1).tolist()

        rows = self.exchange(x[order // self.k], received, sent)
        by_source = rows.split(blocks.flatten().tolist())
        num_slots = len(self.gate_up)
        outs = [self.expert(slot, torch.cat(by_source[slot::num_slots])).split(blocks[:, slot].tolist())
                for slot in range(num_slots)]  # fmt: skip
        rows = self.exchange(torch.cat([out for of_source in zip(*outs) for out in of_source]), sent, received)
        return torch.zeros_like(x).index_add(0, order // self.k, rows * weights[order].unsqueeze(-1))

    def expert(self, slot: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up[slot]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[slot])
