"""Values of Python in a forward: what it reads besides tensors, and what it leaves behind.

A graph has the numbers in it that attributes and global variables had when it was captured; `PythonState` sees when
they have changed since, so that the model is captured again. What the forward sets (`self.l_aux = ..`) is set again in
every call, by the code that dynamo wrote for what it returns; `check_writes` refuses what that code cannot do right.
"""

from __future__ import annotations

import ast
import copy
import enum
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moefx import _torch_compat as compat
from moefx.capture import buffers
from moefx.capture.no_trace import CONTAINERS, is_iterator, kept
from moefx.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, np.generic)
_TABLES = ("._parameters", "._buffers", "._modules", "._non_persistent_buffers_set")
ROOT_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GONE = object()
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_CALLED = ("len", "tuple", "hasattr", "type", "dict")  # in the expressions that stand for what is read
_ABSENT = (AttributeError, KeyError, IndexError, TypeError)


class PythonState:
    """The values that a captured forward of `model` read from attributes of modules, from lists and dicts, from the
    variables of its closure and from global ones. `paths` are expressions."""

    def __init__(self, model: nn.Module, reads: Iterable[str], hooks: Iterable[str], found: Mapping[str, Any]) -> None:
        """reads, hooks, found: see `compat.python_reads`."""
        self.model = model
        mine = _Locals(model, found["L"])
        self.scope = {"L": mine, "G": found["G"]}
        tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
        values, identities, methods = [], [], {}
        for path in dict.fromkeys(map(plain_path, reads)):
            tree = ast.parse(path, mode="eval").body
            if not _is_of(mine, tree) or path.endswith(".training"):  # that is told apart otherwise
                continue
            if isinstance(tree, ast.Compare) and path.endswith("__dict__") and not self._hides_a_value(tree):
                owner, name = ast.unparse(tree.comparators[0].value), tree.left.value
                if isinstance(self.value(owner), nn.Module):
                    methods[f"{owner}.{name}"] = self.value(owner).__dict__, name
                continue
            value = self.value(path)
            if _is_plain(value):
                values.append(path)
            elif _is_noted(value, path) and id(value) not in tensors and value is self.value(path):
                identities.append(path)
        self._paths_of_values = values
        self._read_values = _reader(values)
        self._values = self._read_values(**self.scope)
        self._note_identities(identities)
        self._methods = [path for path, (own, name) in methods.items() if name not in own]  # those of the class
        self._owners, self._names = zip(*(methods[path] for path in self._methods)) if self._methods else ((), ())
        self._root = self._of_root()
        self._hooks = {path: self.value(path) for path in map(plain_path, hooks)}
        self._all_hooks = [hooks for hooks in self._hooks.values() if hooks is not _GONE]

    def of(self, model: nn.Module) -> PythonState:
        """The same of another model of the same code."""
        other = copy.copy(self)
        mine = {name: model for name, found in self.scope["L"].items() if found is self.model}
        other.model, other.scope = model, self.scope | {"L": _Locals(model, mine)}
        return other

    def _hides_a_value(self, tree: ast.Compare) -> bool:
        """Whether 'name' in x.__dict__ says if x has a value of its own for one of its class."""
        owner = self.value(ast.unparse(tree.comparators[0].value))
        return _is_plain(getattr(type(owner), tree.left.value, _GONE))

    def look_again(self) -> None:
        """Functions that were in place for the capture alone are gone now, and so are their closures."""
        self._note_identities([path for path in self._paths_of_identities if self.value(path) is not _GONE])
        self._root = self._of_root()

    def _note_identities(self, paths: list[str]) -> None:
        self._paths_of_identities = paths
        self._read_identities = _reader(paths)
        self._identities = self._read_identities(**self.scope)

    def _of_root(self) -> tuple:
        """A forward of its own and the hooks of the captured module, of which dynamo notes nothing."""
        own = self.model.__dict__
        return own.get("forward"), *(tuple(own[name].values()) for name in ROOT_HOOKS)

    def changed(self) -> str | None:
        """The first value that is another one than it was when the forward was captured."""
        if any(self._all_hooks):
            return next(spoken(path) for path, hooks in self._hooks.items() if hooks)
        if any(map(dict.__contains__, self._owners, self._names)):
            owners = zip(self._methods, self._owners, self._names)
            return next(spoken(path) for path, own, name in owners if name in own)
        if (now := self._of_root()) != self._root:
            return next(name for name, a, b in zip(("forward", *ROOT_HOOKS), now, self._root) if a != b)
        try:
            values, identities = self._read_values(**self.scope), self._read_identities(**self.scope)
            if values == self._values and all(map(_is, identities, self._identities)):
                return None
        except (*_ABSENT, RuntimeError, ValueError):  # gone, or tensors now, which do not compare to one bool
            pass
        return next((spoken(path) for path, old in self.seen if not _is_same(old, self.value(path))), None)

    @property
    def told_apart_by(self) -> tuple:
        """Equal for captures that found the same, whatever sizes they are for."""
        return tuple(self._values), tuple(map(id, self._identities))

    @property
    def seen(self) -> Iterator[tuple[str, Any]]:
        """(path, what was there)."""
        return zip((*self._paths_of_values, *self._paths_of_identities), (*self._values, *self._identities))

    @property
    def numbers(self) -> list[tuple[str, int | float]]:
        """(path, number) of what belongs to no module of torch's own."""
        found = [(path, number) for path, number in self.seen if type(number) in (int, float)]
        return [(path, number) for path, number in found if not self._is_fixed(path)]

    def _is_fixed(self, path: str) -> bool:
        """Whether nobody sets what is there: an attribute of torch's modules, or of a frozen dataclass."""
        owner = self.value(path.rpartition(".")[0]) if path.endswith(tuple("abcdefghijklmnopqrstuvwxyz_")) else None
        frozen = getattr(getattr(type(owner), "__dataclass_params__", None), "frozen", False)
        return frozen or (isinstance(owner, nn.Module) and _is_of_torch(type(owner).__module__))

    def changed_number(self) -> str | None:
        """The path of the number that is another one, of the same type, than when the forward was captured."""
        for path, old in self.seen:
            if not _is_same(old, new := self.value(path)):
                return path if type(old) in (int, float) and type(new) is type(old) else None
        return None

    def value(self, path: str) -> Any:
        """What is there now; `_GONE` if there is nothing."""
        try:
            return eval(path, dict(self.scope))  # an expression of names, attributes and constants
        except (*_ABSENT, ValueError):  # the last: of an empty cell
            return _GONE


