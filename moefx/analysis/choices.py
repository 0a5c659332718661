"""What a node of a captured graph means with respect to a routing: facts by data flow, never by names.

A routing is an integer tensor `idx` [T, K] of expert ids. From it user code derives flattened ids, sort orders, counts,
offsets, masks per expert, and indices of the tokens of one expert. `facts(gm)` finds these by one forward sweep. A fact
is only a well-founded guess about meaning: what is built on it is compared numerically with the original.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.ir import edit


@dataclass(frozen=True)
class Flat:
    """All pairs of a [.., K] node in one row: [T*K]. Of the routing itself, these are the expert ids."""

    of: Node


@dataclass(frozen=True)
class Sorted:
    ids: Flat


@dataclass(frozen=True)
class Perm:
    """The order that sorts the pairs by expert id."""

    ids: Flat


@dataclass(frozen=True)
class TokenOf:
    """For every sorted pair the token it came from: perm // K."""

    ids: Flat


@dataclass(frozen=True)
class Inverse:
    """The inverse of the sort order."""

    ids: Flat


@dataclass(frozen=True)
class Counts:
    ids: Flat


@dataclass(frozen=True)
class Offsets:
    """Running sums of the counts."""

    ids: Flat


@dataclass(frozen=True)
class OneHot:
    """One-hot of the routing; `dims` names the axes in order, out of t, k, e."""

    idx: Node
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Mask:
    """Where the routing picks one expert; `dims` out of t, k."""

    idx: Node
    expert: int
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Picks:
    """The tuple of index vectors of a mask."""

    mask: Mask


@dataclass(frozen=True)
class Index:
    """Index vector along one axis (t or k) of the pairs of one expert. `trailing`: extra axes of size one."""

    mask: Mask
    axis: str


def op_name(node: Node) -> str:
    """One name for a function, its method form and its in-place operator form."""
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return node.op
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if isinstance(node.target, OpOverload) else name


