"""Which entries of values belong together, and how ranks share them, by following the numbers of entries through ops.

A dim that may be cut has a number for each of its entries. Entries that meet in an op are of one class and must be on
one rank. What ops do that only move entries is found by running them on the numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from moefx.ir import edit
from moefx.ir.dim_arguments import Held, sizes_held
from moefx.ir.dims import tensor_of
from moefx.ir.names import op_name
from moefx.ir.op import expr, value


class NotCut(Exception):
    """Why something stays whole."""


class Entries:
    """Classes of entries, and the one of n ranks that has each class.

    Numbers of a value's entries are a tensor of its shape, of size 1 in dims whose entries share them. A dim of no
    known size may have them again and again, as the rows [B*S*heads, ..] have the heads: these stand there once.
    """

    def __init__(self, n: int) -> None:
        self.n, self._count = n, 1
        self._met: list[tuple[Tensor, Tensor]] = []
        self._rank: Tensor | None = None  # of every class, -1 where it has none

    def fresh(self, count: int) -> Tensor:
        """Numbers of new entries, each a class of its own."""
        start, self._count = self._count, self._count + count
        return torch.arange(start, start + count)

    def join(self, one: Tensor, other: Tensor) -> None:
        """Entries that meet are of one class. Nothing is joined once ranks were given."""
        one, other = torch.broadcast_tensors(one, other)
        self._met.append((one.flatten(), other.flatten()))

    @cached_property
    def _class(self) -> Tensor:
        """The class of every entry: the smallest number in it."""
        found = torch.arange(self._count)
        one, other = (torch.cat(side) for side in zip(*self._met)) if self._met else (found, found)
        while True:
            least = torch.minimum(found[one], found[other])
            lower = found.scatter_reduce(0, one, least, "amin").scatter_reduce(0, other, least, "amin")
            lower = lower[lower]
            if torch.equal(lower, found):
                return found
            found = lower

    def spread(self, numbers: Tensor) -> None:
        """The ranks have equal runs of these entries. Raises NotCut where that is not possible."""
        count = numbers.numel()
        if count % self.n:
            raise NotCut(f"{count} hidden entries do not divide over {self.n} ranks")
        if self._rank is None:
            self._rank = torch.full((self._count,), -1)
        mine, wanted = self._class[numbers], torch.arange(count) * self.n // count
        before = self._rank[mine]
        self._rank[mine] = wanted
        if not torch.equal(self._rank[mine], wanted) or bool(((before >= 0) & (before != wanted)).any()):
            raise NotCut("entries that belong together are summed at different places")

    def ranks(self, numbers: Tensor, node: Node) -> Tensor:
        """The rank of each entry. Raises NotCut for entries that no rank was given."""
        found = None if self._rank is None else self._rank[self._class[numbers]]
        if found is None or bool((found < 0).any()):
            raise NotCut(f"hidden entries of {node.name} ({edit.place(node)}) come into no sum")
        return found

    def part(self, numbers: Tensor, rank: int, node: Node) -> Tensor:
        """The entries of a rank: some places of one dim."""
        dim, ranks = self.line(numbers, node)
        return numbers.index_select(dim, (ranks == rank).nonzero().flatten())

    def line(self, numbers: Tensor, node: Node) -> tuple[int, Tensor]:
        """The dim that is cut, and the rank of each of its places."""
        ranks = self.ranks(numbers, node)
        for dim in range(ranks.dim()):
            line = ranks.movedim(dim, 0).flatten(1)
            if (line == line[:, :1]).all() and len(line) > 1:
                return dim, line[:, 0]
        raise NotCut(f"a rank's entries of {node.name} ({edit.place(node)}) are no part of one dim")

    def arguments(self, node: Node, before: Tensor, after: Any) -> tuple[tuple, dict]:
        """Arguments with which an op that only moves entries, `before` to `after`, moves those of every rank alike."""
        given = source(node)
        each = after if isinstance(after, tuple) else (after,)
        cut, runs = self.line(before, given)
        sizes = {before.shape[cut]}
        for one, tensor in zip(each, _tensors(node)):
            dim, ranks = self.line(one, node)
            sizes.add(one.shape[dim])
            is_flat = type(tensor.shape[dim]) is not int or len(ranks) > len(runs)
            if is_flat and any(len(list(run)) == 1 for _, run in itertools.groupby(ranks.tolist())):
                # The types of a rank's sizes do not tell whether these are its rows or its columns.
                raise NotCut(f"every rank has one entry in rows of {node.name} ({edit.place(node)})")
        held = None if isinstance(after, tuple) else sizes_held(node).get(self.line(after, node)[0])
        for args, kwargs in _with_sizes(node, held, sizes, self.n):
            if all(self._moves_alike(node, before, after, rank, args, kwargs) for rank in range(self.n)):
                return args, kwargs
        raise NotCut(f"the sizes of an op cannot be those of a rank: {node.name} ({edit.place(node)})")

    def _moves_alike(self, node: Node, before: Tensor, after: Any, rank: int, args: tuple, kwargs: dict) -> bool:
        whole = after if isinstance(after, tuple) else (after,)
        try:
            found = _run(node, before, self.part(before, rank, source(node)), args, kwargs)
        except Exception:  # these sizes do not fit
            return False
        if len(found) != len(whole) or any(one.dim() != each.dim() for one, each in zip(whole, found)):
            return False
        found = [first(each, [d for d, size in enumerate(one.shape) if size == 1]) for one, each in zip(whole, found)]
        return all(_is_again(each, self.part(one, rank, node), tensor)
                   for one, each, tensor in zip(whole, found, _tensors(node)))  # fmt: skip


def source(node: Node) -> Node:
    """The one tensor that an op moves the entries of."""
    (given,) = [a for a in node.all_input_nodes if tensor_of(a) is not None]
    return given


def moved(node: Node, numbers: Tensor) -> Any:
    """An op that moves entries, on their numbers; a tuple where it gives several tensors."""
    found = map(_collapsed, _run(node, numbers, numbers, node.args, node.kwargs))
    found = tuple(_once(each, tensor) for each, tensor in zip(found, _tensors(node)))
    return found if isinstance(value(node), (tuple, list)) else found[0]


def _run(node: Node, whole: Tensor, numbers: Tensor, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
    """The op with these arguments on numbers, the `whole` ones or a rank's part of them, in all dims."""
    for number in (partial(_small, least=2), partial(_small, least=64)):
        with contextlib.suppress(Exception):  # it asks more of sizes, as that 8 divides them
            found = _run_with(number, node, whole, numbers, args, kwargs)
            if all(each.numel() for each in found):  # chunks of few rows have none
                return found
    return _run_with(lambda size: int(size.node.hint), node, whole, numbers, args, kwargs)


