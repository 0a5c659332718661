"""Every optimizer of torch, and two of one's own, on a model with every kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

D, INNER, EXPERTS = 6, 8, 4
Batch = tuple[Tensor, Tensor]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, INNER), nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """A ModuleList of experts, or stacked ones."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        if stacked:
            self.up = nn.Parameter(torch.randn(EXPERTS, INNER, D) * 0.4)
            self.down = nn.Parameter(torch.randn(EXPERTS, D, INNER) * 0.4)
        else:
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def expert(self, e: int, x: Tensor) -> Tensor:
        if hasattr(self, "experts"):
            return self.experts[e](x)
        return F.linear(F.silu(F.linear(x, self.up[e])), self.down[e])

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = torch.topk(self.router(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(idx == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, choice].unsqueeze(-1))
        return out


class Net(nn.Module):
    """One bias does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(D, INNER), nn.SiLU(), nn.Linear(INNER, D))
        self.listed, self.stacked = Mixture(stacked=False), Mixture(stacked=True)
        self.mlp[2].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (self.mlp, self.listed, self.stacked):
            x = x + layer(x)
        return (x - y).square().mean()


class NewtonSchulz(optim.Optimizer):
    """Muon in the precision of its parameters, of stacks of matrices as well."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:
        with torch.enable_grad():
            closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.mul_(0.9).add_(p.grad)
            p.add_(self.orthogonal(buffer) if p.ndim > 1 else buffer.sign(), alpha=-0.02)

    @staticmethod
    def orthogonal(x: Tensor) -> Tensor:
        is_tall = x.size(-2) > x.size(-1)
        x = x.mT if is_tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(3):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.mT if is_tall else x


class Shampoo(optim.Optimizer):
    """Of matrices; other parameters by plain gradients."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            update = p.grad
            for dim in (0, 1) if p.ndim == 2 else ():
                rows = p.grad if dim == 0 else p.grad.T
                state, gram = self.state[p], rows @ rows.T
                state[dim] = state[dim] + gram if dim in state else gram
                values, vectors = torch.linalg.eigh(state[dim])
                root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
                update = root @ update if dim == 0 else update @ root
            p.add_(update, alpha=-0.02)


def _of_matrices(params: Sequence[Tensor]) -> optim.Optimizer:
    return optim.Muon([p for p in params if p.ndim == 2], lr=0.05)


FOREACH, FUSED = {"foreach": True}, {"fused": True}
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], optim.Optimizer]] = {
    "Adadelta": lambda params: optim.Adadelta(params, lr=1.0),
    "Adadelta foreach": lambda params: optim.Adadelta(params, lr=1.0, **FOREACH),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.05),
    "Adafactor foreach": lambda params: optim.Adafactor(params, lr=0.05, weight_decay=0.1, **FOREACH),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "Adagrad foreach": lambda params: optim.Adagrad(params, lr=0.05, **FOREACH),
    "Adagrad fused": lambda params: optim.Adagrad(params, lr=0.05, **FUSED),
    "Adam": lambda params: optim.Adam(params, lr=0.05),
    "Adam fused": lambda params: optim.Adam(params, lr=0.05, amsgrad=True, **FUSED),
    "AdamW foreach": lambda params: optim.AdamW(params, lr=0.05, maximize=True, **FOREACH),
    "Adamax": lambda params: optim.Adamax(params, lr=0.05),
    "Adamax foreach": lambda params: optim.Adamax(params, lr=0.05, **FOREACH),
    "ASGD": lambda params: optim.ASGD(params, lr=0.05),
    "ASGD foreach": lambda params: optim.ASGD(params, lr=0.05, **FOREACH),
    "LBFGS": lambda params: optim.LBFGS(params, lr=0.1, max_iter=3),
    "LBFGS strong_wolfe": lambda params: optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": _of_matrices,
    "NAdam": lambda params: optim.NAdam(params, lr=0.05),
    "NAdam foreach": lambda params: optim.NAdam(params, lr=0.05, **FOREACH),
    "RAdam": lambda params: optim.RAdam(params, lr=0.05),
    "RAdam foreach": lambda params: optim.RAdam(params, lr=0.05, **FOREACH),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.05, centered=True, momentum=0.5),
    "RMSprop foreach": lambda params: optim.RMSprop(params, lr=0.05, centered=True, momentum=0.5, **FOREACH),
    "Rprop": lambda params: optim.Rprop(params, lr=0.05),
    "Rprop foreach": lambda params: optim.Rprop(params, lr=0.05, **FOREACH),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD foreach": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, **FOREACH),
    "SGD fused": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, **FUSED),
    "NewtonSchulz": NewtonSchulz,
    "Shampoo": Shampoo,
}
ACROSS = ["Adafactor", "Adafactor foreach", "LBFGS strong_wolfe", "Muon", "Rprop", "Rprop foreach", "SGD fused",
          "Adagrad fused", "NewtonSchulz", "Shampoo"]  # fmt: skip


def batch(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(7, D, generator=generator, dtype=torch.float64) for _ in range(2))


def train(model: nn.Module, optimizer: optim.Optimizer, data: Callable[[int], list[Batch]], steps: int = 2) -> None:
    """On the mean loss of the batches of each step. In one of them, an expert has no gradient: the first, but for fused
    SGD, which in eager, too, has momentum of all parameters or of none."""
    idle = int(optimizer.defaults.get("fused") is True and isinstance(optimizer, optim.SGD))
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            model.zero_grad()
            losses = [model(*each) for each in data(step)]
            loss = sum(losses) / len(losses)
            loss.backward()
            if step == idle:
                model.get_parameter("listed.experts.1.up.weight").grad = None
            return loss

        optimizer.step(closure)
    model.zero_grad()