def arg(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def facts(gm: GraphModule) -> dict[Node, Any]:
    """The fact of every node that has one."""
    known: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        rule = _RULES.get(op_name(node))
        fact = rule(node, known) if rule is not None else None
        if fact is not None:
            known[node] = fact
        if node.target is operator.setitem:
            _see_setitem(node, known)
    return known


def _shape(node: Any) -> tuple | None:
    value = edit.tensor_value(node)
    return None if value is None else tuple(value.shape)


def _is_integral(node: Any) -> bool:
    value = edit.tensor_value(node)
    return value is not None and not value.dtype.is_floating_point and value.dtype is not torch.bool


def _flatten(node: Node, known: dict) -> Any:
    source, value = node.args[0], edit.tensor_value(node)
    if value is None or not isinstance(source, Node):
        return None
    if source in known:  # a view that keeps the shape, or undoes nothing we track
        return known[source] if _shape(source) == _shape(node) else None
    if value.dim() == 1 and len(_shape(source) or ()) >= 2:
        return Flat(source)
    return None


def _keep(node: Node, known: dict) -> Any:
    return known.get(node.args[0]) if isinstance(node.args[0], Node) else None


def _sort(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    ascending = not (arg(node, 2, "descending", False) or node.kwargs.get("descending", False))
    return ("sort", fact) if isinstance(fact, Flat) and ascending and _is_integral(fact.of) else None


def _argsort(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    if isinstance(fact, Perm):
        return Inverse(fact.ids)
    if isinstance(fact, Flat) and _is_integral(fact.of) and not node.kwargs.get("descending", False):
        return Perm(fact)
    return None


def _floordiv(node: Node, known: dict) -> Any:
    fact, divisor = known.get(node.args[0]), arg(node, 1, "other")
    if op_name(node) == "div" and node.kwargs.get("rounding_mode") != "floor":
        return None
    if isinstance(fact, Perm) and isinstance(divisor, int) and _shape(fact.ids.of)[-1] == divisor:
        return TokenOf(fact.ids)
    return None


def _histogram(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    if not isinstance(fact, (Flat, Sorted)):
        return None
    ids = fact.ids if isinstance(fact, Sorted) else fact
    return Counts(ids) if _is_integral(ids.of) else None


def _cumsum(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    return Offsets(fact.ids) if isinstance(fact, Counts) else None


def _one_hot(node: Node, known: dict) -> Any:
    shape = _shape(node.args[0])
    return OneHot(node.args[0], ("t", "k", "e")) if shape and len(shape) == 2 else None


def _permute(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    if not isinstance(fact, OneHot):
        return None
    order = node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = tuple(order[0])
    if op_name(node) == "transpose":
        dims = list(fact.dims)
        a, b = order
        dims[a], dims[b] = dims[b], dims[a]
        return OneHot(fact.idx, tuple(dims))
    return OneHot(fact.idx, tuple(fact.dims[i] for i in order))


def _equal(node: Node, known: dict) -> Any:
    left, right = node.args[0], arg(node, 1, "other")
    if (
        isinstance(right, int)
        and not isinstance(right, bool)
        and _is_integral(left)
        and len(_shape(left)) == 2
        and left not in known
    ):
        return Mask(left, right, ("t", "k"))
    fact = known.get(left)
    return fact if isinstance(fact, Mask) and right == 1 else None


def _positive(node: Node, known: dict) -> Any:
    fact, bound = known.get(node.args[0]), arg(node, 1, "other")
    return fact if isinstance(fact, Mask) and bound == 0 else None


def _any(node: Node, known: dict) -> Any:
    """A token is picked if any of its choices is; top-k picks an expert at most once."""
    fact, dim = known.get(node.args[0]), arg(node, 1, "dim")
    if isinstance(fact, Mask) and isinstance(dim, int) and len(fact.dims) == 2 and fact.dims[dim] == "k":
        return Mask(fact.idx, fact.expert, ("t",))
    return None


def _where(node: Node, known: dict) -> Any:
    if len(node.args) > 1:
        return None
    if op_name(node) == "nonzero" and not (arg(node, 1, "as_tuple") or node.kwargs.get("as_tuple")):
        return None
    fact = known.get(node.args[0])
    return Picks(fact) if isinstance(fact, Mask) else None


def _getitem(node: Node, known: dict) -> Any:
    source, item = node.args
    fact = known.get(source)
    if isinstance(fact, tuple):
        return Sorted(fact[1]) if item == 0 else Perm(fact[1])
    if isinstance(fact, Picks) and isinstance(item, int):
        return Index(fact.mask, fact.mask.dims[item])
    if isinstance(fact, OneHot) and isinstance(item, int) and fact.dims[0] == "e":
        return Mask(fact.idx, item, fact.dims[1:])
    if (
        isinstance(fact, OneHot)
        and isinstance(item, tuple)
        and isinstance(item[-1], int)
        and fact.dims[-1] == "e"
        and all(i in (slice(None), Ellipsis) for i in item[:-1])
    ):
        return Mask(fact.idx, item[-1], fact.dims[:-1])
    return None


def _select(node: Node, known: dict) -> Any:
    fact, dim, index = known.get(node.args[0]), arg(node, 1, "dim"), arg(node, 2, "index")
    if isinstance(fact, OneHot) and isinstance(index, int) and fact.dims[dim] == "e":
        dims = tuple(d for i, d in enumerate(fact.dims) if i != dim % len(fact.dims))
        return Mask(fact.idx, index, dims)
    return None


def _see_setitem(node: Node, known: dict) -> None:
    """`inv[perm] = arange(n)` makes `inv` the inverse of perm."""
    target, index, value = node.args
    fact = known.get(index) if isinstance(index, Node) else None
    if isinstance(fact, Perm) and isinstance(value, Node) and op_name(value) == "arange" and isinstance(target, Node):
        known[target] = Inverse(fact.ids)


_RULES: dict[str, Callable[[Node, dict], Any]] = {
    **dict.fromkeys(("reshape", "view", "flatten", "ravel"), _flatten),
    **dict.fromkeys(
        ("to", "float", "int", "long", "contiguous", "clone", "detach", "squeeze", "bool", "type_as"), _keep
    ),
    "sort": _sort,
    "argsort": _argsort,
    **dict.fromkeys(("floordiv", "floor_divide", "div"), _floordiv),
    **dict.fromkeys(("histc", "bincount"), _histogram),
    "cumsum": _cumsum,
    "one_hot": _one_hot,
    **dict.fromkeys(("permute", "transpose"), _permute),
    "eq": _equal,
    "gt": _positive,
    "any": _any,
    **dict.fromkeys(("where", "nonzero"), _where),
    "getitem": _getitem,
    "select": _select,
}
