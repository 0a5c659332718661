"""What a node of a captured graph means with respect to a routing: facts by data flow, never by names.

From a routing, an integer tensor `idx` [T, K] of expert ids, user code derives flattened ids, sort orders, counts and
masks per expert, and indices of its tokens. `facts(gm)` finds these by one forward sweep. A fact is a well-founded
guess about meaning: what is built on it is compared numerically with the original.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.recognition.facts import (
    ALL,
    Columns,
    Counts,
    Flat,
    Index,
    Inverse,
    Mask,
    Offsets,
    OneHot,
    Perm,
    Picks,
    Scattered,
    Sorted,
    Span,
    Tally,
    TokenOf,
    Weighed,
    token_axes,
)
from moefx.analysis.recognition.indexing import entry
from moefx.analysis.recognition.routings import has_single_choice, is_distinct
from moefx.analysis.recognition.signs import is_positive
from moefx.ir import edit
from moefx.ir.dims import axes_of
from moefx.ir.names import arg, op_name
from moefx.ir.writes import storage, written_after_reads


def facts(gm: GraphModule) -> dict[Node, Any]:
    """The fact of every node that has one."""
    known: dict[Node, Any] = {}
    changing = written_after_reads(gm)
    for node in gm.graph.nodes:
        rule = _RULES.get(op_name(node))
        if any(storage(n) in changing for n in (node, *node.all_input_nodes)):
            continue  # what is true of it here is not true elsewhere
        if rule is not None and (fact := rule(node, known)) is not None:
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
    fact = known.get(source)
    if isinstance(fact, (Mask, Weighed)) and fact.is_of_tokens and value.dim() == 1 and len(fact.dims) > 1:
        return replace(fact, dims=(ALL,))
    if _is_per_token(fact):
        return fact if value.shape.numel() == edit.tensor_value(source).shape.numel() else None
    if isinstance(known.get(source), Columns):
        mask = known[source].mask
        return Index(mask, mask.dims[0]) if len(mask.dims) == 1 and value.dim() == 1 else None
    if source in known:  # a view that keeps the shape, or undoes nothing we track
        return known[source] if _shape(source) == _shape(node) else None
    if value.dim() == 1 and len(_shape(source) or ()) >= 2:
        return Flat(_uncast(source))
    return None


def _uncast(ids: Node) -> Node:
    """The ids that were cast, to be counted for example."""
    while op_name(ids) in _CASTS and _is_integral(ids.args[0]):
        ids = ids.args[0]
    return ids


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
    if op_name(node) == "div" and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
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
    if isinstance(known.get(node.args[0]), Flat):
        return Tally(known[node.args[0]])
    return OneHot(node.args[0], (*token_axes(node.args[0]), "k", "e")) if shape and len(shape) >= 2 else None


def _permute(node: Node, known: dict) -> Any:
    fact, axes = known.get(node.args[0]), axes_of(node)
    return OneHot(fact.idx, tuple(fact.dims[i] for i in axes)) if isinstance(fact, OneHot) and axes else None


def _equal(node: Node, known: dict) -> Any:
    left, right = node.args[0], arg(node, 1, "other")
    if type(right) is int and _is_integral(left) and len(_shape(left)) >= 2 and left not in known:
        return Mask(left, right, (*token_axes(left), "k"))
    fact = known.get(left)
    return fact if isinstance(fact, Mask) and right == 1 else None


def _positive(node: Node, known: dict) -> Any:
    """x > 0, or x != 0."""
    fact, bound = known.get(node.args[0]), arg(node, 1, "other")
    if bound != 0:
        return None
    if isinstance(fact, Scattered):
        return Tally(Flat(fact.idx)) if is_positive(fact.w) else None
    return fact if isinstance(fact, Mask) else _chosen(fact)


def _chosen(fact: Any) -> Mask | None:
    """The tokens whose weight of an expert is not zero: those that chose it."""
    return Mask(fact.mask.idx, fact.mask.expert, fact.dims) if _is_per_token(fact) and is_positive(fact.w) else None


def _is_choice(fact: Mask | Weighed, dim: int) -> bool:
    """Whether a dim counts the choices, of which one at most picks an expert."""
    mask = fact.mask if isinstance(fact, Weighed) else fact
    return len(fact.dims) >= 2 and fact.dims[dim] == "k" and is_distinct(mask.idx)


def _is_per_token(fact: Any) -> bool:
    return isinstance(fact, Weighed) and fact.is_of_tokens


def _unsqueeze(node: Node, known: dict) -> Any:
    fact = known.get(node.args[0])
    return fact if isinstance(fact, (Mask, Weighed)) and fact.is_of_tokens else None


def _scatter(node: Node, known: dict) -> Any:
    ones = _ones(node, known)
    if ones is not None or "add" in op_name(node):
        return ones
    base, dim, idx, w = node.args[0], arg(node, 1, "dim"), arg(node, 2, "index"), arg(node, 3, "src")
    if not isinstance(w, Node) or not _is_zeros(base):
        return None
    rank = len(_shape(idx))
    fits = _shape(w) == _shape(idx) and rank >= 2 and dim in (-1, rank - 1) and not _is_integral(w)
    return Scattered(idx, w) if fits and is_distinct(idx) else None


def _ones(node: Node, known: dict) -> Any:
    """zeros.scatter(1, idx, 1) or zeros.scatter_add(0, ids, ones): ones where a token chose an expert."""
    base, dim, idx, one = node.args[0], arg(node, 1, "dim"), arg(node, 2, "index"), arg(node, 3, "src")
    one = node.kwargs.get("value", node.kwargs.get("source", one))
    is_one = one == 1 or (isinstance(one, Node) and op_name(one) in ("ones_like", "ones", "new_ones"))
    if not is_one or not _is_zeros(base):
        return None
    if "add" in op_name(node):
        return Counts(known[idx]) if dim in (0, -1) and isinstance(known.get(idx), Flat) else None
    fits = dim in (1, -1) and _is_integral(idx) and len(_shape(idx)) == 2
    return Tally(Flat(idx)) if fits and is_distinct(idx) else None


def _is_zeros(node: Node) -> bool:
    while op_name(node) in _CASTS:
        node = node.args[0]
    return op_name(node) in ("zeros_like", "zeros", "new_zeros")


def _column(fact: Scattered, item: Any) -> Weighed | None:
    """full[:, e], full[:, e : e + 1] or full[..., e, None]."""
    item = item if isinstance(item, tuple) else (item,)
    *front, expert = [i for i in item if i is not None] or [None]
    axes = token_axes(fact.idx)
    if front != [Ellipsis] and front != [slice(None)] * len(axes):
        return None
    if isinstance(expert, slice) and isinstance(expert.start, int) and expert.stop == expert.start + 1:
        expert = expert.start
    return Weighed(Mask(fact.idx, expert, (*axes, "k")), fact.w, axes) if isinstance(expert, int) else None


def _any(node: Node, known: dict) -> Any:
    """A token is picked if any of its choices is; top-k picks an expert at most once."""
    fact, dim = known.get(node.args[0]), arg(node, 1, "dim")
    if isinstance(fact, Mask) and isinstance(dim, int) and _is_choice(fact, dim):
        return Mask(fact.idx, fact.expert, fact.dims[:dim] + fact.dims[dim:][1:])
    return None


def _where(node: Node, known: dict) -> Any:
    if len(node.args) == 3 and node.args[2] == 0:
        return _weighed(node.args[0], node.args[1], known)
    if len(node.args) > 1:
        return None
    fact = known.get(node.args[0])
    fact = fact if isinstance(fact, Mask) else _chosen(fact)
    if fact is None:
        return None
    as_columns = op_name(node) in ("nonzero", "argwhere") and not arg(node, 1, "as_tuple")
    return Columns(fact) if as_columns else Picks(fact)


def _unbind(node: Node, known: dict) -> Any:
    """The columns one by one; `t()` makes them rows, which are taken by number as well."""
    fact = known.get(node.args[0])
    by_column = op_name(node) in ("t", "T", "mT") or arg(node, 1, "dim", 0) in (1, -1)
    return Picks(fact.mask) if isinstance(fact, Columns) and by_column else None


def _mul(node: Node, known: dict) -> Any:
    left, right = node.args[0], arg(node, 1, "other")
    return _weighed(left, right, known) or _weighed(right, left, known)


def _weighed(mask: Any, w: Any, known: dict) -> Weighed | None:
    fact = known.get(mask) if isinstance(mask, Node) else None
    if not isinstance(fact, Mask) or not isinstance(w, Node) or w in known:
        return None
    if not fact.is_of_pairs and not (fact.is_of_tokens and has_single_choice(fact.idx)):
        return None
    return Weighed(fact, w, fact.dims) if _shape(w) == _shape(mask) and not _is_integral(w) else None


def _sum(node: Node, known: dict) -> Any:
    """Top-k picks an expert at most once, so that the sum over the choices is the weight of the one that picks it."""
    fact, dim = known.get(node.args[0]), arg(node, 1, "dim")
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if isinstance(fact, Mask) and fact.is_of_pairs and dim is None:
        return Span(Flat(fact.idx), fact.expert, fact.expert + 1)
    if isinstance(fact, (OneHot, Tally)) and all(isinstance(d, int) for d in dims):
        return _tally(fact, dims)
    dim = dims[0] if len(dims) == 1 else dim
    if isinstance(fact, Weighed) and isinstance(dim, int) and _is_choice(fact, dim):
        return Weighed(fact.mask, fact.w, token_axes(fact.mask.idx))
    return None


def _tally(fact: OneHot | Tally, dims: Sequence[int]) -> Any:
    """Sums over all but the experts count the pairs of each."""
    names = ("p", "e") if isinstance(fact, Tally) else fact.dims
    left = tuple(n for i, n in enumerate(names) if i not in {d % len(names) for d in dims})
    ids = fact.ids if isinstance(fact, Tally) else Flat(fact.idx)
    if left == ("e",):
        return Counts(ids)
    return Tally(ids) if len(left) == 2 and left[1] == "e" else None


def _stack(node: Node, known: dict) -> Counts | None:
    """The numbers of all experts' pairs, counted one by one."""
    spans = [known.get(n) for n in arg(node, 0, "tensors")]
    if not spans or not all(isinstance(s, Span) and s.ids == spans[0].ids for s in spans):
        return None
    each = [(s.start, s.stop) for s in spans] == [(e, e + 1) for e in range(len(spans))]
    return Counts(spans[0].ids) if each else None


