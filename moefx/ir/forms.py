"""What an op does, in words without names: equal words are equal computations of other inputs.

Sizes that only data tells are numbered in the order in which they come up, so that the second layer's rows read as the
first's. Other symbols, of the program's inputs, are what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from moefx.ir.op import expr


class Word(str):
    """Printed as it is."""

    __repr__ = str.__str__


class Writer:
    """Writes types and arguments. symbols: those of sizes that only data tells, with the names that they got."""

    def __init__(self) -> None:
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def type(self, found: Any) -> str:
        if isinstance(found, Tensor):
            sizes, strides = (", ".join(map(self.size, each)) for each in (found.shape, found.stride()))
            is_parameter = "parameter " if isinstance(found, torch.nn.Parameter) else ""
            gradient = " with gradient" if found.requires_grad else ""
            offset = self.size(found.storage_offset())
            where = f"strides [{strides}] from {offset} on {found.device}"
            return f"{is_parameter}{found.dtype} [{sizes}] {where}{gradient}"
        if isinstance(found, (tuple, list)):
            return f"({', '.join(map(self.type, found))})"
        return self.size(found) if isinstance(found, (torch.SymInt, int)) else type(found).__name__

    def size(self, found: Any) -> str:
        if isinstance(found, int):
            return str(found)
        size = expr(found)
        given = data_symbols(size)
        for symbol in given:
            if symbol not in self.symbols:
                self.symbols[symbol] = sympy.Symbol(f"U{len(self.symbols)}", **symbol.assumptions0)
        return _text(size, tuple(map(self.symbols.__getitem__, given)))

    def arguments(self, args: tuple, kwargs: dict[str, Any], of_node: Callable[[Node], str]) -> str:
        def word(each: Any) -> Any:
            if isinstance(each, Node):
                return Word(of_node(each))
            return Word(self.size(each)) if isinstance(each, torch.SymInt) else each

        return str(map_aggregate((args, kwargs), word))


@functools.lru_cache(maxsize=20_000, typed=True)  # few sizes, of very many tensors
def data_symbols(size: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    """Those that only data tells, in the order of their numbers."""
    found = [symbol for symbol in size.free_symbols if symbol.name.startswith("u")]
    return tuple(sorted(found, key=lambda each: (len(each.name), each.name)))


@functools.lru_cache(maxsize=20_000, typed=True)
def _text(size: sympy.Expr, new: tuple[sympy.Symbol, ...]) -> str:
    """With other symbols in the place of those that only data tells."""
    return str(size.xreplace(dict(zip(data_symbols(size), new))))


def function(node: Node) -> str:
    """The function's own name, which no other has, and which is the same on all ranks."""
    target = node.target
    if isinstance(target, str):
        return f".{target}"
    if hasattr(target, "_schema"):
        return str(target)
    if not hasattr(target, "__qualname__"):  # an object that is called, as those for numpy
        return f"{type(target).__module__}.{type(target).__qualname__}({vars(target)})"
    return f"{target.__module__}.{target.__qualname__}"