class _Locals(dict):
    """Local variables of the captured forward that outlive a call: the module, and the variables of its closure, which
    are what they are when they are asked for."""

    def __init__(self, model: nn.Module, found: Mapping[str, Any]) -> None:
        names = getattr(getattr(model.forward, "__code__", None), "co_freevars", ())
        self.cells = dict(zip(names, getattr(model.forward, "__closure__", None) or ()))
        super().__init__({name: value for name, value in found.items() if value is model or name in self.cells})

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents if name in self.cells else super().__getitem__(name)


def _is(a: object, b: object) -> bool:
    return a is b


def _is_plain(found: Any) -> bool:
    return isinstance(found, _PLAIN) or (isinstance(found, tuple) and all(map(_is_plain, found)))


def plain_path(path: str) -> str:
    return re.sub(r"\.__dict__\['(\w+)'\]", r".\1", path)


def _is_of(local: Collection[str], tree: ast.expr) -> bool:
    """Whether an expression is about attributes and items of these local variables or of global ones."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    items = [node for node in nodes if isinstance(node, ast.Subscript)]
    first = [(node.value.id, getattr(node.slice, "value", None)) for node in items if isinstance(node.value, ast.Name)]
    return bool(first) and names <= {"L", "G", *_CALLED} and (
        all(isinstance(node.slice, (ast.Constant, ast.UnaryOp)) for node in items)
        and all(name in local if root == "L" else _is_users(str(name)) for root, name in first))  # fmt: skip


def _is_users(name: str) -> bool:
    """Whether a global name is the user's: his own, or that of a module of his whose functions the forward calls."""
    module = compat.module_of_alias(name)
    return not name.startswith("__") if module is None else not _is_of_torch(module)


def _is_noted(value: Any, path: str) -> bool:
    """Whether something is a tensor, an array or a function, among global variables one that is not torch's."""
    is_torchs = path.startswith("G[") and _is_of_torch(getattr(value, "__module__", None))
    return isinstance(value, (Tensor, np.ndarray)) or (isinstance(value, _FUNCTIONS) and not is_torchs)


def _is_of_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in ("torch", "builtins")


def _reader(paths: list[str]) -> Callable[..., tuple]:
    """A function of L and G that gives the values at these paths; what they have in common is looked up once."""
    shared = _Shared()
    found = [ast.unparse(shared.visit(ast.parse(path, mode="eval").body)) for path in paths]
    space: dict[str, Any] = {}
    body = "".join(f"    {line}\n" for line in shared.lines)
    exec(f"def read(L, G):\n{body}    return ({''.join(f'{each}, ' for each in found)})", space)
    return space["read"]