def _einsum(node: Node, known: dict) -> Scattered | None:
    """The scores [.., K] times the one-hot choices [.., K, E], summed over the choices."""
    equation, *operands = node.args
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    left, out = equation.replace(" ", "").replace("...", "").split("->")
    terms = list(zip(left.split(","), operands))
    for (letters, w), (pair, hot) in (terms, terms[::-1]):
        fact = known.get(hot)
        if not isinstance(fact, OneHot) or fact.dims[-2:] != ("k", "e") or w in known:
            continue
        fits = pair[:-1] == letters and out == letters[:-1] + pair[-1] and _shape(w) == _shape(fact.idx)
        if fits and not _is_integral(w) and is_distinct(fact.idx):
            return Scattered(fact.idx, w)
    return None


def _getitem(node: Node, known: dict) -> Any:
    source, item = node.args
    fact = known.get(source)
    if isinstance(fact, tuple):
        return Sorted(fact[1]) if item == 0 else Perm(fact[1])
    if isinstance(fact, Picks) and isinstance(item, int):
        return Index(fact.mask, fact.mask.dims[item])
    if isinstance(fact, Scattered):
        return _column(fact, item)
    if isinstance(fact, (Mask, Weighed)) and fact.is_of_tokens and isinstance(item, tuple):
        return fact if all(i is None or i in (slice(None), Ellipsis) for i in item) and item[-1] is None else None
    if isinstance(fact, Columns) and isinstance(item, tuple) and len(item) == 2 and item[0] == slice(None):
        return Index(fact.mask, fact.mask.dims[item[1]]) if isinstance(item[1], int) else None
    return _of_expert(node, fact)


