"""A layer as one opaque call, for as long as AOTAutograd traces the rest of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from moefx.ir.meaning import meaning


class Fakes(Protocol):
    """Who knows what the calls of a trace give, by their number."""

    def outputs(self, call: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """tensors, sizes: what the layer is given."""
        ...

    def differentiable(self, call: int) -> set[int]:
        """The outputs that gradients may come back of."""
        ...

    def with_gradient(self, call: int, given: frozenset[int]) -> list[int]:
        """The inputs that get one, if these outputs have one."""
        ...

    def gradients(self, call: int, given: frozenset[int]) -> list[Tensor]: ...

    def tangent(self, call: int, output: int, grad: Tensor) -> Tensor:
        """A gradient that comes back, as the layer wants it."""
        ...


_running: list[Fakes] = []


@contextlib.contextmanager
def answered_by(fakes: Fakes) -> Iterator[None]:
    _running.append(fakes)
    try:
        yield
    finally:
        _running.pop()


@meaning(lambda tensors, sizes, call: _running[-1].outputs(call, tensors, sizes))
def layer_forward(tensors: list[Tensor], sizes: list[int], call: int) -> list[Tensor]:
    raise AssertionError("a call of a layer is never run")


@meaning(lambda grads, call, given: _running[-1].gradients(call, frozenset(given)))
def layer_backward(grads: list[Tensor], call: int, given: list[int]) -> list[Tensor]:
    raise AssertionError("a call of a layer is never run")


@meaning(
    lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device), gradient=lambda grad, x: grad
)
def hand_on(x: Tensor) -> Tensor:
    """What a layer read, for those that read it after this layer. Their gradient is there before the layer's own, so
    that all are added up in the order in which autograd would."""
    return x.clone()


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: int, *args: Any) -> tuple[Tensor, ...]:
        tensors = [each for each in args if isinstance(each, Tensor)]
        outputs = layer_forward(tensors, [each for each in args if not isinstance(each, Tensor)], call)
        ctx.call = call
        ctx.set_materialize_grads(False)
        differentiable = _running[-1].differentiable(call)
        ctx.mark_non_differentiable(*(out for place, out in enumerate(outputs) if place not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fakes = _running[-1]
        given = [place for place, grad in enumerate(grads) if grad is not None]
        tangents = [fakes.tangent(ctx.call, place, grads[place]) for place in given]
        found = layer_backward(tangents, ctx.call, given)
        gradients: list[Any] = [None] * (len(ctx.needs_input_grad) - 1)
        for place, grad in zip(fakes.with_gradient(ctx.call, frozenset(given)), found):
            gradients[place] = grad
        return None, *gradients


def call_layer(call: int, *args: Any) -> tuple[Tensor, ...]:
    """The outputs of the layer with this number, of tensors and sizes."""
    return _Call.apply(call, *args)
