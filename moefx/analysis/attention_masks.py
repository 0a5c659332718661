"""What masks of attention say that depend on sizes alone: found by computing them at several sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from moefx.analysis.checking.evaluate import Evaluator, is_of_symbols
from moefx.ir.dims import trace
from moefx.ir.fates import How
from moefx.ir.names import op_name
from moefx.ir.op import expr, value
from moefx.ir.randomness import is_random
from moefx.ir.writes import is_written

CAUSAL, NOTHING = "causal", "nothing"  # every query sees the keys up to its own place; every query sees all keys

_SIZES = (1, 2, 3, 18, 521)  # that are always tried
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)  # of sizes that a program may be made for alone
_FEW, _ENTRIES = 2**19, 2**26  # entries of a tensor that are soon computed, and the most that are
_NO_PLACE = 2**31  # is beyond every place: the end of a slice, or the least number of a dtype
_LEAST = -1e9  # added to a score, this leaves nothing of its weight
_SHAPES = ("view", "reshape", "expand", "unsqueeze", "transpose", "permute", "getitem")
_FILLS = ("masked_fill", "where", "full", "full_like", "new_full", "mul")  # take values that are no places


class Unclear(Exception):
    """Why nothing simpler than a mask says what it says."""


@dataclass(frozen=True)
class _Origin:
    """What a mask is computed of. known: numbers, constants, and (None) tensors of which only the shape is read."""

    nodes: frozenset[Node]
    known: dict[Node, Any]


def meaning(mask: Node, queries: Any, keys: Any, guards: list[sympy.Basic]) -> str:
    """CAUSAL or NOTHING, what a mask [.., queries, keys] says at all sizes that `guards` allow.

    It is computed at small sizes, at 521, and behind every constant in its computation, so that a window shows.
    Raises Unclear, with what it depends on or says else.
    """
    origin = _origin(mask)
    length = expr(queries)
    allowed = {NOTHING, CAUSAL} if length == expr(keys) else {NOTHING}
    found = None
    for symbols in _sizes(origin, length, guards):
        found = _keeps(mask, origin, symbols, length, expr(keys))
        allowed &= _says(found)
        if not allowed:
            raise Unclear(_words(found))
    if found is None:
        raise Unclear("its mask has no sizes at which it can be looked at")
    return NOTHING if NOTHING in allowed else CAUSAL


# ---- what it depends on


def _origin(mask: Node) -> _Origin:
    """Raises Unclear where it depends on more than sizes."""
    known: dict[Node, Any] = {}
    unread: set[Node] = set()
    found, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        if is_of_symbols(node):
            continue
        if type(value(node)) in (int, float, bool):
            known[node] = value(node)
            continue
        if node.op == "placeholder":
            known[node] = _constant(node)
            continue
        if is_random(node):
            raise Unclear("its mask is drawn")
        if is_written(node):
            raise Unclear(f"its mask depends on {node.name}, which is written to")
        like = {o.node for o in trace(node) or () if o.dims and all(fate.how is How.UNREAD for fate in o.dims)}
        unread |= like
        new = [each for each in node.all_input_nodes if each not in found and each not in like]
        found.update(new)
        stack += new
    return _Origin(frozenset(found), known | dict.fromkeys(unread - found))


def _constant(node: Node) -> Tensor:
    source = node.meta["moefx"]
    if source.kind != "constant":
        raise Unclear(f"its mask depends on {node.name}")
    return source.key.cpu()


# ---- the sizes to look at


def _sizes(origin: _Origin, length: sympy.Expr, guards: list[sympy.Basic]) -> Iterator[dict[sympy.Symbol, int]]:
    """Numbers for the symbols of sizes, the larger ones last. Raises Unclear where one is too large for that."""
    every = {s for node in origin.nodes for s in _symbols(node)} | length.free_symbols
    places = _places(origin)
    lengths = {*_SIZES, *(place + more for place in places for more in (-1, 0, 1, 3))} if length.free_symbols else {0}
    tried = [(max(places, default=1) + 2, 3)]  # the others, such as batches, and the length
    tried += [(1 + number % 3 if each < _SIZES[-1] else 1, each) for number, each in enumerate(sorted(lengths))]
    found = (_fitting(dict.fromkeys(every, others), length, own, guards) for others, own in tried)
    fitting = [each for each in found if each is not None]
    few = [each for each in fitting if _entries(origin, each) <= _FEW]
    yield from few
    rest = [each for each in fitting if each not in few]
    if any(_entries(origin, each) > _ENTRIES for each in rest):
        raise Unclear(f"its mask is too large to be looked at behind place {max(places, default=1)}")
    yield from rest


def _fitting(symbols: dict[sympy.Symbol, int], length: sympy.Expr, own: int,
             guards: list[sympy.Basic]) -> dict[sympy.Symbol, int] | None:  # fmt: skip
    """These sizes, with a length of `own` or a little more, as the program may have them; None: it has none there."""
    found = (symbols | {s: -(-own // step) * step for s in length.free_symbols} for step in _STEPS)
    return next((each for each in found if _is_allowed(each, guards)), None)


def _symbols(node: Node) -> set[sympy.Symbol]:
    found = value(node)
    sizes = found.shape if isinstance(found, Tensor) else (found,) if isinstance(found, torch.SymInt) else ()
    return {each for size in sizes for each in expr(size).free_symbols}


def _is_allowed(symbols: dict[sympy.Symbol, int], guards: list[sympy.Basic]) -> bool:
    numbers = {symbol: sympy.Integer(size) for symbol, size in symbols.items()}
    return all(guard.xreplace(numbers) != sympy.false for guard in guards)


def _entries(origin: _Origin, symbols: dict[sympy.Symbol, int]) -> int:
    """Of the largest tensor."""
    numbers = {symbol: sympy.Integer(size) for symbol, size in symbols.items()}
    tensors = (value(node) for node in origin.nodes if isinstance(value(node), Tensor))
    shapes = {tuple(map(expr, tensor.shape)) for tensor in tensors}
    return max(int(sympy.Mul(*shape).xreplace(numbers)) for shape in shapes)


def _places(origin: _Origin) -> set[int]:
    """What may be places or distances: the constants in a mask's computation, and their products, as i // 4 < 100 says
    something of place 400."""
    found: list[tuple[float, bool]] = []
    for node in origin.nodes:
        name = op_name(node)
        numbers = [abs(n) for n in _numbers(node, origin) if 0 < abs(n) < _NO_PLACE and not (name in _FILLS and n < 0)]
        found += [(max(n, 1 / n), name in _SHAPES) for n in numbers if n != 1]  # a half makes place 2 of place 1
    products = (a * b for (a, in_shape), (b, too) in itertools.combinations(found, 2) if not in_shape and not too)
    return {math.ceil(place) for place in (*(each for each, _ in found), *products)}


def _numbers(node: Node, origin: _Origin) -> list[float]:
    """The constants that a node is, or takes."""
    if is_of_symbols(node):
        return [int(each) for each in expr(value(node)).atoms(sympy.Integer)]
    if node in origin.known:
        known = origin.known[node]
        return known.flatten().tolist() if isinstance(known, Tensor) else [] if known is None else [known]
    taken: list[Any] = []
    map_aggregate((node.args, node.kwargs), taken.append)
    return [each for each in taken if type(each) in (int, float)]


# ---- what it says there


def _keeps(mask: Node, origin: _Origin, symbols: dict[sympy.Symbol, int], queries: sympy.Expr,
           keys: sympy.Expr) -> Tensor:  # fmt: skip
    """[.., queries, keys], true where a query sees a key."""
    evaluator = Evaluator(symbols, {})
    for node, known in origin.known.items():
        like = value(node)
        evaluator.values[node] = known if known is not None else torch.zeros(
            [evaluator.size(size) for size in like.shape], dtype=like.dtype)  # fmt: skip
    try:
        (found,) = evaluator.run([mask])
    except Exception as error:
        raise Unclear(f"its mask cannot be computed by itself: {error}") from error
    if found.is_floating_point():
        is_gone = found <= max(_LEAST, torch.finfo(found.dtype).min / 2)
        if not (is_gone | (found == 0)).all():
            raise Unclear("its mask adds numbers to the scores")
        found = ~is_gone
    return found.expand(*found.shape[:-2], int(queries.subs(symbols)), int(keys.subs(symbols)))


def _says(found: Tensor) -> set[str]:
    is_causal = found.shape[-2] == found.shape[-1] and bool((found == _lower(found)).all())
    return ({CAUSAL} if is_causal else set()) | ({NOTHING} if bool(found.all()) else set())


def _lower(found: Tensor) -> Tensor:
    return torch.ones(found.shape[-2:], dtype=torch.bool).tril()


def _words(found: Tensor) -> str:
    """What a mask says that is neither."""
    width = int(found[..., -1, :].sum(-1).max())
    window = _lower(found).triu(1 - width)
    if found.shape[-2] == found.shape[-1] and bool((found == window).all()):
        return f"its mask is a window of {width} keys, for which the kernels have no argument"
    return "its mask is neither causal nor a window"
