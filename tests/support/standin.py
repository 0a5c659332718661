"""A stand-in for `moefx.compile` that is right by construction, and wrong ones, to test the tests with.

It keeps a whole replica on each rank and averages gradients after each backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Replicated:
    """The eager model with gradients averaged and buffer changes summed over all ranks."""

    scale = 1.0

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.mesh, self.sync = model, mesh, True
        self.reduced: dict[str, Tensor] = {}  # the part of each gradient that all ranks share already

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        start = {n: b.clone() for n, b in self.model.named_buffers()}
        out = self.model(*args, **kwargs)
        self.sum_buffers(start)
        if out.loss is not None and out.loss.requires_grad:
            out.loss.register_hook(self.at_backward)
        return out

    def at_backward(self, _: Tensor) -> None:
        if self.sync:
            torch.autograd.Variable._execution_engine.queue_callback(self.reduce)

    def reduce(self) -> None:
        for name, p in self.model.named_parameters():
            ranks = torch.tensor(float(p.grad is not None))
            dist.all_reduce(ranks)
            if ranks:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                shared = self.reduced.get(name, torch.zeros_like(p))
                fresh = p.grad - shared
                dist.all_reduce(fresh)
                p.grad = shared + fresh * (self.scale / dist.get_world_size())
                self.reduced[name] = p.grad.clone()

    def sum_buffers(self, start: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                change = b - start[name]
                dist.all_reduce(change)
                b.copy_(start[name] + change)

    def zero_grad(self) -> None:
        self.reduced.clear()
        self.model.zero_grad()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True

    def close(self) -> None:
        pass


class Doubled(Replicated):
    """Gradients summed twice."""

    scale = 2.0


class NotAveraged(Replicated):
    """Every rank keeps its own gradient."""

    def reduce(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


class LastBatchOnly(Replicated):
    """Of accumulated gradients, only the last micro-batch's is averaged, the rest stays the rank's own."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.reduced = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


class BuffersApart(Replicated):
    """Every rank keeps its own statistics."""

    def sum_buffers(self, start: dict[str, Tensor]) -> None:
        pass


class NoExpertBias(Replicated):
    """The biases of experts are dropped: as zeros in the forward, and without gradient."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        self.biases = [p for n, p in model.named_parameters() if "experts" in n and n.endswith("bias")]
        with torch.no_grad():
            for p in self.biases:
                p.zero_()

    def reduce(self) -> None:
        super().reduce()
        for p in self.biases:
            p.grad = None


class WrongExpert(Replicated):
    """Two experts of equal shape have changed places."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        experts = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) >= 8)
        state = experts[0].state_dict(keep_vars=False)
        swapped = {n: t.clone() for n, t in state.items()}
        experts[0].load_state_dict(experts[1].state_dict())
        experts[1].load_state_dict(swapped)


class Frozen(Replicated):
    """One expert never gets a gradient."""

    def reduce(self) -> None:
        super().reduce()
        for n, p in self.model.named_parameters():
            if "experts.3." in n:
                p.grad.zero_()
