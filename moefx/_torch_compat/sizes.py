"""Symbolic sizes: what torch knows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


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


@contextlib.contextmanager
def several_rows(mode: FakeTensorMode) -> Iterator[None]:
    """What torch cannot know of a size that only data decide, it is told as for two or more: what it takes itself where
    it is not to ask. Only what holds for every size may depend on it."""
    env = mode.shape_env
    asked = env.evaluate_expr

    def answered(expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return asked(expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            known = {each: env.var_to_range[each] for each in expr.free_symbols}
            found = bound_sympy(expr, {each: ValueRanges(max(2, was.lower), was.upper) if was.lower >= 0 else was
                                       for each, was in known.items()})  # fmt: skip
            if not found.is_singleton():
                raise
            return found.lower

    with mock.patch.object(env, "evaluate_expr", answered):
        yield


def new_symbol(mode: FakeTensorMode, name: str, hint: int | None) -> torch.SymInt:
    """A size of its own: backed by the example `hint`, or known only from data if there is none."""
    env = mode.shape_env
    if hint is None:
        return env.create_unbacked_symint()
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)
