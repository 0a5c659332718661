"""The small values of a graph on drawn inputs: ids, masks, indices, counts, scores. No rule says what an op means.

A graph is run on random numbers as far as its values are small: whatever reads weights, and whatever is as wide as a
hidden state, is drawn instead. What routers choose by is drawn such that every expert has some tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moefx import _torch_compat as compat
from moefx.analysis.checking.evaluate import held, run_here
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import op_name
from moefx.ir.op import expr, value
from moefx.ir.randomness import is_random

_MOST, _NARROW = 2**21, 64  # entries, and the last size, of what is looked at
_TOKENS, _COLUMNS, _DRAWS, _BOUND, _KEPT = 64, 4096, 64, 1024, 2**12
_FEW = 128  # experts: each of them gets some tokens in each draw


class Draws:
    """The small values of a graph: the rest is not known."""

    def __init__(self, gm: GraphModule) -> None:
        self.experts, self._weights = _most_experts(gm), set()
        sizes = _symbols(gm, self.experts)
        number = _number(gm, sizes, self.experts)
        self._draws = [_Draw(dict(sizes), each, each == number - 1) for each in range(number)]
        self._dropped: set[Node] = set()
        self._driven: set[Node] = set()

    def learn(self, node: Node) -> list[Any] | None:
        """What a node behind all before it is, draw by draw. None: it is not known."""
        self._dropped.discard(node)
        for each in self._dropped.intersection(node.all_input_nodes):
            self._restore(each)
        if not self._is_small(node) or not all(draw.learn(node) for draw in self._draws):
            for draw in self._draws:
                draw.values.pop(node, None)
            return None
        return self.values_of(node)

    def drive(self, node: Node, number: int, is_distinct: bool) -> list[Tensor]:
        """Draw so many ids for a node, whatever it is computed of; is_distinct: in a row, each once at most."""
        self._driven.add(node)
        for draw in self._draws:
            shape = draw.values[node].shape
            scores = torch.rand(*shape[:-1], max(number, shape[-1]), generator=draw.generator(node))
            drawn = scores.topk(shape[-1]).indices if is_distinct else draw.ids(node, shape, number)
            draw.values[node] = drawn.to(draw.values[node].dtype)
            draw.ran.discard(node)
        return self.values_of(node)

    def drop(self, node: Node) -> None:
        """Forget what is large, until it is asked for again."""
        found = [draw.values.get(node) for draw in self._draws]
        if node not in self._driven and all(isinstance(each, Tensor) for each in found) and found[0].numel() > _KEPT:
            self._dropped.add(node)
            for draw in self._draws:
                del draw.values[node]

    def _restore(self, node: Node) -> None:
        wanted, stack = [], [node]
        while stack:
            if (top := stack.pop()) in self._dropped:
                self._dropped.discard(top)
                wanted.append(top)
                stack += top.all_input_nodes
        for each in sorted(wanted):
            self.learn(each)

    def keep(self, nodes: Container[Node]) -> None:
        """Forget all others."""
        self._dropped = {node for node in self._dropped if node in nodes}
        self._driven = {node for node in self._driven if node in nodes}
        for draw in self._draws:
            for node in [each for each in draw.values if each not in nodes]:
                del draw.values[node]

    def values_of(self, node: Node) -> list[Any] | None:
        if node in self._dropped:
            self._restore(node)
        found = [draw.values.get(node) for draw in self._draws]
        return None if any(each is None for each in found) else found

    def has_run(self, node: Node) -> bool:
        """Whether its values are computed of others in every draw, not drawn."""
        return all(node in draw.ran for draw in self._draws)

    def sizes_of(self, size: int | torch.SymInt) -> list[int] | None:
        found = [draw.size(size) for draw in self._draws]
        return None if None in found else found

    def _is_small(self, node: Node) -> bool:
        fake = value(node)
        if node.op == "output" or self._is_weight(node) or (isinstance(fake, Tensor) and fake.is_complex()):
            return False
        if any(each > _BOUND for each in _cut_at(node)):  # which no draw exceeds
            return False
        if not isinstance(fake, Tensor) or not fake.dtype.is_floating_point or fake.dim() < 2:
            return True
        last = expr(fake.shape[-1])
        return not last.is_Integer or last <= max(_NARROW, self.experts)

    def _is_weight(self, node: Node) -> bool:
        """Asked anew at every look: passes compute weights of what was read by ids before."""
        read = node.all_input_nodes
        is_constant = getattr(node.meta.get("moefx"), "kind", None) == "constant"
        found = is_weight(node) and not is_constant if node.op == "placeholder" else (
            bool(read) and self._weights.issuperset(read))  # fmt: skip
        (self._weights.add if found else self._weights.discard)(node)
        return found


class _Draw:
    def __init__(self, symbols: dict[sympy.Symbol, int], number: int, is_last: bool) -> None:
        self.symbols, self.number, self.is_last = symbols, number, is_last
        self.sizes: dict[sympy.Expr, int] = {}
        self.values: dict[Node, Any] = {}
        self.ran: set[Node] = set()  # what was not drawn
        self._seeds: dict[Node, int] = {}

    def generator(self, node: Node) -> torch.Generator:
        """What is drawn for a node twice is the same."""
        seed = self._seeds.setdefault(node, len(self._seeds))
        return torch.Generator().manual_seed(self.number + _DRAWS * seed)

    def learn(self, node: Node) -> bool:
        found = self._run(node)
        (self.ran.discard if found is None else self.ran.add)(node)
        found = self._drawn(node) if found is None else found
        if found is None:
            return False
        self.values[node] = found
        self._see_sizes(value(node), found)
        return True

    def _run(self, node: Node) -> Any:
        given = held(node)  # of weights nothing is asked: those of a buffer may be others in the next call
        if given is not None:
            return given.detach().cpu().clone()
        if not node.op.startswith("call") or is_random(node):
            return None
        if any(each not in self.values for each in node.all_input_nodes):
            return None
        try:
            with torch.no_grad():
                found = run_here(node, self.values)
            return self.values.get(node.args[0]) if found is None and node.args else found  # which was written to
        except Exception:  # of ops of any kind, on numbers of no meaning
            return None

    def _drawn(self, node: Node) -> Any:
        fake = value(node)
        if isinstance(fake, torch.SymInt):
            return self.size(fake)
        if not isinstance(fake, Tensor) or node.op == "get_attr" or _is_of_rows_alone(node):
            return None
        shape = [self.size(size) for size in fake.shape]
        if None in shape or sympy.prod(shape) > _MOST:
            return None
        if fake.dtype.is_floating_point:  # noise is positive: there may be a logarithm of it
            noise = is_random(node)
            found = torch.rand(shape, generator=self.generator(node)) + 0.5 if noise else self._scores(node, shape)
            return found.to(fake.dtype)
        if op_name(node) == "randperm":
            return torch.randperm(*shape, generator=self.generator(node))
        if fake.dtype is torch.bool:
            return torch.rand(shape, generator=self.generator(node)) < 0.7
        return self.ids(node, shape, _number_of_ids(node)).to(fake.dtype)

    def ids(self, node: Node, shape: list[int], number: int) -> Tensor:
        """Over the draws each of so many is among them."""
        generator = self.generator(node)
        found = torch.randint(number, shape, generator=generator).flatten()
        place = torch.randperm(len(found), generator=generator) + self.number * len(found)
        return torch.where(place < number, place, found).view(shape)

    def _scores(self, node: Node, shape: list[int]) -> Tensor:
        """Over the draws every column is by far the highest of one row (in a softmax the others are below any threshold
        that matters), and the highest of some; in most rows a third of the columns, of each draw another one, is higher
        than the rest, so that each is above its share in one; in some rows all are much the same; in the last draw, the
        same one is the highest of all rows, so that of others there are second choices alone."""
        generator = self.generator(node)
        found = torch.randn(shape, generator=generator) * 0.5
        if len(shape) > 1 and found.numel():
            rows, columns = found.view(-1, shape[-1]).shape
            place = torch.randperm(rows, generator=generator) * (not self.is_last) + self.number * rows
            first, even = place < columns, torch.rand(rows, generator=generator) < 0.2
            higher = torch.where(first, 15, torch.rand(rows, generator=generator) * 4 * ~even + 6 * self.is_last)
            found.view(rows, columns)[torch.arange(rows), place % columns] += higher
            busy = torch.arange(columns) * 3 // columns == self.number % 3
            found.view(rows, columns).add_(2 * (busy & ~(first | even)[:, None]))
        return found

    def size(self, size: Any) -> int | None:
        if not isinstance(size, torch.SymInt):
            return size
        size = expr(size)
        if size not in self.sizes:
            known = {each: sympy.Integer(self.symbols[each]) for each in size.free_symbols & self.symbols.keys()}
            found = size.xreplace(known)
            if not found.is_Integer:
                return None
            self.sizes[size] = int(found)
        return self.sizes[size]

    def _see_sizes(self, fake: Any, found: Any) -> None:
        if isinstance(fake, (tuple, list)) and isinstance(found, (tuple, list)):
            for each, real in zip(fake, found):
                self._see_sizes(each, real)
        elif isinstance(fake, Tensor) and isinstance(found, Tensor):
            for size, real in zip(fake.shape, found.shape):
                if isinstance(size, torch.SymInt):
                    self._see_sizes(size, real)
        elif isinstance(fake, torch.SymInt) and isinstance(found, int) and expr(fake).is_Symbol:
            self.symbols.setdefault(expr(fake), found)


def _number_of_ids(node: Node) -> int:
    """How many different numbers to draw: what is compared with them is one of them, what makes other sizes of them
    is how many there are."""
    found, readers = [2], list(node.users)
    for user in readers:
        fake, of = value(user), value(user.args[0])
        is_tensor = isinstance(fake, Tensor) and isinstance(of, Tensor)
        keeps = is_tensor and [*map(expr, fake.shape)] == [*map(expr, of.shape)]
        numbers = [each for each in (*user.args, *user.kwargs.values()) if type(each) is int]
        found += [each + keeps for each in numbers if each < _COLUMNS]
        if is_tensor and fake.dtype == of.dtype:
            readers += [each for each in user.users if each not in readers]
    return max(found)


def _is_of_rows_alone(node: Node) -> bool:
    """Whether these are numbers for some of the tokens, as an expert computes, of which nothing is chosen."""
    stack, found = [node], {node}
    while stack:
        fake = value(top := stack.pop())
        parts = [each for each in tree_leaves(fake) if isinstance(each, Tensor)]
        if any(not each.dtype.is_floating_point for each in parts):
            return False
        sizes = [size for each in parts for size in each.shape if isinstance(size, torch.SymInt)]
        if any(free_unbacked_symbols(expr(size)) for size in sizes):
            stack += top.users.keys() - found
            found.update(top.users)
        elif top is node:
            return False
    return True


def _most_experts(gm: GraphModule) -> int:
    """The most columns that something chooses of, or the most numbers that are drawn."""
    found = [2]
    for node in gm.graph.nodes:
        fake = value(node)
        fake = fake[-1] if isinstance(fake, (tuple, list)) and fake else fake
        if not isinstance(fake, Tensor) or fake.dtype.is_floating_point or fake.dtype is torch.bool or not fake.dim():
            continue
        if node.op == "placeholder":
            found.append(_number_of_ids(node))
        scores = [value(each) for each in node.all_input_nodes]
        found += [int(each.shape[-1]) for each in scores if isinstance(each, Tensor) and each.dim() > 1
                  and each.dtype.is_floating_point and isinstance(each.shape[-1], int)]  # fmt: skip
    return min(max(found), _COLUMNS)


def _symbols(gm: GraphModule, experts: int) -> dict[sympy.Symbol, int]:
    """Sizes for the symbols of inputs: the largest such that there are tokens for all experts, and more than any bound
    that the graph compares numbers of tokens with; equal ones where they are in the example, as the tokens of hidden
    states and of ids may have symbols of their own. Where the model fixes them, all as in the example."""
    inputs = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((each.fake_mode for each in inputs if isinstance(each, Tensor)), None)
    sizes = {expr(size) for each in inputs if isinstance(each, Tensor) for size in each.shape}
    symbols = set().union(*(size.free_symbols for size in sizes))
    numbers = {each for number in inputs if isinstance(number, torch.SymInt) for each in expr(number).free_symbols}
    numbers = dict.fromkeys(numbers - symbols, 2)  # as capacities, which some experts are to exceed
    if not symbols:
        return numbers
    hints = {symbol: hint for symbol, hint in compat.size_hints(mode).items() if symbol in symbols}
    joint = {int(size.subs(hints)): size for size in sizes if len(size.free_symbols) > 1}  # all tokens of a batch
    of_one = [hint for symbol, hint in hints.items() if hint not in joint or symbol in joint[hint].free_symbols]
    *small, largest = sorted({*of_one})
    chosen = {hint: min(hint, 3 + 2 * place) for place, hint in enumerate(small)}
    others = int(sympy.prod([*chosen.values()]))
    tokens = experts * (4 if experts <= _FEW else 1)
    shapes = [list(map(expr, each.shape)) for each in inputs if isinstance(each, Tensor)]
    dims = max(sum(hints.get(size) == largest for size in shape) for shape in shapes)
    enough = int((max(_TOKENS, tokens) // others) ** (1 / max(dims, 1))) + 1
    chosen[largest] = max(enough, *(2 * each + 2 for each in (0, *_bounds(gm))))
    found = {symbol: chosen[hint] for symbol, hint in hints.items() if hint in chosen}
    found |= {symbol: int(joint[hint].subs(found)) for symbol, hint in hints.items() if hint not in chosen}
    for guard in mode.shape_env.guards:
        if guard.expr.free_symbols & found.keys() and guard.expr.subs(found) == sympy.false:
            found |= {symbol: hints[symbol] for symbol in guard.expr.free_symbols & hints.keys()}
    return found | numbers


def _bounds(gm: GraphModule) -> Iterator[int]:
    """Capacities, which draws are to exceed."""
    yield from (each for node in gm.graph.nodes for each in _cut_at(node) if each <= _BOUND)


def _cut_at(node: Node) -> list[int]:
    """Numbers that integers are compared with, or cut at."""
    fake = value(node)
    if not node.op.startswith("call") or not isinstance(fake, Tensor) or fake.dtype.is_floating_point:
        return []
    flat = tree_leaves((node.args, node.kwargs)) if op_name(node) in _CUT else ()
    found = [each.stop if isinstance(each, slice) else each for each in flat]
    if op_name(node) == "getitem":
        found = [each for each, part in zip(found, flat) if isinstance(part, slice)]
    return [each for each in found if type(each) is int and 0 < each < sys.maxsize]


_CUT = ("lt", "le", "gt", "ge", "clamp", "narrow", "getitem")


def _number(gm: GraphModule, symbols: dict[sympy.Symbol, int], experts: int) -> int:
    """How many draws have enough tokens."""
    tokens = 1
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = value(node)
        if isinstance(fake, Tensor) and not is_weight(node):
            shape = fake.shape[: max(1, fake.dim() - fake.dtype.is_floating_point)]
            tokens = max(tokens, int(sympy.prod([expr(size).subs(symbols) for size in shape])))
    return min(3 + -(-max(_TOKENS // 2, 2 * experts) // tokens), _DRAWS)


def same(values: list[Any], wanted: list[Tensor]) -> bool:
    """In every draw, whatever the dtype; numbers are no tensors."""
    return all(isinstance(v, Tensor) and v.shape == other.shape and bool((v == other).all())
               for v, other in zip(values, wanted, strict=True))  # fmt: skip
