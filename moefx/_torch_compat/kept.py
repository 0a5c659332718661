"""What of a capture can be seen again in another process."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as fx_config
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.utils._sympy import functions as size_functions

__all__ = ["global_scope", "module_of_alias", "settings", "size_functions", "traced_code"]

_PLAIN = (bool, int, float, str, type(None))


def traced_code(gm: torch.fx.GraphModule) -> frozenset[types.CodeType] | None:
    """Of every function that a capture went through; None where torch does not tell."""
    captured = gm._dynamo_bytecode_flatten.out.graph_capture_output
    found = getattr(captured, "traced_code", None) or getattr(captured.output_graph, "traced_code", None)
    return frozenset(found) if found else None


def settings() -> str:
    """Those of torch's compilers, as far as they are plain."""
    found = [f"{config.__name__}.{name}={value!r}" for config in (dynamo_config, functorch_config, fx_config)
             for name, value in sorted(config.get_config_copy().items()) if isinstance(value, _PLAIN)]  # fmt: skip
    return "\n".join(found)


class _Globals:
    """Global variables of a forward, as they are when they are asked for, and modules by dynamo's names."""

    def __init__(self, live: dict[str, Any]) -> None:
        self._live = live

    def __getitem__(self, name: str) -> Any:
        module = None if name in self._live else module_of_alias(name)
        return self._live[name] if module is None else sys.modules[module]


def global_scope(model: nn.Module) -> _Globals:
    """What a capture of the model calls G, before there was one."""
    return _Globals(getattr(model.forward, "__globals__", {}))


def module_of_alias(name: str) -> str | None:
    """The module that dynamo's name for one among the globals of a forward stands for."""
    alias = re.fullmatch(r"__import_(\w+)", name)
    return None if alias is None else alias.group(1).replace("_dot_", ".")
