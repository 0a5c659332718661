"""State dicts of a compiled model. Before a rank changes anything, all of them look whether what they were given fits
the model, and is their own part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefx.errors import CheckpointError
from moefx.runtime import origins, parameters
from moefx.runtime.together import Ranks


def load(own: Mapping[str, Any], given: Mapping[str, Any], strict: bool, ranks: Ranks) -> tuple[list[str], list[str]]:
    """Load what is `given` into `own`, a state dict of the model with its parameters, in place; a collective of all
    ranks. Returns the keys that are missing, and those that are unexpected.

    Plain tensors and whole DTensors are those of all ranks; of a spread one every rank gives its part. Raises
    CheckpointError, and loads nothing, if it does not fit on one rank.
    """
    missing, unexpected = [k for k in own if k not in given], [k for k in given if k not in own]
    ranks.each("loading a state dict", lambda: _check_fits(own, given, missing, unexpected, strict))
    fitting = [key for key in own if key in given]
    gathered = [key for key in fitting if _is_gathered(own[key], given[key])]  # ranks wait for one another in these
    ranks.check_alike("loading a state dict", missing=missing, gathered=gathered)
    with torch.no_grad():
        for key in fitting:
            _load(own[key], given[key])
    return missing, unexpected


def cut_what_is_loaded(model: nn.Module) -> None:
    """Let torch's `load_state_dict` of the plain model, or of a part of it, load whole tensors into distributed
    parameters: every rank takes its part. No communication."""
    for module in model.modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(_cut)


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module._parameters.items():
        value = state_dict.get(key := prefix + name)
        if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != param.shape:
            continue
        if isinstance(value, DTensor) and not origins.is_whole(value):
            _check_fits({key: param}, {key: value}, [], [], False)
            state_dict[key] = origins.at_home(value, param.device_mesh)
        else:
            whole = parameters.local(value) if isinstance(value, DTensor) else value
            state_dict[key] = parameters.wrap_gradient(param, parameters.take_local(param, whole.to(param.device)))


def _check_fits(own: Mapping[str, Any], given: Mapping[str, Any], missing: list[str], unexpected: list[str],
                strict: bool) -> None:  # fmt: skip
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the state dict does not fit: missing {missing[:5]}, unexpected {unexpected[:5]}",
            hint="pass strict=False to load what fits",
        )
    for key, target in own.items():
        if key not in given or not isinstance(target, Tensor):
            continue
        value = given[key]
        if not isinstance(value, Tensor):
            raise CheckpointError(f"`{key}` is a {type(value).__name__}, not a tensor")
        if target.shape != value.shape:
            raise CheckpointError(f"`{key}` has shape {tuple(value.shape)}, the model wants {tuple(target.shape)}")
        if isinstance(value, DTensor) and not origins.is_whole(value):
            wrong = "is spread over ranks, the model's is not"
            if isinstance(target, DTensor):
                wrong = origins.complaint(value, target.device_mesh)
            if wrong:
                raise CheckpointError(f"`{key}` {wrong}", hint=f"{origins.HINT}; or save p.full_tensor() of the live "
                                      "parameters, called by all ranks (of a loaded part it is wrong)")  # fmt: skip


def _is_gathered(target: Any, value: Any) -> bool:
    is_spread = isinstance(value, DTensor) and not origins.is_whole(value)
    return isinstance(target, DTensor) and is_spread and not origins.same_layout(target, value)


def _load(target: Any, value: Any) -> None:
    if not isinstance(target, Tensor):
        return
    if isinstance(value, DTensor) and origins.is_whole(value):
        value = parameters.local(value)
    if not isinstance(target, DTensor):
        target.copy_(value)
    elif isinstance(value, DTensor):
        target.copy_(origins.at_home(value, target.device_mesh))
    else:
        parameters.load_full_(target, value.to(target.dtype))