def _run_with(number: Callable[[torch.SymInt], int], node: Node, whole: Tensor, numbers: Tensor, args: tuple,
              kwargs: dict) -> tuple[Tensor, ...]:  # fmt: skip
    def concrete(size: Any) -> Any:
        found = full if size is given else value(size) if isinstance(size, Node) else size
        return number(found) if isinstance(found, torch.SymInt) else found

    given, full = source(node), numbers
    shape = tensor_of(given).shape
    real = [concrete(size) if count == 1 else -1 for count, size in zip(whole.shape, shape)]
    again = [1 if count == 1 else concrete(size) // count for count, size in zip(whole.shape, shape)]
    full = numbers.repeat(again).expand(real)
    args, kwargs = map_aggregate(args, concrete), map_aggregate(kwargs, concrete)
    run = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
    if op_name(node) == "view":  # numbers lie in memory in some other way
        run = torch.Tensor.reshape
    found = run(*args, **kwargs)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _tensors(node: Node) -> tuple[Tensor, ...]:
    found = value(node)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _once(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Numbers that a dim of no known size has again and again, once."""
    for dim, size in enumerate(tensor.shape):
        count = numbers.shape[dim]
        if type(size) is not int and count > 1:
            parts = (numbers.narrow(dim, 0, n) for n in range(1, count + 1) if count % n == 0)
            numbers = next(part for part in parts if _is_again(numbers, part, tensor))
    return numbers


def _is_again(numbers: Tensor, part: Tensor, tensor: Tensor) -> bool:
    """Whether numbers are those of a part, in dims of no known size perhaps several times."""
    again = [many // one for many, one in zip(numbers.shape, part.shape)]
    return all(n == 1 or type(size) is not int for n, size in zip(again, tensor.shape)) and (
        torch.equal(numbers, part.repeat(again)))  # fmt: skip


def _small(size: torch.SymInt, least: int) -> int:
    """What costs little: the entries of these dims are alike."""
    found = expr(size)
    return int(found.subs({symbol: least + zlib.crc32(str(symbol).encode()) % 3 for symbol in found.free_symbols}))


def _collapsed(numbers: Tensor) -> Tensor:
    """One entry of the dims that share theirs."""
    shared = [dim for dim in range(numbers.dim())
              if numbers.stride(dim) == 0 or bool((numbers == numbers.narrow(dim, 0, 1)).all())]  # fmt: skip
    return first(numbers, shared)


def first(numbers: Tensor, dims: list[int]) -> Tensor:
    """The first entries of these dims."""
    for dim in dims:
        numbers = numbers.narrow(dim, 0, 1)
    return numbers


def _with_sizes(node: Node, held: Held | None, sizes: set[int], n: int) -> list[tuple[tuple, dict]]:
    """Arguments of an op with sizes and bounds of cut dims as they may be on one of n ranks. held: where the size of
    the result's dim that is cut stands."""

    def changed(args: Any, which: Any) -> Any:
        if isinstance(args, slice):
            return slice(*(changed(each, which) for each in (args.start, args.stop)), args.step)
        if isinstance(args, (tuple, list)):
            return type(args)(changed(each, which) for each in args)
        return args // n if type(args) is int and which(args) else args

    tests = [lambda i: False, lambda i: i in sizes, lambda i: i > 1 and i % n == 0]
    given, *rest = node.args
    found = [((given, *changed(tuple(rest), test)), {k: changed(v, test) for k, v in node.kwargs.items()})
             for test in tests]  # fmt: skip
    if held is not None and type(size := held.of(node)) is int and size > 0:
        found.insert(1, held.put(node, size // n))
    return found


def pieces_of(ranks: list[int], n: int) -> tuple[int, ...] | None:
    """The pieces of a dim of which each is spread evenly over n ranks, by the ranks that have its entries; None if it
    has none: [0, 0, 1, 1, 0, 1] -> (4, 2)."""
    runs = [(rank, len(list(group))) for rank, group in itertools.groupby(ranks)]
    pieces = []
    while runs:
        found, sizes = zip(*runs[:n])
        if found != tuple(range(n)) or len(set(sizes)) > 1:
            return None
        pieces.append(sizes[0] * n)
        runs = runs[n:]
    return tuple(pieces)
