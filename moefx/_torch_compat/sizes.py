"""Symbolic sizes: what torch knows of them."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic


def size_hints(mode: FakeTensorMode) -> dict[Any, int]:
    """The example sizes that the symbols of inputs were traced with."""
    env = mode.shape_env
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {symbol: int(size) for symbol, size in values.items()}


def learned_sizes(mode: FakeTensorMode) -> int:
    """How many symbols were found to be something else."""
    return len(mode.shape_env.replacements)


def conditions(mode: FakeTensorMode) -> tuple[int, int, int]:
    """How much is known of sizes. Ops may add to it."""
    env = mode.shape_env
    return len(env.replacements), sum(map(len, env.deferred_runtime_asserts.values())), len(env.guards)


def range_of(mode: FakeTensorMode, symbol: sympy.Symbol) -> Any:
    """What numbers a size may be."""
    return mode.shape_env.var_to_range.get(symbol)


def new_symbol(mode: FakeTensorMode, name: str, hint: int | None) -> torch.SymInt:
    """A size of its own: backed by the example `hint`, or known only from data if there is none."""
    env = mode.shape_env
    if hint is None:
        return env.create_unbacked_symint()
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)
