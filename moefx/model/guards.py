"""What a compiled model cannot follow is refused: replaced parameters, copies, some methods of the plain model."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from moefx import _torch_compat as compat
from moefx import rooms
from moefx.errors import CaptureError, ModelError, UnsupportedUse
from moefx.options import Options

_METHODS = {
    "generate": "compiled.save_safetensors(folder), then build the plain model again and load them",
    "push_to_hub": "compiled.save_safetensors(folder), then push what it wrote",
    "resize_token_embeddings": "resize the plain model before moefx.compile",
}


class Intact:
    """The modules and parameters of a model as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self.tables: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.found: list[Any] = []
        self.paths: list[str] = []
        self.owners: list[tuple[str, dict[str, Any], int]] = []
        for path, module in model.named_modules():
            for table in (module._modules, module._parameters):
                self.owners.append((path, table, len(table)))
                self.tables += [table] * len(table)
                self.names += table
                self.found += table.values()
                self.paths += [f"{path}.{name}" if path else name for name in table]

    def check(self) -> None:
        """Raises UnsupportedUse if one of them is another object now, or if there are more."""
        now = map(dict.get, self.tables, self.names)
        if all(map(operator.is_, now, self.found)) and all(len(table) == size for _, table, size in self.owners):
            return
        for table, name, found, path in zip(self.tables, self.names, self.found, self.paths):
            if table.get(name) is not found:
                kind = "module" if isinstance(found, nn.Module) else "parameter"
                raise UnsupportedUse(
                    f"the {kind} `{path}` was replaced after moefx.compile",
                    where=path,
                    hint="write new values into parameters (torch.no_grad() and copy_), or change, tie, parametrize or "
                    "adapt the plain model before it is compiled",
                )
        for path, table, size in self.owners:
            if len(table) != size:
                kind = "module" if isinstance(list(table.values())[-1], nn.Module) else "parameter"
                raise UnsupportedUse(
                    f"the {kind} `{list(table)[-1]}` was added after moefx.compile: its gradients would be each rank's "
                    "own",
                    where=path or "the model itself",
                    hint="add it to the plain model before it is compiled, or keep it outside of the compiled one",
                )


def check_call(intact: Intact) -> None:
    """Before every call. Anomaly mode looks for NaN by an op that DTensor does not have."""
    intact.check()
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UnsupportedUse("torch.autograd.set_detect_anomaly(True) cannot look into the gradients of DTensors",
                             hint="pass check_nan=False and look at p.grad.to_local(), or look for the NaN with the "
                             "plain model")  # fmt: skip


def check_not_wrapped(model: nn.Module) -> None:
    """Raises ModelError for a model that something else distributes or compiles."""
    for name, module in model.named_modules():
        where = name or "the model itself"
        if compat.is_dynamo_compiled(module):
            raise ModelError("the model is wrapped by torch.compile", where=where, hint="pass the uncompiled module")
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel") or compat.is_fsdp(module):
            raise ModelError(
                f"the model is wrapped by {kind}",
                where=where,
                hint="pass the plain module: moefx averages gradients and spreads experts itself",
            )


def method(name: str, own: Any) -> Any:
    """An attribute of the plain model, or what refuses to be called in its place."""
    if name not in _METHODS or not callable(own):
        return own

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedUse(f"{name} of a compiled model", hint=_METHODS[name])

    return refuse


def refuse_wrapper(name: str) -> NoReturn:
    """Of a compiled model."""
    hint = "use it as it is: it is compiled, spreads its experts and averages its gradients itself"
    raise UnsupportedUse(f"{name} around a compiled model", hint=hint)


def _refuse_call(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedUse("the plain model was called after moefx.compile, which spread its parameters over ranks",
                         hint="call what moefx.compile returned")  # fmt: skip


class Plain:
    """The model that was compiled, which from now on moefx alone calls: others get UnsupportedUse."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._calls = model, 0
        compat.on_call(model, _refuse_call)

    @contextlib.contextmanager
    def callable(self) -> Iterator[None]:
        if not self._calls:
            compat.on_call(self._model, None)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                compat.on_call(self._model, _refuse_call)


def refuse_copy() -> NoReturn:
    """Of a module that holds process groups, by copy or pickle."""
    raise UnsupportedUse(
        "a compiled model would be copied or pickled",
        hint="save it by moefx.checkpoint or its state_dict(), or copy the plain model before moefx.compile; an "
        "average of the weights can be a dict of p.detach().clone()",
    )


def check_may_be_blocks(options: Options, why: CaptureError) -> None:
    """Raises CaptureError where a model cannot be compiled block by block. why: it cannot be captured as a whole."""
    if (found := rooms.only_whole(options)) is not None:
        raise CaptureError(f"{why.what} (nor can it be compiled block by block: {found[0]})", where=why.where,
                           hint=f"{why.hint}; or {found[1]}") from why  # fmt: skip
