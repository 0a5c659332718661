"""What becomes of the dims of an op's tensors, as data. `ir/dims.py` says it of every op."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from moefx.ir.op import expr, value

Size = int | sympy.Expr


class How(enum.Enum):
    """What an op does to one dim of one tensor argument.

    A cut is what a rank, or a chunk, has of a dim: consecutive entries. If a dim is kept, the op makes of a cut the cut
    of the result, where all dims that become the same dim of the result are cut alike. If it is reduced or contracted,
    the op makes of the cuts values that together (their sum, maximum, ..) make the result.
    """

    KEPT = "kept"  # every entry makes entries of its own
    SHARED = "shared"  # its only entry goes into all entries of a dim of the result
    REDUCED = "reduced"  # it is gone: `by` says whether summed, averaged, ..
    CONTRACTED = "contracted"  # it is gone: products with the entries of another argument's dim are summed
    TAKEN = "taken"  # some of its entries, named by number, or all of them at other places
    ORDERED = "ordered"  # every entry of the result depends on which entries stand before it, or on its own place
    MIXED = "mixed"  # every entry may depend on every other one
    UNREAD = "unread"  # neither its entries nor its size are read


@dataclass(frozen=True)
class Place:
    """Where the entries of a dim, or of a factor of it, are in the result: dim `dim` runs over outer * size * inner
    entries, and the factor is the middle one. With outer == 1, consecutive entries stay consecutive."""

    dim: int
    size: Size
    outer: Size = 1


@dataclass(frozen=True)
class Fate:
    """to: of a kept dim, its factors from the outermost on. Of a view that takes a dim apart in a way that has no
    factors, its outermost ones, as far as there are any."""

    how: How
    to: tuple[Place, ...] = ()
    by: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the dim becomes one dim of the result, or the first factor of one, as it is."""
        return self.how is How.KEPT and len(self.to) == 1 and self.to[0].outer == 1

    def cut(self, n: int) -> Place | None:
        """The place of n equal cuts, if the result's dim is cut into n then."""
        if self.how not in (How.KEPT, How.MIXED) or not self.to or self.to[0].size % n != 0:
            return None
        return self.to[0]


MIXED, TAKEN, ORDERED, UNREAD = Fate(How.MIXED), Fate(How.TAKEN), Fate(How.ORDERED), Fate(How.UNREAD)
CONTRACTED, SUMMED = Fate(How.CONTRACTED, by="sum"), Fate(How.REDUCED, by="sum")


@dataclass(frozen=True)
class Operand:
    """A tensor argument (or a list of tensors that some op gave, as one) and what becomes of each of its dims. An op
    that takes a tensor twice has two operands."""

    node: Node
    dims: tuple[Fate, ...]

    def into(self, dim: int, shared: bool = True) -> list[int]:
        """Its dims whose entries are in dim `dim` of the result. shared: also one whose only entry is in all of it."""
        return [i for i, fate in enumerate(self.dims) if any(place.dim == dim for place in fate.to)
                and (shared or fate.how is not How.SHARED)]  # fmt: skip


def tensor_of(node: object) -> torch.Tensor | None:
    """A node's value, or the first one of several, as those of a chunk."""
    found = value(node) if isinstance(node, Node) else None
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    return found if isinstance(found, torch.Tensor) else None


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    return tuple(size if type(size) is int else _known(size) for size in tensor.shape)


def _known(size: torch.SymInt) -> Size:
    """A size with numbers for what the program's conditions fix: of Max(1, s0), that it is 2."""
    found = expr(size)
    if found.is_Symbol or not found.free_symbols:
        return found
    guards = (guard.expr for guard in size.node.shape_env.guards)
    return found.xreplace({g.lhs: g.rhs for g in guards if isinstance(g, sympy.Eq) and g.rhs.is_Integer})


def kept(dim: int, size: Size) -> Fate:
    """The dim becomes dim `dim` of the result."""
    return Fate(How.KEPT, (Place(dim, size),))


def stay(shape: Sequence[Size], others: Mapping[int, Fate] | None = None) -> tuple[Fate, ...]:
    """All dims keep their numbers, except for those whose fate is given."""
    return tuple((others or {}).get(i) or kept(i, size) for i, size in enumerate(shape))


def aligned(shape: Sequence[Size], out: Sequence[Size]) -> tuple[Fate, ...]:
    """Of a tensor that is broadcast to the shape `out`."""
    shift = len(out) - len(shape)
    return tuple(meets(size, i + shift, out[i + shift]) for i, size in enumerate(shape))


def meets(size: Size, dim: int, out: Size) -> Fate:
    """Of a dim that is broadcast to dim `dim` of the result, of size `out`."""
    return Fate(How.SHARED, (Place(dim, 1),)) if size == 1 and out != 1 else kept(dim, size)


def regrouped(before: Sequence[Size], after: Sequence[Size]) -> tuple[Fate, ...]:
    """Of a view that has all entries in the same order: [a, b*c] -> [a*b, c] and the like."""
    if 0 in before:
        return tuple(kept(i, size) if tuple(before) == tuple(after) else MIXED for i, size in enumerate(before))
    places: list[list[Place]] = [[] for _ in before]
    whole = [True] * len(before)
    i = j = 0
    left, right, outer = _at(before, 0), _at(after, 0), 1
    while i < len(before) and j < len(after):
        common = left if left == right else _gcd(left, right)
        if common != 1 or before[i] == 1:
            places[i].append(Place(j, common, outer))
            left, right, outer = quotient(left, common), quotient(right, common), outer * common
        elif left != 1 and right != 1:  # no factors: go on where as many entries are behind on both sides
            first = i
            i, j = _meeting(before, after, i, j, quotient(right, left))
            whole[first:i] = [False] * (i - first)
            left, right, outer = _at(before, i), _at(after, j), 1
            continue
        is_full = right == 1
        if left == 1:
            i, left = i + 1, _at(before, i + 1)
        if is_full:
            j, right, outer = j + 1, _at(after, j + 1), 1
    for rest in range(i, len(before)):
        whole[rest] = whole[rest] and before[rest] == 1
    return tuple(Fate(How.KEPT if ok else How.MIXED, tuple(found)) for ok, found in zip(whole, places))


def _at(shape: Sequence[Size], i: int) -> Size:
    return shape[i] if i < len(shape) else 1


def _meeting(before: Sequence[Size], after: Sequence[Size], i: int, j: int, ratio: Size) -> tuple[int, int]:
    """The first dims behind i and j with as many entries in front of them. ratio: what is left of dim j over that of
    dim i."""
    for a in range(i + 1, len(before) + 1):
        found = ratio
        for b in range(j + 1, len(after) + 1):
            if quotient(found, 1) == math.prod(before[i + 1 : a]):
                return a, b
            found = found * _at(after, b)
    return len(before), len(after)


def _gcd(a: Size, b: Size) -> Size:
    return math.gcd(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.gcd(a, b)


def quotient(a: Size, b: Size) -> Size:
    """a / b."""
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return sympy.cancel(sympy.sympify(a) / b)
