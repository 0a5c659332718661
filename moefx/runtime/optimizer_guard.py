"""Checks at the start of every optimizer step of this process, by one global hook.

    stale parameters   an optimizer built before `moefx.compile` updates tensors that nobody reads: StaleOptimizerError
    stale layouts      state made before experts were re-sharded (a checkpoint loaded before the first call) follows
    loaded state       is looked at by the model whose parameters it is of: `check_state`
    further checks     of the runtime, e.g. gradients that still wait for their synchronisation
    losses             that a closure gives are averaged over the ranks: a line search asks them whether to go on, and
                       all must hear the same

Optimizer.zero_grad is followed, too: what it clears includes gradients that wait. Nothing here keeps a model, an
optimizer or a check alive.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from moefx import _torch_compat as compat
from moefx.errors import CheckpointError, StaleOptimizerError
from moefx.runtime import origins
from moefx.runtime.expert_tensor import ExpertTensor
from moefx.runtime.parameters import follow_layout, layout_changes, replaced_parameters

StepCheck = Callable[[Optimizer], None]

_hooks: list[Any] = []
_checks: list[weakref.ref] = []
_followers: list[weakref.ref] = []
_aligned: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since their last step


def guard_optimizers() -> None:
    """Install the hook; once per process, however often it is called."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        compat.after_zero_grad(_after_zero_grad)
        compat.after_optimizer_load(_loaded.add)


def register_step_check(check: StepCheck) -> None:
    """Call `check(optimizer)`, which may raise, before every optimizer step of this process.

    Held weakly, a bound method through its object: keep it alive for as long as the check is to run.
    """
    _checks.append(weakref.WeakMethod(check) if hasattr(check, "__self__") else weakref.ref(check))


def follow_zero_grad(follower: StepCheck) -> None:
    """Call a method, held weakly, with every optimizer of this process after its zero_grad()."""
    _followers.append(weakref.WeakMethod(follower))


def _after_zero_grad(optimizer: Optimizer) -> None:
    _call(_followers, optimizer)


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if replaced_parameters:
        _refuse_replaced(optimizer)
    _call(_checks, optimizer)
    if optimizer in _loaded or _aligned.get(optimizer) != layout_changes():
        _align_state(optimizer)
        _aligned[optimizer] = layout_changes()
        _loaded.discard(optimizer)
    mesh = next((param.device_mesh for param in _params(optimizer) if isinstance(param, DTensor)), None)
    closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
    if mesh is None or not closures:
        return None

    def averaged(value: Any) -> Any:
        return functools.partial(_averaged, value, optimizer, mesh) if callable(value) else value

    return (args[0], *map(averaged, args[1:])), {name: averaged(value) for name, value in kwargs.items()}


def _averaged(closure: Callable[[], Any], optimizer: Optimizer, mesh: DeviceMesh) -> Any:
    """The loss of all ranks together; what is no loss stays as it is."""
    loss = closure()
    if isinstance(optimizer, torch.optim.LBFGS):
        for param in _params(optimizer):
            param.grad = _to_flatten(param)
    if isinstance(loss, float):
        return _Mean.apply(torch.tensor(loss, dtype=torch.float64, device=mesh.device_type), mesh).item()
    is_plain = isinstance(loss, torch.Tensor) and not isinstance(loss, DTensor)
    return _Mean.apply(loss, mesh) if is_plain and loss.is_floating_point() else loss


def _to_flatten(param: torch.Tensor) -> torch.Tensor | None:
    """A gradient that LBFGS, which joins all of them, may flatten. Where there is none, it would take a plain tensor of
    zeros; and of a DTensor whose rows do not divide, torch has no flat view."""
    if not isinstance(param, DTensor):
        return param.grad
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    whole = [Replicate()] * grad.device_mesh.ndim
    return grad if isinstance(grad, ExpertTensor) else grad.redistribute(placements=whole)


class _Mean(torch.autograd.Function):
    """Over the ranks of a mesh, bit for bit the same on all of them. Its gradient is that of the rank's own value."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        found = value.clone()
        for dim in range(mesh.ndim):
            dist.all_reduce(found, group=mesh.get_group(dim))
        return found.div_(mesh.size())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _call(references: list[weakref.ref], optimizer: Optimizer) -> None:
    """Those that are still there."""
    for reference in list(references):
        check = reference()
        if check is None:
            with contextlib.suppress(ValueError):  # another thread, whose optimizer steps too, was first
                references.remove(reference)
        else:
            check(optimizer)


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_replaced(optimizer: Optimizer) -> None:
    names = [replaced_parameters[param] for param in _params(optimizer) if param in replaced_parameters]
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:5]) + (", ..." if len(names) > 5 else "")
        raise StaleOptimizerError(
            f"{type(optimizer).__name__} holds {len(names)} parameters that moefx.compile(...) replaced: {shown}",
            hint="build the optimizer after moefx.compile(...)",
        )


def was_loaded(optimizer: Optimizer) -> bool:
    """Whether `load_state_dict` was called since the last step."""
    return optimizer in _loaded


def check_state(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Raises CheckpointError if state of one of these parameters holds the part of another rank. No communication."""
    for param in _params(optimizer):
        state = optimizer.state.get(param, {}) if param in names else {}
        for key, value in state.items():
            for leaf in tree_leaves(value):
                wrong = origins.complaint(leaf, param.device_mesh) if isinstance(leaf, DTensor) else None
                if wrong:
                    raise CheckpointError(f"{type(optimizer).__name__}'s loaded `{key}` of `{names[param]}` {wrong}",
                                          hint=origins.HINT)  # fmt: skip


def _align_state(optimizer: Optimizer) -> None:
    """Bring state to the mesh of its parameters, and cut whole state of those that are sharded; local, without
    communication."""
    for param in _params(optimizer):
        if isinstance(param, DTensor):
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                state[name] = tree_map(functools.partial(_aligned_value, param), value)


def _aligned_value(param: DTensor, value: Any) -> Any:
    if not isinstance(value, DTensor) or origins.complaint(value, param.device_mesh):
        return value
    if value.shape == param.shape and origins.is_whole(value) and not origins.same_layout(value, param):
        return follow_layout(param, value)
    return origins.at_home(value, param.device_mesh)
