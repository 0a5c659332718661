"""Python's numbers as inputs of a capture: dynamo takes them for constants unless it is told otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo import config as dynamo_config
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import lazy
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

_Lazy = getattr(lazy, "LazyConstantVariable", None)  # torch 2.11 has none: numbers are constants there


@contextlib.contextmanager
def free_numbers(is_free: Callable[[str], bool]) -> Iterator[None]:
    """Captures inside take an int for a symbolic input, and a float for the item of an input of one element, where
    `is_free` says so of the expression that it is read by."""
    if _Lazy is None:
        yield
        return
    original = _Lazy.create

    def create(value: Any, source: Any, **options: Any) -> Any:
        if type(value) not in (int, float) or not is_free(source.name):
            return original(value, source, **options)
        tx = InstructionTranslator.current_tx()
        read, name = tx.output.unspec_variable_map, f"number {source.name}"
        if name not in read:  # of a second read of a float, dynamo would make the tensor that its item is of
            builder = VariableBuilder(tx, source)
            with dynamo_config.patch(specialize_float=False, assume_static_by_default=False):
                read[name] = (builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC) if type(value) is int
                                     else builder.wrap_symfloat(value))  # fmt: skip
        return read[name]

    with mock.patch.object(_Lazy, "create", staticmethod(create)):
        yield


@contextlib.contextmanager
def numbers_of_both() -> Iterator[None]:
    """Captures inside take `max(x.max(), n)`, and min, where n follows from sizes, for the number that it is: dynamo
    has Python compare the tensor, of which no capture knows the value."""
    original = BuiltinVariable._call_min_max_binary

    def call(self: BuiltinVariable, tx: Any, a: Any, b: Any) -> Any:
        if any(isinstance(each, SymNodeVariable) for each in (a, b)):
            a, b = (x.call_method(tx, "item", [], {}) if isinstance(x, TensorVariable) else x for x in (a, b))
        return original(self, tx, a, b)

    with mock.patch.object(BuiltinVariable, "_call_min_max_binary", call):
        yield


def sources_of_numbers(shape_env: Any) -> dict[Any, str]:
    """{symbol of a number or size: the expression that it was read by}."""
    return {symbol: found[0].name for symbol, found in shape_env.var_to_sources.items() if found}


def symbol_of(number: Any) -> Any:
    """The expression that a symbolic number was made with, whatever became of it."""
    return number.node._expr
