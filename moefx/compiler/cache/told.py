"""Values of Python as digests that are equal in another process: what is not plain data, or known code, has none.

    told({"width": 4, "act": F.silu})          "9c2e.."
    told(threading.Lock())                     raises Untold
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import pathlib
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_BASES = (object, *_CONTAINERS, OrderedDict, defaultdict, str, int, float)
_RANDOM = ("_original_object_hash",)  # attributes that are another number in every process: of transformers
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


class Untold(Exception):
    """Something of which nobody can tell in another process whether it is the same; the text says what."""


def digest(*parts: str | bytes) -> str:
    """32 hex digits of several texts, told apart."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(f"{len(data)}:".encode() + data)
    return found.hexdigest()[:32]


def of_code(code: types.CodeType) -> str:
    """What a function does, wherever it stands."""
    constants = [of_code(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount,
             code.co_kwonlyargcount, code.co_flags, code.co_qualname if hasattr(code, "co_qualname") else code.co_name)
    return digest(code.co_code, repr(names), *constants)


def _constant(found: Any) -> str:
    return repr(sorted(map(repr, found))) if isinstance(found, frozenset) else repr(found)


def of_file(path: str) -> str | None:
    """Of a source file; None if there is none."""
    try:
        state = os.stat(path)
        return _of_file(path, state.st_mtime_ns, state.st_size)
    except OSError:
        return None


@functools.lru_cache(maxsize=10_000)
def _of_file(path: str, *_: int) -> str:
    with open(path, "rb") as file:
        return digest(file.read())


def of_class(kind: type) -> str:
    """By its name, the code of its methods and the files that these come from; what is torch's or Python's by name."""
    found = [f"{kind.__module__}:{kind.__qualname__}"]
    for each in kind.__mro__:
        module = sys.modules.get(each.__module__)
        file = getattr(module, "__file__", None)
        if each.__module__.partition(".")[0] in ("torch", "builtins") or file is None or is_of_python(file):
            found.append(f"{each.__module__}:{each.__qualname__}")
            continue
        found += [f"{each.__module__}:{each.__qualname__}", str(of_file(file))]
        found += [f"{name}={of_code(code)}" for name, attribute in sorted(vars(each).items())
                  for code in codes_of(attribute)]  # fmt: skip
    return digest(*found)


def is_of_python(file: str) -> bool:
    """Whether a file came with Python, whose version says what is in it."""
    return "site-packages" not in file and file.startswith(os.path.dirname(os.__file__) + os.sep)


def codes_of(attribute: Any) -> list[types.CodeType]:
    """Of a function, method, property or decorated function."""
    found, seen = [], set()
    rest = [attribute]
    while rest:
        each = rest.pop()
        if id(each) in seen or len(seen) > 100:
            continue
        seen.add(id(each))
        if isinstance(each, property):
            rest += [each.fget, each.fset]
        elif isinstance(each, (staticmethod, classmethod, types.MethodType)):
            rest.append(each.__func__)
        elif isinstance(each, functools.partial):
            rest.append(each.func)
        elif isinstance(each, types.FunctionType):
            found.append(each.__code__)
            rest += [cell.cell_contents for cell in each.__closure__ or () if _is_full(cell)]
    return found


def _is_full(cell: types.CellType) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False


class Teller:
    """Tells values, in which modules and tensors of a model stand for their places. places: {id: place}."""

    def __init__(self, places: Mapping[int, str]) -> None:
        self.places = places
        self._known: dict[int, tuple[str, Any]] = {}
        self._open: dict[int, int] = {}
        self._classes: dict[type, str] = {}

    def of_class(self, kind: type) -> str:
        if kind not in self._classes:
            self._classes[kind] = of_class(kind)
        return self._classes[kind]

    def told(self, found: Any) -> str:
        """Raises Untold."""
        if id(found) in self.places:
            return f"the model's {self.places[id(found)]}"
        if isinstance(found, _PLAIN) and type(found) in _PLAIN:
            return f"{type(found).__name__} {found!r}"
        if isinstance(found, _OF_TORCH):
            return repr(found)
        if id(found) in self._open:
            return f"again {self._open[id(found)]}"
        if id(found) not in self._known:
            self._open[id(found)] = len(self._open)
            try:
                self._known[id(found)] = self._compound(found), found
            finally:
                del self._open[id(found)]
        return self._known[id(found)][0]

    def _compound(self, found: Any) -> str:
        for kinds, tell in self._KINDS:
            if isinstance(found, kinds):
                return digest(*tell(self, found))
        return digest(*self._object(found))

    def _function(self, found: types.FunctionType) -> list[str]:
        cells = [self._cell(cell) for cell in found.__closure__ or ()]
        given = [self.told(found.__defaults__), self.told(found.__kwdefaults__)]
        return ["function", found.__module__ or "", found.__qualname__, of_code(found.__code__), *given, *cells]

    def _cell(self, cell: types.CellType) -> str:
        try:
            return self.told(cell.cell_contents)
        except ValueError:
            return "empty"

    def _method(self, found: types.MethodType) -> list[str]:
        return ["method", self.told(found.__func__), self.told(found.__self__)]

    def _partial(self, found: functools.partial) -> list[str]:
        return ["partial", self.told(found.func), self.told(found.args), self.told(found.keywords)]

    def _class(self, found: type) -> list[str]:
        return ["class", self.of_class(found)]

    def _module(self, found: types.ModuleType) -> list[str]:
        return ["module", found.__name__, str(of_file(getattr(found, "__file__", None) or ""))]

    def _enum(self, found: enum.Enum) -> list[str]:
        return ["enum", self.of_class(type(found)), found.name]

    def _array(self, found: Any) -> list[str]:
        array = np.asarray(found)
        if array.dtype.hasobject or array.nbytes > 1 << 20:
            raise Untold(f"an array of {array.dtype}")
        return ["array", type(found).__name__, str(array.dtype), str(array.shape), array.tobytes().hex()]

    def _tensor(self, found: Any) -> list[str]:
        raise Untold(f"a {type(found).__name__} that is not the model's")

    def _built_in(self, found: Any) -> list[str]:
        owner = getattr(found, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            raise Untold(f"{found!r}")
        return ["built in", str(getattr(found, "__module__", "")), found.__qualname__]

    def _pattern(self, found: re.Pattern) -> list[str]:
        return ["pattern", repr(found.pattern), str(found.flags)]

    def _path(self, found: pathlib.PurePath) -> list[str]:
        return ["path", str(found)]

    def _items(self, found: Any) -> list[str]:
        if isinstance(found, (dict, types.MappingProxyType)):
            return [part for pair in found.items() for part in map(self.told, pair)]
        told = [self.told(each) for each in found]
        return sorted(told) if isinstance(found, (set, frozenset)) else told

    def _container(self, found: Any) -> list[str]:
        if type(found) in (*_CONTAINERS, OrderedDict, types.MappingProxyType, torch.Size):
            return [type(found).__name__, *self._items(found)]
        if type(found) is defaultdict:
            return ["defaultdict", self.told(found.default_factory), *self._items(found)]
        return self._object(found)

    def _object(self, found: Any) -> list[str]:
        """One all of whose state Python shows."""
        kind = type(found)
        strange = next((each for each in kind.__mro__ if each not in _BASES and not _is_written_in_python(each)), None)
        if strange is not None or not hasattr(found, "__dict__"):
            raise Untold(f"a {kind.__module__}.{kind.__qualname__}")
        slots = [name for each in kind.__mro__ for name in _slots(each) if hasattr(found, name)]
        held = vars(found) | {name: getattr(found, name) for name in slots}
        held = {name: each for name, each in held.items() if name not in _RANDOM}
        inner = self._items(found) if isinstance(found, _CONTAINERS) else []
        inner += [repr(each(found)) for each in (str, int, float) if isinstance(found, each)]
        shown = [part for name in sorted(held) for part in (name, self.told(held[name]))]
        return ["object", self.of_class(kind), *inner, *shown]

    _KINDS: tuple[tuple[Any, Callable[[Teller, Any], list[str]]], ...] = (
        (enum.Enum, _enum), (types.FunctionType, _function), (types.MethodType, _method),
        (functools.partial, _partial), (type, _class), (types.ModuleType, _module), ((np.generic, np.ndarray), _array),
        ((Tensor, nn.Module, torch.Generator), _tensor), (_BUILT_IN, _built_in), (re.Pattern, _pattern),
        (pathlib.PurePath, _path), ((*_CONTAINERS, types.MappingProxyType), _container),
    )  # fmt: skip


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_written_in_python(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.endswith(".py") and not kind.__module__.startswith(("threading", "weakref", "contextvars", "io"))
