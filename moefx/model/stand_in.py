"""A module that stands for the user's model: it has the model's attributes, its class and the signature of its forward,
so that code that asks a model what it is gets the answer that the plain model would give."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefx import _torch_compat as compat
from moefx.errors import MeshError, UnsupportedUse
from moefx.model import guards
from moefx.weights.transformers_names import is_of_transformers


class signed_like_the_model:
    """Of a StandIn's method: when it is looked up, it shows the signature of the model's forward."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(self, method)

    def __get__(self, owner: StandIn | None, kind: type) -> Callable[..., Any]:
        if owner is None:
            return self._method
        bound = functools.partial(self._method, owner)
        bound.__signature__ = owner._signature
        return bound


class StandIn(nn.Module):
    """Has the submodules, parameters, buffers and attributes of `model`, and keeps its own in its `__dict__`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.__dict__.update(_inner=model, mesh=mesh, _signature=inspect.signature(model.forward))
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = model.__dict__[table]
        self.training = model.training

    @property
    def __class__(self) -> type:
        """The model's, for `isinstance` and for who reads labels off it (transformers); `type()` says the true one."""
        inner = self.__dict__.get("_inner")
        return type(self) if inner is None else type(inner)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_inner" not in self.__dict__:
                raise
            if name in compat.ASKED_BY_WRAPPERS:
                guards.refuse_wrapper(compat.ASKED_BY_WRAPPERS[name])
            if name == "generate" and is_of_transformers(self._inner):
                return self._generate
            return guards.method(name, getattr(self._inner, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """What users set is the model's, whose forward may read it."""
        super().__setattr__(name, value) if self._is_own(name) else setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if self._is_own(name) else delattr(self._inner, name)

    def _is_own(self, name: str) -> bool:
        return "_inner" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        guards.refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        guards.refuse_copy()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        guards.refuse_wrapper("torch.compile")

    def train(self, mode: bool = True) -> StandIn:
        self._inner.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StandIn:
        """`.to(..)`, `.half()` and the like pass where they would change nothing. Raises UnsupportedUse otherwise."""
        tensors = [*self._inner.named_parameters(), *self._inner.named_buffers()]
        for name, tensor in tensors:
            held = compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
            if held.is_meta or fn(held) is not held:
                raise UnsupportedUse(
                    f"the parameters of a compiled model would be converted or moved (`{name}`, {held.dtype} on "
                    f"{held.device}, is the first)",
                    hint="call .to(...), .half() or .cuda() before moefx.compile",
                )
        return self

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Tells transformers.Trainer that the model places its parameters and averages its gradients itself, and that
        all ranks save together. Raises MeshError where Trainer would not give every rank of the mesh its own data."""
        accelerate = sys.modules.get("accelerate")
        if accelerate is not None:
            check_processes(accelerate.PartialState().num_processes, self.mesh)
        return True


def check_processes(processes: int, mesh: DeviceMesh) -> None:
    """Raises MeshError where accelerate, which Trainer uses, does not know of just the ranks of the mesh."""
    world = dist.get_world_size()
    if processes != world or mesh.size() != world:
        raise MeshError(
            f"accelerate spreads the data over {processes} processes, but the mesh has {mesh.size()} ranks "
            f"in a world of {world}",
            hint="start all processes by torchrun or accelerate launch, and use a mesh of all of them",
        )
