"""What stands for functions of torch while a model is captured, since dynamo cannot follow them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx import Graph
from torch.nn.utils import parametrize

from moefx._torch_compat import statically_known_true
from moefx._torch_compat.numbers import numbers_of_both


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """All that stand in for every model."""
    with (symbolic_one_hot(), comparisons(), numbers_of_both(), trusted_distributions(), parametrized_for_a_call(),
          modules_stay()):  # fmt: skip
        yield


@contextlib.contextmanager
def symbolic_one_hot() -> Iterator[None]:
    """torch's one_hot fixes its number of classes; a capacity often is one and follows from the batch."""
    original = F.one_hot

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if statically_known_true(num_classes == -1):
            return original(tensor)
        return torch.ops.moefx.one_hot(tensor, num_classes)

    with mock.patch.object(F, "one_hot", one_hot):
        yield


@contextlib.contextmanager
def comparisons() -> Iterator[None]:
    """Of all of two tensors: to dynamo, the answers are no numbers that tensors have."""

    def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08,
                 equal_nan: bool = False) -> bool:  # fmt: skip
        return torch.isclose(input, other, rtol, atol, equal_nan).all().item()

    def equal(input: Tensor, other: Tensor) -> bool:
        return input.shape == other.shape and (input == other).all().item()

    with mock.patch.multiple(torch, allclose=allclose, equal=equal):
        yield


@contextlib.contextmanager
def trusted_distributions() -> Iterator[None]:
    """torch.distributions check their arguments by values, which no capture has."""
    with mock.patch.object(Distribution, "_validate_args", False):
        yield


@contextlib.contextmanager
def parametrized_for_a_call() -> Iterator[None]:
    """A forward may parametrize a module and undo it (PEFT's LoRA of stacked experts). torch changes the module's class
    for that, which dynamo cannot follow: here the module just holds the other value as long."""

    original, original_remove = parametrize.register_parametrization, parametrize.remove_parametrizations

    class Parametrized:
        def __init__(self, original: Tensor) -> None:
            self.original = original

        def __len__(self) -> int:
            return 1

    def register(module: nn.Module, tensor_name: str, parametrization: nn.Module, *, unsafe: bool = False) -> nn.Module:
        held = module._parameters.get(tensor_name)
        if held is None:  # a buffer, or parametrized for good
            return original(module, tensor_name, parametrization, unsafe=unsafe)
        if not hasattr(module, "parametrizations"):
            module.parametrizations = {}
        module.parametrizations[tensor_name] = Parametrized(held)
        module._parameters[tensor_name] = parametrization(held)
        return module

    def remove(module: nn.Module, tensor_name: str, leave_parametrized: bool = True) -> nn.Module:
        if leave_parametrized:  # the forward would change the parameter for good
            return original_remove(module, tensor_name)
        module._parameters[tensor_name] = module.parametrizations.pop(tensor_name).original
        if not module.parametrizations:
            del module.parametrizations
        return module

    standing_in = {"register_parametrization": register, "remove_parametrizations": remove,
                   "cached": contextlib.nullcontext}  # fmt: skip
    with mock.patch.multiple(parametrize, **standing_in):
        yield


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """`expert.to(x.device)` in a forward, where the expert is there already, writes every parameter into itself, which
    dynamo takes for a new value. Here it does nothing, and is an error where it would do something."""

    def staying(name: str) -> Callable[..., nn.Module]:
        original = getattr(nn.Module, name)

        def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if "memory_format" in kwargs or not torch.compiler.is_dynamo_compiling():  # another thread may move its own
                return original(module, *args, **kwargs)
            for tensor in (*module.parameters(), *module.buffers()):
                new = getattr(tensor, name)(*args, **kwargs)
                is_cast = new.dtype != tensor.dtype and (tensor.is_floating_point() or name == "type")
                if is_cast or new.device != tensor.device:
                    raise ModuleMoves(f"{tensor.dtype} on {tensor.device} becomes {new.dtype} on {new.device}")
            return module

        return stay

    with mock.patch.multiple(nn.Module, **{name: staying(name) for name in _MOVES}):
        yield


_MOVES = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type")


class ModuleMoves(Exception):
    """A forward moves or converts a module."""


def drop_moves(graph: Graph) -> None:
    """Tensors that `modules_stay` moved, to see whether they do."""
    for node in reversed(graph.nodes):
        if node.op == "call_method" and node.target in _MOVES and not node.users:
            graph.erase_node(node)


@contextlib.contextmanager
def fresh_tensors_need_no_gradient() -> Iterator[None]:
    """Dynamo takes no torch.zeros(.., requires_grad=True). Nobody reads the gradient of what a forward makes anew."""

    def plain(original: Any) -> Any:
        def create(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            return original(*args, **kwargs)

        return create

    names = ("zeros", "ones", "empty", "full", "zeros_like", "ones_like")
    with mock.patch.multiple(torch, **{name: plain(getattr(torch, name)) for name in names}):
        yield


ZEROS = torch.zeros  # torch's own
