"""The MoE layer that the benchmarks run, and who runs it: `simple`, moefx, and the two floors.

T tokens of this rank, k choices per token, M width, H inner width, E experts, n ranks, S = E / n experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from simple_moe import Exchange, SimpleMoE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moefx


@dataclass(frozen=True)
class Problem:
    """routing: "balanced", every expert gets the same number of rows from every rank; "skewed", experts are chosen with
    probabilities 1, 1/2, .. 1/E, so the first rank gets most; "zipf S", with 1, 1/2^S, .. 1/E^S, the experts in an
    order drawn once; or "one", all tokens choose the same experts."""

    tokens: int
    width: int
    inner: int
    experts: int
    k: int = 2
    routing: str = "balanced"

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """router [E, M], gate_up [E, 2H, M], down [E, M, H], the same on all ranks. The router looks at the first E
        entries of a token, where `inputs` has written what it should choose."""
        seed = torch.Generator().manual_seed(0)
        router = 0.02 * torch.randn(self.experts, self.width, generator=seed)
        router[:, : self.experts] += torch.eye(self.experts)
        gate_up = torch.randn(self.experts, 2 * self.inner, self.width, generator=seed) * self.width**-0.5
        down = torch.randn(self.experts, self.width, self.inner, generator=seed) * self.inner**-0.5
        return router, gate_up, down

    def inputs(self, rank: int, batch: int = 0) -> tuple[Tensor, Tensor]:
        """This rank's tokens [T, M] and the gradient of the output [T, M]."""
        seed = torch.Generator().manual_seed(10 + rank + 1000 * batch)
        x, grad = torch.randn(2, self.tokens, self.width, generator=seed)
        x[:, : self.experts] *= 0.1
        x.scatter_(1, self._chosen(seed), 6.0 - torch.arange(self.k).float().expand(self.tokens, -1) / self.k)
        return x, grad

    def _chosen(self, seed: torch.Generator) -> Tensor:
        """[T, k]."""
        t = torch.arange(self.tokens)
        if self.routing == "balanced":
            shift = (t // self.experts) % (self.experts - self.k + 1)
            return (t[:, None] + shift[:, None] * (torch.arange(self.k) > 0) + torch.arange(self.k)) % self.experts
        if self.routing == "one":
            return torch.arange(self.k).expand(self.tokens, -1)
        chances = 1 / torch.arange(1, self.experts + 1).float()
        if self.routing.startswith("zipf"):
            order = torch.randperm(self.experts, generator=torch.Generator().manual_seed(1))
            chances = (chances ** float(self.routing.split()[1]))[order]
        return torch.multinomial(chances.expand(self.tokens, -1), self.k, generator=seed)


@dataclass
class Contestant:
    """run: one forward and backward from clean gradients, returns the output [T, M]. gradients: those that it left, by
    name: "x", "router", "gate_up" and "down" of this rank's experts. Experts' are summed over the ranks' tokens, times
    `scale`, and so is the router's."""

    run: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]
    scale: float = 1.0


def step_of(
    layer: nn.Module, x: Tensor, grad: Tensor, after: Callable[[], object] = lambda: None
) -> Callable[[], Tensor]:
    """One forward and backward from clean gradients, then `after`: what the backward leaves to do."""

    def run() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)
        out.backward(grad)
        after()
        return out.detach()

    return run


def simple(problem: Problem, group: dist.ProcessGroup, kind: type[SimpleMoE] = SimpleMoE) -> Contestant:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    router, gate_up, down = problem.weights()
    layer = kind(router, gate_up.chunk(n)[rank], down.chunk(n)[rank], problem.k, group)
    x, grad = problem.inputs(rank)
    x.requires_grad_()
    run = step_of(layer, x, grad, lambda: dist.all_reduce(layer.router.grad, group=group))
    return Contestant(run, lambda: {
        "x": x.grad, "router": layer.router.grad, "gate_up": stacked(layer.gate_up), "down": stacked(layer.down),
    })  # fmt: skip


def stacked(parameters: nn.ParameterList) -> Tensor:
    return torch.stack([p.grad for p in parameters])


