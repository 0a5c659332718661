"""Values of Python in a forward: what it reads besides tensors, and what it leaves behind.

A graph has the numbers in it that attributes and global variables had when it was captured; `PythonState` sees when
they have changed since, so that the model is captured again. What the forward sets (`self.l_aux = ..`) is set again in
every call, by the code that dynamo wrote for what it returns; `check_writes` refuses what that code cannot do right.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import enum
import inspect
import random
import re
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moefx import _torch_compat as compat
from moefx.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_TABLES = ("._parameters", "._buffers", "._modules")
_GONE = object()
_CONTAINERS = (list, dict, set, deque)
_ABSENT = (AttributeError, KeyError, IndexError, TypeError)


class PythonState:
    """The values that a captured forward of `model` read from attributes of modules and from global variables."""

    def __init__(self, model: nn.Module, gm: torch.fx.GraphModule) -> None:
        reads, scope = compat.python_reads(gm)
        mine = [name for name, found in scope["L"].items() if found is model]
        self._scope = {"L": dict.fromkeys(mine, model), "G": scope["G"]}
        tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        numbers, constants = [], []
        for path in dict.fromkeys(map(_plain_path, reads)):
            tree = ast.parse(path, mode="eval").body
            if not _is_path(tree, mine) or path.endswith(".training"):  # that is told apart otherwise
                continue
            try:
                found = eval(path, dict(self._scope))  # an expression of names, attributes and constants
            except _ABSENT:
                continue
            if isinstance(found, Tensor) and id(found) not in tensors:
                constants.append(path)
            elif _is_plain(found):
                numbers.append(path)
        self.paths = [*numbers, *constants]
        self._read_numbers, self._read_tensors = _reader(numbers), _reader(constants)
        self._numbers, self._tensors = self._read_numbers(**self._scope), self._read_tensors(**self._scope)

    def changed(self) -> str | None:
        """The first value that is another one than it was when the forward was captured."""
        try:
            numbers, tensors = self._read_numbers(**self._scope), self._read_tensors(**self._scope)
            if numbers == self._numbers and all(map(_is, tensors, self._tensors)):
                return None
        except (*_ABSENT, RuntimeError, ValueError):  # gone, or tensors now, which do not compare to one bool
            pass
        return next((spoken(path) for path, old in zip(self.paths, (*self._numbers, *self._tensors))
                     if not _is_same(old, self.value(path))), None)  # fmt: skip

    def value(self, path: str) -> Any:
        """What is there now; `_GONE` if there is nothing."""
        try:
            return eval(path, dict(self._scope))
        except _ABSENT:
            return _GONE


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """A run of a model in here leaves no trace in the attributes of its modules, in the lists and dicts that these are,
    and in Python's random numbers."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    contents = {id(v): (v, copy.copy(v)) for _, own in before for v in own.values() if isinstance(v, _CONTAINERS)}
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        for module, own in before:
            module.__dict__.clear()
            module.__dict__.update(own)
        for container, items in contents.values():
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def _is(a: object, b: object) -> bool:
    return a is b


def _is_plain(found: Any) -> bool:
    return isinstance(found, _PLAIN) or (isinstance(found, tuple) and all(map(_is_plain, found)))


def _plain_path(path: str) -> str:
    return re.sub(r"\.__dict__\['(\w+)'\]", r".\1", path)


def _is_path(tree: ast.expr, local: Iterable[str]) -> bool:
    """Whether an expression takes attributes and items of the model or of a global variable."""
    while isinstance(tree, (ast.Attribute, ast.Subscript)):
        if isinstance(tree, ast.Subscript) and not isinstance(tree.slice, (ast.Constant, ast.UnaryOp)):
            return False
        tree, before = tree.value, tree
        if isinstance(tree, ast.Name):
            name = before.slice.value if isinstance(before, ast.Subscript) else None
            return (tree.id == "L" and name in local) or (tree.id == "G" and not str(name).startswith("__"))
    return False


