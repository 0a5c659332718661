"""accelerate.Accelerator, in scripts that have one: it leaves a compiled model as it is, and saves and loads what moefx
would. Nothing here imports accelerate.

    output_dir/moefx/step-000001/      model and optimizer, by `moefx.checkpoint`
    output_dir/..                      the rest, by accelerate: schedulers, samplers, random states
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moefx import checkpoint
from moefx.errors import UnsupportedUse
from moefx.model.api import AT_COMPILE, CompiledModule
from moefx.model.stand_in import check_processes

_FOLDER = "moefx"
_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")  # types of accelerate that spread models themselves


def install() -> None:
    """Follow accelerate whenever a model is compiled, as it may be imported late."""
    AT_COMPILE.append(follow)


def follow() -> None:
    """Let the methods of Accelerator that look into models know a compiled one, once."""
    kind = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if kind is None or hasattr(kind.prepare, "moefx"):
        return
    for around in (prepare, prepare_model, save_model, save_state, load_state):
        setattr(kind, around.__name__, _method(around, getattr(kind, around.__name__)))


def _method(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self), *args, **kwargs)

    method.moefx = True
    return method


def _is_compiled(model: Any) -> bool:
    return type(model) is CompiledModule


# ---- methods of accelerate.Accelerator; `original` is what they were


def prepare(accelerator: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Raises UnsupportedUse for an Accelerator that spreads models itself."""
    if any(map(_is_compiled, args)) and accelerator.distributed_type.name in _OTHERS:
        raise UnsupportedUse(
            f"an Accelerator of type {accelerator.distributed_type.name} spreads models, and a compiled one is spread",
            hint="start the script by torchrun, without a plugin",
        )
    return original(*args, **kwargs)


def prepare_model(accelerator: Any, original: Callable[..., Any], model: nn.Module,
                  device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:  # fmt: skip
    """In autocast, where that is asked for, and not wrapped. Raises MeshError where accelerate would not give every
    rank of the mesh its own data."""
    if not _is_compiled(model):
        return original(model, device_placement, evaluation_mode)
    check_processes(accelerator.num_processes, model.mesh)
    return original(model, device_placement=False, evaluation_mode=True)


def save_model(accelerator: Any, original: Callable[..., Any], model: nn.Module, save_directory: str | os.PathLike,
               max_shard_size: int | str = "10GB", safe_serialization: bool = True) -> None:  # fmt: skip
    """What `save_safetensors` writes, in place of files that are there."""
    if not _is_compiled(model):
        return original(model, save_directory, max_shard_size, safe_serialization)
    if not safe_serialization:
        raise UnsupportedUse("a compiled model is saved as safetensors", hint="leave safe_serialization=True")
    size = sys.modules["accelerate.utils"].convert_file_size_to_int(max_shard_size)
    return model._save(Path(save_directory), max_file_bytes=size, replace=True)


def save_state(accelerator: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Model and optimizer by `moefx.checkpoint.save`, which takes the place of the one before."""
    found = _held(accelerator)
    if found is None:
        return original(*args, **kwargs)
    with _without(accelerator, *found):
        folder = original(*args, **kwargs)
    before = checkpoint.latest(Path(folder) / _FOLDER) if (Path(folder) / _FOLDER).exists() else None
    step = 1 + (int(before.name.rpartition("-")[2]) if before else 0)
    checkpoint.save(Path(folder) / _FOLDER, found[0], _plain(found[1]), step=step, keep_last=1)
    return folder


def load_state(accelerator: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """What `save_state` has saved, by `moefx.checkpoint.load`."""
    found = _held(accelerator)
    if found is None:
        return original(*args, **kwargs)
    folders: list[str] = []
    handle = accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
    try:
        with _without(accelerator, *found):
            original(*args, **kwargs)
    finally:
        handle.remove()
    checkpoint.load(Path(folders[0]) / _FOLDER, found[0], _plain(found[1]))
    return None


# ---- what an accelerator has prepared


def _held(accelerator: Any) -> tuple[CompiledModule, Any | None] | None:
    """The compiled model, and its optimizer as accelerate wraps it. Raises UnsupportedUse for several."""
    models = [model for model in accelerator._models if _is_compiled(model)]
    if not models:
        return None
    params = {id(param) for model in models for param in model.parameters()}
    optimizers = [each for each in accelerator._optimizers
                  if any(id(param) in params for group in each.param_groups for param in group["params"])]  # fmt: skip
    if len(models) > 1 or len(optimizers) > 1:
        raise UnsupportedUse(
            f"an Accelerator with {len(models)} compiled models and {len(optimizers)} optimizers of them",
            hint="moefx.checkpoint.save and load, for each of them",
        )
    return models[0], (optimizers or [None])[0]


def _plain(optimizer: Any | None) -> torch.optim.Optimizer | None:
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def _without(accelerator: Any, *held: Any) -> Iterator[None]:
    """The accelerator with the others alone."""
    tables = {name: getattr(accelerator, name) for name in ("_models", "_optimizers")}
    try:
        for name, table in tables.items():
            setattr(accelerator, name, [each for each in table if all(each is not one for one in held)])
        yield
    finally:
        for name, table in tables.items():
            setattr(accelerator, name, table)