class _Shared(ast.NodeTransformer):
    """Takes expressions apart into assignments, one for equal parts."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.lines: list[str] = []

    def _named(self, node: ast.expr) -> ast.expr:
        text = _written(self.generic_visit(node))
        if text not in self.names:
            self.names[text] = f"v{len(self.names)}"
            self.lines.append(f"{self.names[text]} = {text}")
        return ast.Name(self.names[text])

    visit_Attribute = visit_Subscript = visit_Call = _named


def _written(node: ast.expr) -> str:
    """As `ast.unparse`, which takes ten times as long, of what is read off a name."""
    owner = getattr(node, "value", None)
    if isinstance(owner, ast.Name):
        if isinstance(node, ast.Attribute):
            return f"{owner.id}.{node.attr}"
        if isinstance(node.slice, ast.Constant):
            return f"{owner.id}[{node.slice.value!r}]"
    return ast.unparse(node)


def spoken(path: str) -> str:
    """`layers.0.temp` for L['self']._modules['layers']._modules['0'].temp."""
    path = re.sub(r"\bG\['(\w+)'\]", lambda found: f"global {compat.module_of_alias(found[1]) or found[1]}", path)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"\bL\['\w+'\]\.?", "", path)


def check_writes(model: nn.Module, gm: torch.fx.GraphModule, state: PythonState, changed: list[str],
                 replay: Callable[[], object]) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """Refuse a forward that changes what it reads, and a list or dict that was there before: what dynamo noted is right
    for the values at the time of the capture alone. What was None may become a number once, and what was not there
    anything. So may what a library keeps in a dict of its own: the next call, which finds it, is compiled anew.

    changed: the paths of what is changed. replay: sets what the forward sets, of fake tensors. Returns which
    buffers it replaces, and by what. Raises CaptureError.
    """
    scope = state.scope
    if (name := compat.global_written(gm)) is not None:
        raise CaptureError(f"the forward sets the global variable `{name}`", hint="set an attribute of a module")
    filled: list[str] = []
    for path in dict.fromkeys(map(plain_path, changed)):
        try:
            owner = eval(path, dict(scope))
        except (*_ABSENT, NameError):
            continue
        where = _module_of(path, scope)
        if is_iterator(owner):
            raise CaptureError(f"the forward draws from the iterator `{spoken(path)}`, which would give the same in "
                               "every call", where=where, hint="draw outside of the forward")  # fmt: skip
        if type(owner) is dict and _is_of_library(path, model) and _fills(owner, model, replay):
            filled.append(path)
            continue
        if isinstance(owner, CONTAINERS) and not path.endswith(_TABLES):
            raise CaptureError(f"the forward changes `{spoken(path)}`, a {type(owner).__name__} that outlives it",
                               where=where, hint="set an attribute of the module instead (self.aux_loss = loss), and "
                               "read it after the forward")  # fmt: skip
    if not changed:
        return {}
    tables = buffers.tables(model)
    with kept(model):
        try:
            replay()
        except RuntimeError as error:  # of a number that only values have
            places = dict.fromkeys(_module_of(plain_path(path), scope) for path in changed)
            raise CaptureError("what the forward sets in Python depends on values of tensors",
                               where="; ".join(filter(None, places)) or None,
                               hint="set tensors: self.seen = x.detach().max()") from error  # fmt: skip
        replaced = buffers.replaced(model, tables)
        for path, before in state.seen:
            after = state.value(path)
            is_first = path.startswith("hasattr(") or (before is None and not isinstance(after, Tensor))
            is_first = is_first or any(each in path for each in filled)
            if not is_first and not _is_same(before, after):
                raise CaptureError(f"the forward reads `{spoken(path)}` and also sets it",
                                   where=_module_of(path, scope),
                                   hint="keep it in a buffer and write to that: self.n.add_(1)")  # fmt: skip
    return replaced


def _is_of_library(path: str, model: nn.Module) -> bool:
    """Whether a path begins at a global variable of a file that has no module of the model."""
    name = re.match(r"G\['(\w+)'\]", path)
    home = compat.module_of_alias(name[1]) if name else None
    return home is not None and home not in {type(module).__module__ for module in model.modules()}


def _fills(cache: dict, model: nn.Module, replay: Callable[[], object]) -> bool:
    """Whether a forward only puts what is new into a dict, and no tensors: what it found there stays."""
    before = dict(cache)
    try:
        with kept(model):
            replay()
    except RuntimeError:
        return False
    finally:
        after = dict(cache)
        cache.clear()
        cache.update(before)
    new = [after[key] for key in after.keys() - before.keys()]
    return all(after.get(key, _GONE) is value for key, value in before.items()) and not any(
        isinstance(each, (Tensor, nn.Module, *CONTAINERS)) for each in new)  # fmt: skip


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(b, _PLAIN) and type(a) is type(b) and a == b) or (
        isinstance(b, tuple) and isinstance(a, tuple) and len(a) == len(b) and all(map(_is_same, a, b)))  # fmt: skip


def _module_of(path: str, scope: Mapping[str, Any]) -> str | None:
    while path:
        try:
            found = eval(path, dict(scope))
        except SyntaxError:  # a part of a call
            found = None
        except (*_ABSENT, NameError):
            return None
        if isinstance(found, nn.Module):
            return f"{spoken(path) or 'the model'}, of class {type(found).__name__}"
        path = path.rpartition(".")[0]
    return None
