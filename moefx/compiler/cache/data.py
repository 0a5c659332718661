"""Values of the compiler as JSON, and back: plain data, sizes in symbols, and a few dataclasses of moefx by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch import Tensor

from moefx._torch_compat import size_functions
from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.compiler.cache.told import Untold
from moefx.context.region_facts import RegionFacts, Slots
from moefx.ir.ways import Hop, Way
from moefx.layout import Cut, Layout, Spread
from moefx.placement.score import Costs

_CLASSES = {each.__name__: each for each in (Source, Layout, Cut, Spread, RegionFacts, Way, Hop, Costs, MeshSpec)}
_HEADS = (sympy.Expr, Relational, BooleanFunction)


def encoded(found: Any) -> Any:
    """Raises Untold for what is none of these."""
    if found is None or isinstance(found, (bool, str)) or type(found) in (int, float):
        return found
    if isinstance(found, Slots):
        return {"slots": [encoded(each) for each in found]}
    if isinstance(found, sympy.Basic):
        return {"expr": _expression(found)}
    if isinstance(found, torch.dtype):
        return {"dtype": str(found).removeprefix("torch.")}
    if isinstance(found, Tensor) and found.device.type == "cpu" and found.numel() <= 100_000:
        return {"tensor": found.tolist(), "dtype": str(found.dtype).removeprefix("torch.")}
    if type(found).__name__ in _CLASSES and dataclasses.is_dataclass(found):
        fields = {each.name: encoded(getattr(found, each.name)) for each in dataclasses.fields(found)}
        return {"class": type(found).__name__, "fields": fields}
    if type(found) in (list, tuple):
        return {type(found).__name__: [encoded(each) for each in found]}
    if type(found) is dict:
        return {"dict": [[encoded(key), encoded(each)] for key, each in found.items()]}
    raise Untold(f"a {type(found).__name__} in the program")


def decoded(data: Any) -> Any:
    """What `encoded` was given. Raises KeyError, TypeError or ValueError for what it does not write."""
    if not isinstance(data, dict):
        return data
    kind, found = next(iter(data.items()))
    if kind == "slots":
        return Slots(*map(decoded, found))
    if kind == "expr":
        return _read_expression(found)
    if kind == "dtype":
        return _dtype(found)
    if kind == "tensor":
        return torch.tensor(found, dtype=_dtype(data["dtype"]))
    if kind == "class":
        return _CLASSES[found](**{name: decoded(each) for name, each in data["fields"].items()})
    if kind == "dict":
        return {decoded(key): decoded(each) for key, each in found}
    return {"list": list, "tuple": tuple}[kind](map(decoded, found))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _expression(found: sympy.Basic) -> Any:
    """Nested lists: ["Mod", "s0", 8]. Symbols are whole numbers, as sizes are."""
    if isinstance(found, sympy.Symbol):
        return ["Symbol", found.name, bool(found.is_positive), bool(found.is_nonnegative)]
    if isinstance(found, sympy.Integer):
        return int(found)
    if isinstance(found, sympy.Rational):
        return ["Rational", int(found.p), int(found.q)]
    if found in (sympy.true, sympy.false):
        return bool(found)
    name = type(found).__name__
    if not isinstance(found, _HEADS) or _head(name) is not type(found):
        raise Untold(f"{name} in a condition on sizes")
    made = [name, *map(_expression, found.args)]
    if _read_expression(made) != found:
        raise Untold(f"{found}, which reads otherwise")
    return made


def _read_expression(data: Any) -> sympy.Basic:
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return sympy.Integer(data)
    name, *args = data
    if name == "Symbol":
        name, positive, nonnegative = args
        kind = {"positive": True} if positive else {"nonnegative": True} if nonnegative else {}
        return sympy.Symbol(name, integer=True, **kind)
    if name == "Rational":
        return sympy.Rational(*args)
    return _head(name)(*map(_read_expression, args))


def _head(name: str) -> Any:
    found = getattr(size_functions, name, None) or getattr(sympy, name, None)
    is_one = isinstance(found, type) and issubclass(found, _HEADS)
    if not is_one:
        aliases = {"Equality": sympy.Eq, "Unequality": sympy.Ne, "StrictLessThan": sympy.Lt, "LessThan": sympy.Le,
                   "StrictGreaterThan": sympy.Gt, "GreaterThan": sympy.Ge}  # fmt: skip
        found = aliases.get(name)
    if found is None:
        raise ValueError(f"{name} is no function of sizes")
    return found
