"""What a forward returns, and what it sets, around the tensors of a program: as data, where it can be.

Dynamo writes code that puts outputs together and sets attributes; that code cannot be kept. It is run once with marks
in the place of outputs and arguments; what comes back says where each goes. Containers that pytree knows are made
anew, named tuples and dataclasses: tuples, lists, dicts, outputs of transformers.

    {"loss": <output 0>, "hidden": (<output 1>, None)}
        -> ["node", "builtins:dict", ["loss", "hidden"], [["output", 0], ["node", "builtins:tuple", null, [..]]]]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from moefx.capture.python_state import PythonState, plain_path
from moefx.compiler.cache.data import decoded, encoded
from moefx.compiler.cache.told import Untold

_MISSING = object()
_KEPT = nn.Module().__dict__.keys()  # what torch's own code needs
Pack = Callable[[Sequence[Any], tuple, dict], Any]


class _Mark:
    """Stands for an output or an argument."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = kind, number


def learned(pack: Pack, num_outputs: int, tree: Any, leaves: Sequence[Any], state: PythonState,
            sets: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """What `pack` does, as data. tree and leaves: of the arguments of a call. sets: paths of what the forward changes.
    Raises Untold."""
    outputs = [_Mark("output", i) for i in range(num_outputs)]
    inputs = [_Mark("input", i) for i in range(len(leaves))]
    args, kwargs = pytree.tree_unflatten(inputs, tree)
    found, effects = _watched(lambda: pack(list(outputs), args, kwargs), state, sets)
    written = {"outputs": _written(found), "effects": [[path, name, _written(each)] for path, name, each in effects]}
    again = _made(written["outputs"], outputs, inputs)
    if not _same(found, again):
        raise Untold(f"the {type(found).__name__} that the forward returns, which is made in another way")
    return written


def packer(data: dict[str, Any], state: PythonState) -> Pack:
    """A function that does what the learned one did."""
    effects = [(state.value(path), name, each) for path, name, each in data["effects"]]

    def pack_outputs(flat: Sequence[Any], args: tuple, kwargs: dict) -> Any:
        leaves = pytree.tree_leaves((args, kwargs)) if effects or _reads_inputs(data["outputs"]) else ()
        for owner, name, each in effects:
            setattr(owner, name, _made(each, flat, leaves))
        return _made(data["outputs"], flat, leaves)

    return pack_outputs


def _watched(run: Callable[[], Any], state: PythonState,
             sets: Sequence[str]) -> tuple[Any, list[tuple[str, str, Any]]]:  # fmt: skip
    """What it returns, and what it sets: (path of the owner, attribute, value). What is there before stays."""
    owners = {path: state.value(path) for path in dict.fromkeys(map(plain_path, sets))}
    strange = next((path for path, owner in owners.items() if not isinstance(getattr(owner, "__dict__", None), dict)),
                   None)  # fmt: skip
    if strange is not None:
        raise Untold(f"that the forward changes `{strange}`")
    before = {path: dict(vars(owner)) for path, owner in owners.items()}
    try:
        for path, owner in owners.items():
            vars(owner).update(dict.fromkeys(before[path].keys() - _KEPT, _MISSING))
        found = run()
        effects = [(path, name, each) for path, owner in owners.items() for name, each in vars(owner).items()
                   if each is not (before[path][name] if name in _KEPT else _MISSING)]  # fmt: skip
    except Exception as error:
        raise Untold(f"what the forward returns or sets: {error}") from error
    finally:
        for path, owner in owners.items():
            vars(owner).clear()
            vars(owner).update(before[path])
    return found, effects


def _written(found: Any) -> list[Any]:
    if isinstance(found, _Mark):
        return [found.kind, found.number]
    kind = type(found)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(found, tuple) and hasattr(kind, "_make"):
        return ["named", name, [_written(each) for each in found]]
    if dataclasses.is_dataclass(found) and kind not in pytree.SUPPORTED_NODES:
        fields = [each.name for each in dataclasses.fields(found)]
        return ["fields", name, [[field, _written(getattr(found, field))] for field in fields]]
    children, spec = pytree.tree_flatten(found, is_leaf=lambda each: each is not found)
    if kind in pytree.SUPPORTED_NODES:
        return ["node", name, encoded(spec.context), [_written(each) for each in children]]
    return ["plain", encoded(found)]


def _made(data: list[Any], outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    kind, found, *rest = data
    if kind == "output":
        return outputs[found]
    if kind == "input":
        return inputs[found]
    if kind == "plain":
        return decoded(found)
    if kind == "named":
        return _class(found)._make(_made(each, outputs, inputs) for each in rest[0])
    if kind == "fields":
        return _class(found)(**{name: _made(each, outputs, inputs) for name, each in rest[0]})
    context, children = rest
    made = pytree.SUPPORTED_NODES[_class(found)].unflatten_fn
    return made([_made(each, outputs, inputs) for each in children], decoded(context))


def _class(name: str) -> type:
    """One that is there already, and is a container: nothing is imported."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    if found not in pytree.SUPPORTED_NODES and not hasattr(found, "_make") and not dataclasses.is_dataclass(found):
        raise ValueError(f"{name} is no container")
    return found


def _reads_inputs(data: list[Any]) -> bool:
    if data[0] == "fields":
        return any(_reads_inputs(each) for _, each in data[2])
    return data[0] == "input" or (data[0] in ("node", "named") and any(map(_reads_inputs, data[-1])))


def _same(found: Any, again: Any) -> bool:
    """Also what pytree does not show of a container."""
    if type(found) is not type(again):
        return False
    if isinstance(found, _Mark):
        return found is again
    if isinstance(found, (list, tuple)):
        return len(found) == len(again) and all(map(_same, found, again)) and _same_attributes(found, again)
    if isinstance(found, dict):
        return (list(found) == list(again) and all(map(_same, found.values(), again.values()))
                and _same_attributes(found, again))  # fmt: skip
    return _same_attributes(found, again) if dataclasses.is_dataclass(found) else found == again


def _same_attributes(found: Any, again: Any) -> bool:
    mine, other = getattr(found, "__dict__", {}), getattr(again, "__dict__", {})
    return mine.keys() == other.keys() and all(_same(mine[name], other[name]) for name in mine)
