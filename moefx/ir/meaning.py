"""What a dialect op means: a function in plain torch, the type of its result, and its gradient, at one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from moefx.ir.factors import factors
from moefx.ir.op import LINES


@dataclass(frozen=True)
class Like:
    """What is kept of a tensor whose entries nobody reads again: ops may write to it in the meantime."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def meaning(fake: str | Callable[..., Any], *, dims: str = "",
            gradient: Callable[..., Any] | None = None) -> Callable[[Callable], Any]:  # fmt: skip
    """Makes a function the op `torch.ops.moefx.<its name>`. It must not write to its arguments, nor give one back.

    fake: what it does to dims, as a line of `ir.factors`, which says the result's type as well. Where a line cannot:
    (arguments) -> tensors of the shape, dtype and device of the result; `dims` is the line then, if there is one.
    gradient: (gradient of the result, a list where it is one, arguments) -> that of the first argument, or a tuple of
    those of the first ones; None for what has none. It gets a `Like` in place of each tensor of the first argument.
    Without it the op has no gradient. Both are traced, so what they compute becomes part of the graph.
    """

    def register(function: Callable) -> Any:
        op = torch.library.custom_op(f"moefx::{function.__name__}", function, mutates_args=())
        line = factors(fake if isinstance(fake, str) else dims) if dims or isinstance(fake, str) else None
        op.register_fake(line.fake(function) if isinstance(fake, str) else fake)
        if line is not None:
            LINES[function.__name__] = line
        if gradient is not None:
            op.register_autograd(_backward(gradient), setup_context=_keep_arguments)
        return op

    return register


def sized(x: Tensor, dim: int, size: Any) -> Tensor:
    """A fake like x, but for the size of a dim."""
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def fresh_size(*_: Any) -> Any:
    """The fake of a size that only the running program knows, of an op that gives one."""
    return torch.library.get_ctx().new_dynamic_size()


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    first, *others = inputs
    leaves, ctx.form = tree_flatten((tree_map_only(Tensor, Like.of, first), *others))
    ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in leaves))
    ctx.others = [None if isinstance(each, Tensor) else each for each in leaves]


def _backward(gradient: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        leaves = [other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others)]
        inputs = tree_unflatten(leaves, ctx.form)
        found = gradient(grad, *inputs)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *[None] * (len(inputs) - len(found))

    return backward