def _reader(paths: list[str]) -> Callable[..., tuple]:
    """A function of L and G that gives the values at these paths; what they have in common is looked up once."""
    names: dict[str, str] = {"L": "L", "G": "G"}
    lines: list[str] = []

    def name(tree: ast.expr) -> str:
        text = ast.unparse(tree)
        if text not in names:
            source, rest = name(tree.value), text.removeprefix(ast.unparse(tree.value))
            names[text] = f"v{len(names)}"
            lines.append(f"{names[text]} = {source}{rest}")
        return names[text]

    found = [name(ast.parse(path, mode="eval").body) for path in paths]
    space: dict[str, Any] = {}
    body = "".join(f"    {line}\n" for line in lines)
    exec(f"def read(L, G):\n{body}    return ({''.join(f'{each}, ' for each in found)})", space)
    return space["read"]


def spoken(path: str) -> str:
    """`layers.0.temp` for L['self']._modules['layers']._modules['0'].temp."""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", re.sub(r"^G\['(\w+)'\]", r"global \1", path))
    return re.sub(r"^L\['\w+'\]\.?", "", path)


def check_writes(model: nn.Module, gm: torch.fx.GraphModule, state: PythonState, changed: list[str],
                 replay: Callable[[], object]) -> None:  # fmt: skip
    """Refuse a forward that changes what it reads, and a list or dict that was there before: what dynamo noted is right
    for the values at the time of the capture alone. What was None may become a number once.

    changed: the paths of what is changed. replay: sets what the forward sets, of fake tensors. Raises CaptureError.
    """
    scope = state._scope
    if (name := compat.global_written(gm)) is not None:
        raise CaptureError(f"the forward sets the global variable `{name}`", hint="set an attribute of a module")
    for path in dict.fromkeys(map(_plain_path, changed)):
        try:
            owner = eval(path, dict(scope))
        except (*_ABSENT, NameError):
            continue
        where = _module_of(path, scope)
        if isinstance(owner, _CONTAINERS) and not path.endswith(_TABLES):
            raise CaptureError(f"the forward changes `{spoken(path)}`, a {type(owner).__name__} that outlives it",
                               where=where, hint="set an attribute, or note values outside of the forward")  # fmt: skip
        if isinstance(owner, nn.Module):
            _check_buffers_stay(owner, path)
    if not changed:
        return
    with kept(model):
        replay()
        for path, before in zip(state.paths, (*state._numbers, *state._tensors)):
            after = state.value(path)
            is_first = before is None and not isinstance(after, Tensor)
            if not is_first and not _is_same(before, after):
                raise CaptureError(f"the forward reads `{spoken(path)}` and sets it anew",
                                   where=_module_of(path, scope),
                                   hint="keep it in a buffer and write to that: self.n.add_(1)")  # fmt: skip


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(b, _PLAIN) and type(a) is type(b) and a == b) or (
        isinstance(b, tuple) and isinstance(a, tuple) and len(a) == len(b) and all(map(_is_same, a, b)))  # fmt: skip


def _module_of(path: str, scope: Mapping[str, Any]) -> str | None:
    while path:
        try:
            found = eval(path, dict(scope))
        except (*_ABSENT, NameError):
            return None
        if isinstance(found, nn.Module):
            return f"{spoken(path) or 'the model'}, of class {type(found).__name__}"
        path = path.rpartition(".")[0]
    return None


def _check_buffers_stay(module: nn.Module, path: str) -> None:
    """`self.seen = self.seen + x` gives a module another tensor for its buffer, which no captured graph shows."""
    name = next((n for n in _assigned(type(module)) if n in module._buffers), None)
    if name is not None:
        where = f"{spoken(path) or 'the model'}, of class {type(module).__name__}"
        raise CaptureError(f"the forward puts another tensor in the place of the buffer `{name}`", where=where,
                           hint=f"write to the buffer: self.{name}.copy_(..)")  # fmt: skip


def _assigned(kind: type) -> list[str]:
    """Which attributes of itself the methods of a module class assign, but for its __init__."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return []
    methods = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "__init__"]
    return [
        n.attr for f in methods for n in ast.walk(f)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name) and n.value.id == "self"
    ]  # fmt: skip