class Local(SimpleMoE):
    """`simple` whose rows are not sent: as many zeros arrive at once."""

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return _Pretend.apply(rows, sum(received))


class _Pretend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, received: int) -> Tensor:
        ctx.sent = len(rows)
        return rows.new_zeros(received, rows.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad.new_zeros(ctx.sent, grad.shape[1]), None


def communication(problem: Problem, group: dist.ProcessGroup) -> Callable[[], None]:
    """The four exchanges of rows of a forward and backward, and nothing else."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = []
    for sender in range(n):
        x, _ = problem.inputs(sender)
        chosen = F.linear(x, problem.weights()[0]).topk(problem.k).indices
        counts.append(chosen.flatten().bincount(minlength=problem.experts).view(n, -1).sum(1))
    traffic = torch.stack(counts)
    sent, received = traffic[rank].tolist(), traffic[:, rank].tolist()
    out, back = torch.ones(sum(sent), problem.width), torch.ones(sum(received), problem.width)

    def run() -> None:
        for _ in range(2):
            Exchange.apply(out, received, sent, group)
            Exchange.apply(back, sent, received, group)

    return run


def block(problem: Problem) -> Qwen3MoeSparseMoeBlock:
    """A stock transformers block with the problem's weights."""
    config = Qwen3MoeConfig(
        hidden_size=problem.width, moe_intermediate_size=problem.inner, num_experts=problem.experts,
        num_experts_per_tok=problem.k, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    found = Qwen3MoeSparseMoeBlock(config)
    router, gate_up, down = problem.weights()
    with torch.no_grad():
        found.gate.weight.copy_(router)
        found.experts.gate_up_proj.copy_(gate_up)
        found.experts.down_proj.copy_(down)
    return found


def compiled(problem: Problem, mesh: DeviceMesh, options: moefx.Options) -> tuple[Contestant, Any]:
    """moefx on such a block, and the compiled module."""
    module = block(problem)
    x, grad = (each.unsqueeze(0) for each in problem.inputs(dist.get_rank()))
    x.requires_grad_()
    layer = moefx.compile(module, mesh, options)
    params = {"router": module.gate.weight, "gate_up": module.experts.gate_up_proj,
              "down": module.experts.down_proj}  # fmt: skip
    step = step_of(layer, x, grad)
    return Contestant(
        lambda: step().squeeze(0),
        lambda: {"x": x.grad.squeeze(0), **{name: local(p.grad) for name, p in params.items()}},
        scale=1 / dist.get_world_size(),
    ), layer


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reference(problem: Problem, n: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of rank `rank` of `n`, computed alone on the tokens of all ranks, expert by expert."""
    router, gate_up, down = (w.requires_grad_() for w in problem.weights())
    pairs = [problem.inputs(other) for other in range(n)]
    x, grad = (torch.cat(parts) for parts in zip(*pairs))
    x.requires_grad_()
    weights, chosen = F.linear(x, router).softmax(-1).topk(problem.k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(problem.experts):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, down[expert]) * weights[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, result)
    out.backward(grad)
    mine = {"x": x.grad.chunk(n)[rank], "router": router.grad,
            "gate_up": gate_up.grad.chunk(n)[rank], "down": down.grad.chunk(n)[rank]}  # fmt: skip
    return out.detach().chunk(n)[rank], mine


def worst_difference(contestant: Contestant, expected: tuple[Tensor, Mapping[str, Tensor]]) -> tuple[str, float]:
    """Runs a step. (what, largest difference over largest entry) of the output and all gradients, the worst of
    them; 1 where a shape is another or a number not finite."""
    out, found = contestant.run(), contestant.gradients()
    worst = "output", _difference(out, expected[0])
    for name, wanted in expected[1].items():
        share = 1.0 if name == "x" else contestant.scale
        worst = max(worst, (name, _difference(found[name] / share, wanted)), key=lambda pair: pair[1])
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not found.isfinite().all():
        return 1.0
    return float((found - wanted).abs().max() / wanted.abs().max())