def _select(node: Node, known: dict) -> Any:
    fact, dim, index = known.get(node.args[0]), arg(node, 1, "dim"), arg(node, 2, "index")
    if isinstance(fact, Scattered) and dim in (-1, len(_shape(fact.idx)) - 1):
        return _column(fact, (Ellipsis, index))
    return _of_expert(node, fact)


def _of_expert(node: Node, fact: Any) -> Mask | None:
    """One expert's part of the one-hot choices."""
    axis, expert = entry(node) or (None, None)
    if not isinstance(fact, OneHot) or axis is None or fact.dims[axis] != "e":
        return None
    return Mask(fact.idx, expert, fact.dims[:axis] + fact.dims[axis + 1 :])


def _see_setitem(node: Node, known: dict) -> None:
    """`inv[perm] = arange(n)` makes `inv` the inverse of perm."""
    target, index, value = node.args
    fact = known.get(index) if isinstance(index, Node) else None
    if isinstance(fact, Perm) and isinstance(value, Node) and op_name(value) == "arange" and isinstance(target, Node):
        known[target] = Inverse(fact.ids)


_CASTS = ("to", "float", "int", "long", "bool", "type_as")
_RULES: dict[str, Callable[[Node, dict], Any]] = {
    **dict.fromkeys(("reshape", "view", "flatten", "ravel", "squeeze"), _flatten),
    **dict.fromkeys(("to", "float", "int", "long", "contiguous", "clone", "detach", "bool", "type_as", "type"), _keep),
    "sort": _sort,
    "argsort": _argsort,
    **dict.fromkeys(("floordiv", "floor_divide", "div"), _floordiv),
    **dict.fromkeys(("histc", "bincount"), _histogram),
    "cumsum": _cumsum,
    "stack": _stack,
    "one_hot": _one_hot,
    **dict.fromkeys(("permute", "transpose"), _permute),
    "eq": _equal,
    **dict.fromkeys(("gt", "ne"), _positive),
    "any": _any,
    "mul": _mul,
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"), _scatter),
    "sum": _sum,
    **dict.fromkeys(("where", "nonzero", "argwhere"), _where),
    **dict.fromkeys(("unbind", "t"), _unbind),
    "einsum": _einsum,
    "getitem": _getitem,
    "select": _select,
}
