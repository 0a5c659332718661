"""Checks at the start of every optimizer step of this process, by one global hook.

    stale parameters   an optimizer built before `moefx.compile` updates tensors that nobody reads: StaleOptimizerError
    stale layouts      state made before experts were re-sharded (a checkpoint loaded before the first call) follows
    further checks     of the runtime, e.g. gradients that still wait for their synchronisation

Optimizer.zero_grad is followed, too: what it clears includes gradients that wait. Nothing here keeps a model, an
optimizer or a check alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from moefx import _torch_compat as compat
from moefx.errors import StaleOptimizerError
from moefx.runtime.parameters import follow_layout, is_replicated, layout_changes, replaced_parameters

StepCheck = Callable[[Optimizer], None]

_hooks: list[Any] = []
_checks: list[weakref.ref] = []
_followers: list[weakref.ref] = []
_aligned: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def guard_optimizers() -> None:
    """Install the hook; once per process, however often it is called."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        compat.after_zero_grad(_after_zero_grad)


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


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if replaced_parameters:
        _refuse_replaced(optimizer)
    if _aligned.get(optimizer) != layout_changes():
        _align_state(optimizer)
        _aligned[optimizer] = layout_changes()
    _call(_checks, optimizer)


def _call(references: list[weakref.ref], optimizer: Optimizer) -> None:
    """Those that are still there."""
    for reference in list(references):
        check = reference()
        if check is None:
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


def _align_state(optimizer: Optimizer) -> None:
    """Cut replicated state of parameters that were sharded since it was made; local, without communication."""
    for param in _params(optimizer):
        if not isinstance(param, DTensor) or is_replicated(param):
            continue
        state = optimizer.state.get(param, {})
        for name, value in state.items():
            if isinstance(value, DTensor) and value.shape == param.shape and is_replicated(value):
                state[name] = follow_layout(param, value)
