"""Fake values of ops that were run before on equal inputs: what the first layer computed, the others need not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from moefx import _torch_compat as compat
from moefx.ir.copies import Fakes, memory_of
from moefx.ir.forms import Writer
from moefx.ir.op import expr
from moefx.ir.writes import writes


@dataclass(frozen=True)
class _Known:
    """The first result, and the sizes that only data tells of its inputs, in the order in which the form names them.

    memory: for every tensor of the result, the input that it is a view of; None: it has memory of its own."""

    result: Any
    symbols: tuple[sympy.Symbol, ...]
    type: str
    memory: tuple[int | None, ...]


class Results:
    """Of ops on fakes, by what an op is told and the types of its inputs."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def of(self, node: Node, inputs: list[Any], mode: Any) -> Word | None:
        """What to ask for the result of this op, in the modes that are on, and to tell it. None: it must be run."""
        if node.op not in ("call_function", "call_method") or not all(
                isinstance(each, (Tensor, torch.SymInt, int)) for each in inputs):  # fmt: skip
            return None
        writer, places = Writer(), {each: place for place, each in enumerate(node.all_input_nodes)}
        how = writer.arguments(node.args, node.kwargs, lambda each: f"<{places[each]}")
        types = tuple(map(writer.type, inputs))
        ranges = tuple(str(compat.range_of(mode, symbol)) for symbol in writer.symbols)
        return Word(self._known, (node.target, how, types, ranges, _modes()), writer, inputs, mode)


class Word:
    """One op on its inputs."""

    def __init__(self, known: dict[Any, _Known], key: Any, writer: Writer, inputs: list[Any], mode: Any) -> None:
        self._all, self.key, self.writer, self.inputs, self.mode = known, key, writer, inputs, mode
        self.symbols = tuple(writer.symbols)
        self.before = compat.conditions(mode)

    def result(self, present: Any) -> Any:
        """That of an equal op, with the sizes of this one: what is present if it is of its type, else in memory of its
        own. None: run the op."""
        known = self._all.get(self.key)
        if known is None:
            return None
        if self._type(present) == known.type and self._memory(present) == known.memory:
            return present
        if any(place is not None for place in known.memory):
            return None
        return Fakes(self.mode, dict(zip(known.symbols, self.symbols)), ()).of(known.result)

    def note(self, result: Any) -> None:
        """Keep the result of a run, unless it says more than its type: it has sizes that no input has, is a parameter,
        or torch has learned something of the sizes."""
        kind = self._type(result)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if kind is None or compat.conditions(self.mode) != self.before or any(
                isinstance(each, nn.Parameter) for each in results):  # fmt: skip
            return
        tensors, memory = _tensors(result), self._memory(result)
        own = {memory_of(each) for each, place in zip(tensors, memory) if place is None}
        if all(place is not None or expr(each.storage_offset()) == 0 for each, place in zip(tensors, memory)) and (
                len(own) == memory.count(None)):  # fmt: skip
            self._all[self.key] = _Known(result, self.symbols, kind, memory)

    def _type(self, result: Any) -> str | None:
        """In the words of the inputs; None if these do not tell it."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(each, (torch.SymInt, Tensor)) for each in results):
            return None
        found = self.writer.type(result)
        return found if len(self.writer.symbols) == len(self.symbols) else None

    def _memory(self, result: Any) -> tuple[int | None, ...]:
        places = {memory_of(each): place for place, each in enumerate(self.inputs) if isinstance(each, Tensor)}
        return tuple(places.get(memory_of(each)) for each in _tensors(result))


def _modes() -> tuple[Any, ...]:
    """What else decides the type of a result: graphs turn gradients, and autocast, on and off."""
    casts = tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                  for device in ("cpu", "cuda"))  # fmt: skip
    return torch.is_grad_enabled(), casts


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, Tensor)]


def run_each(graph: Graph) -> set[Node]:
    """The nodes that must be run: those that write, and what they write to. All, inside of vmap and the like."""
    found: set[Node] = set()
    for node in graph.nodes:
        if compat.is_of_functorch(node.target):
            return {*graph.nodes}
        if node.op in ("call_function", "call_method") and writes(node):
            found.add(node)
            before = node.args[0] if node.args else None
            while isinstance(before, Node) and before not in found:
                found.add(before)
                before = before.args[0] if before.args else None
    return found
