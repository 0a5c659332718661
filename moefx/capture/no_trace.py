"""Runs of a model that leave no trace in Python: what a forward does is learned from them, before it is done for real.

What they change is put back where it can be reached from the model: attributes of modules and of plain objects that
modules have; attributes of their classes; numbers, containers and own objects that are global variables in the files of
their forwards; items of lists, dicts, sets and deques among all these. What a forward prints, writes to a file or keeps
in another file's variables is there twice.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from moefx.capture import random_states

CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, complex)
_LEAVES = (str, bytes, type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType,
           types.BuiltinFunctionType, type(None), *_NUMBERS)  # fmt: skip
_FOREIGN = ("torch", "moefx", "threading", "logging")
_ABSENT = object()


@contextlib.contextmanager
def kept(model: nn.Module, *, runs: bool = False) -> Iterator[None]:
    """What is done to a model in here leaves no trace in Python, nor in random numbers but torch's own.

    runs: its forward runs in here, which may also write to buffers and plain tensors, and draw from iterators.
    """
    before = _Snapshot(model, runs)
    try:
        with random_states.kept(model):
            yield
    finally:
        before.restore()


class _Snapshot:
    """Of what there is before a run, shallow copies, object by object."""

    def __init__(self, model: nn.Module, runs: bool) -> None:
        self._attributes: list[tuple[dict, dict]] = []  # what objects have, and had
        self._containers: list[tuple[Any, Any]] = []
        self._variables: list[tuple[Any, dict[str, Any]]] = []  # of classes, and global ones
        self._recorders: dict[int, _Recorder] = {}
        self._tensors: list[tuple[Tensor, Tensor]] | None = [] if runs else None
        self._seen = {id(p) for p in model.parameters()}
        for module in model.modules():
            self._note_attributes(module.__dict__)
        for kind in {c for module in model.modules() for c in type(module).__mro__}:
            if kind.__module__.partition(".")[0] not in (*_FOREIGN, "builtins"):
                self._note_class(kind)
        for own, _ in self._attributes if runs else ():
            own.update({n: self._recorders.setdefault(id(v), _Recorder(v)) for n, v in own.items() if is_iterator(v)})

    def _note_class(self, kind: type) -> None:
        own = {name: item for name, item in vars(kind).items() if not name.startswith("__")}
        self._variables.append((kind, {n: v for n, v in own.items() if isinstance(v, (*_NUMBERS, Tensor, type(None)))}))
        forward = own.get("forward")
        if isinstance(forward, types.FunctionType):
            names = forward.__globals__
            counts = {n: v for n, v in names.items() if isinstance(v, _NUMBERS) and not isinstance(v, bool)}
            self._variables.append((names, counts))
            own |= {n: v for n, v in names.items() if not n.startswith("__") and (
                isinstance(v, (*CONTAINERS, Tensor)) or type(v).__module__ == names.get("__name__"))}  # fmt: skip
        self._note(own.values())

    def _note_attributes(self, own: dict[str, Any]) -> None:
        self._attributes.append((own, dict(own)))
        self._note(own.values())

    def _note(self, items: Any) -> None:
        """What is reachable from here."""
        pending = list(items)
        while pending:
            item = pending.pop()
            if isinstance(item, _LEAVES) or id(item) in self._seen:
                continue
            self._seen.add(id(item))
            if isinstance(item, Tensor):
                if self._tensors is not None and not item.is_inference():
                    self._tensors.append((item, item.detach().clone()))
                continue
            if isinstance(item, CONTAINERS):
                self._containers.append((item, copy.copy(item)))
            if isinstance(item, (*CONTAINERS, tuple)):
                pending.extend(item.values() if isinstance(item, dict) else item)
            elif type(item).__module__.partition(".")[0] not in _FOREIGN:
                own = getattr(item, "__dict__", None)
                if isinstance(own, dict):
                    self._attributes.append((own, dict(own)))
                    pending.extend(own.values())

    def restore(self) -> None:
        """Only what is another value now."""
        for own, before in self._attributes:
            for name, item in before.items():
                if id(item) in self._recorders:
                    before[name] = self._recorders[id(item)].rest()
            if not _is_same(own, before):
                own.clear()
                own.update(before)
        for container, items in self._containers:
            if not _is_same(container, items):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(items)
        for owner, before in self._variables:
            for name, item in before.items():
                if isinstance(owner, dict):
                    owner[name] = item
                elif vars(owner).get(name, _ABSENT) is not item:
                    setattr(owner, name, item)
        for tensor, content in self._tensors or ():
            tensor.data.copy_(content)  # no write to what a backward of before may need


def _is_same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(x is y and u is v for (x, u), (y, v) in zip(a.items(), b.items()))
    return a == b if isinstance(a, set) else all(x is y for x, y in zip(a, b))


def is_iterator(item: Any) -> bool:
    return isinstance(item, Iterator) and type(item).__module__ in ("builtins", "itertools")


class _Recorder:
    """In the place of an iterator, notes what is drawn, so that it can be drawn again."""

    def __init__(self, items: Iterator) -> None:
        self._items, self._drawn = items, []

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> Any:
        self._drawn.append(next(self._items))
        return self._drawn[-1]

    def rest(self) -> Iterator:
        """What there was to draw."""
        return itertools.chain(self._drawn, self._items) if self._drawn else self._items
