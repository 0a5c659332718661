"""Inductor, for functions whose ops are known already. It is imported where it is first needed: that takes seconds."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.printers import PythonPrinter

_COMPILES = "torch._inductor.compile_fx"


def inductor_missing() -> str | None:
    """Why Inductor cannot be used here, in words."""
    return None if importlib.util.find_spec(_COMPILES) is not None else "this build of PyTorch has no Inductor"


def by_inductor(function: Callable, mode: FakeTensorMode, inputs: Sequence[Any]) -> Callable:
    """The function, which takes and gives tensors and numbers, compiled. inputs: fakes of `mode`, and its sizes. What
    sizes have to be beyond that is a condition of `mode` afterwards (`conditions_of`)."""
    compile_fx = importlib.import_module(_COMPILES).compile_fx
    with tracing(TracingContext(mode)), torch.no_grad():
        with mode:
            graph = make_fx(function)(*inputs)
        return compile_fx(graph, list(inputs))


def conditions_of(mode: FakeTensorMode, names: dict[sympy.Symbol, str]) -> list[str]:
    """The conditions on sizes as Python. names: of the symbols."""
    renamed = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
    found = (guard.expr.xreplace(renamed) for guard in mode.shape_env.guards)
    return [PythonPrinter().doprint(each) for each in found if each is not sympy.true]


def is_watched() -> bool:
    """Whether somebody looks at every op that runs."""
    return torch._C._len_torch_dispatch_stack() > 0
