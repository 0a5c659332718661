"""How a tensor is cut over the ranks of a mesh: plain data that compiler and runtime both ask.

    Layout()                                            every rank has the whole tensor
    Layout((Cut(0, ("ep",), (8,)),))                    eight rows, spread over ep
    Layout((Cut(1, ("a", "b"), (64, 64)),))             64 columns of gate and 64 of up, each spread over a and b
    Layout((Spread(("ep",), (0, 0, 0, 2)),))            three rows at place 0 of ep, one at place 2
    Layout(owner=(("ep",), 3))                          all of it at place 3 of ep, nothing elsewhere

Nothing here knows ranks: a mesh is the size of each of its dims, {"dp": 2, "ep": 4}, in order, and a rank is its place
on each of them, {"dp": 0, "ep": 3}. Along several dims the first one is the slowest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from moefx._torch_compat import strided_shard
from moefx.axes import split_axes

Numbers = Mapping[str, int]  # sizes of mesh dims, or places on them
Shape = Sequence[int]


def size(axis: Sequence[str], sizes: Numbers) -> int:
    """The number of ranks along several mesh dims."""
    return math.prod(sizes[dim] for dim in axis)


def index(axis: Sequence[str], sizes: Numbers, place: Numbers) -> int:
    """A place along several mesh dims as one number."""
    found = 0
    for dim in axis:
        found = found * sizes[dim] + place[dim]
    return found


def chunked(rows: int, sizes: Sequence[int]) -> list[int]:
    """How many of so many rows each place along mesh dims of these sizes has: DTensor's `Shard` cuts one dim after the
    other, as `torch.chunk` does. The last ones may have fewer, or none."""
    found = [rows]
    for n in sizes:
        found = [max(0, min(-(-count // n), count - i * -(-count // n))) for count in found for i in range(n)]
    return found


class Box(NamedTuple):
    """A block of a tensor: where it begins in what a rank stores, where in the whole tensor, and its sizes."""

    local: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def of_local(self, part: Tensor) -> Tensor:
        """The block as a view of what the rank stores."""
        return part[tuple(slice(o, o + n) for o, n in zip(self.local, self.size))]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size))


@dataclass(frozen=True)
class Cut:
    """Dim `dim` is a concatenation of `pieces` (their sizes), and the ranks along `axis` have equal shares of each. One
    piece that does not divide is cut as DTensor's `Shard` cuts it, see `chunked`."""

    dim: int
    axis: tuple[str, ...]
    pieces: tuple[int, ...]

    def ranges(self, sizes: Numbers, place: Numbers) -> list[tuple[int, int]]:
        """(offset, size) of this place's share of every piece."""
        mine, shares = index(self.axis, sizes, place), (self._shares(piece, sizes) for piece in self.pieces)
        return [(start + sum(each[:mine]), each[mine]) for start, each in zip(self._starts(), shares)]

    def most(self, sizes: Numbers) -> int:
        """The most that any place has of the dim."""
        return sum(self._shares(piece, sizes)[0] for piece in self.pieces)

    def place_of(self, position: int, sizes: Numbers) -> int:
        """Where on the axis the rank stands that has this position of the dim."""
        start, piece = next((s, p) for s, p in zip(self._starts(), self.pieces) if position < s + p)
        ends = itertools.accumulate(self._shares(piece, sizes))
        return next(place for place, end in enumerate(ends) if position - start < end)

    def _shares(self, piece: int, sizes: Numbers) -> list[int]:
        return chunked(piece, [sizes[dim] for dim in self.axis])

    def _starts(self) -> Iterator[int]:
        return itertools.accumulate(self.pieces, initial=0)

    def placements(self, sizes: Numbers) -> dict[str, Placement]:
        """For each mesh dim what DTensor says, which cuts by one mesh dim after the other, in their order; empty if it
        has no words. (Several pieces over several mesh dims it can cut, but torch 2.13 puts them together wrong.)"""
        if len(self.pieces) > 1 and (len(set(self.pieces)) > 1 or len(self.axis) > 1):
            return {}
        order, found = list(sizes), {}
        for i, dim in enumerate(self.axis):
            later = size([d for d in self.axis[:i] if order.index(d) > order.index(dim)], sizes)
            blocks = len(self.pieces) * later  # each of them is cut by `dim`
            found[dim] = Shard(self.dim) if blocks == 1 else strided_shard(self.dim, blocks)
        return found

    def complaint(self, shape: Shape, sizes: Numbers) -> str | None:
        """Why it does not fit a tensor or mesh."""
        n = 1 if len(self.pieces) == 1 else size(self.axis, sizes)
        if not 0 <= self.dim < len(shape) or sum(self.pieces) != shape[self.dim] or any(p % n for p in self.pieces):
            return f"dim {self.dim} of {tuple(shape)} does not divide so over {size(self.axis, sizes)} ranks"
        return None

    def __str__(self) -> str:
        return f"dim {self.dim} of {'+'.join(map(str, self.pieces))} over {'+'.join(self.axis)}"


@dataclass(frozen=True)
class Spread:
    """Row r of dim 0 is at place `owners[r]` along `axis`. A place stores its rows in order: many, few or none."""

    axis: tuple[str, ...]
    owners: tuple[int, ...]
    dim: ClassVar[int] = 0

    def ranges(self, sizes: Numbers, place: Numbers) -> list[tuple[int, int]]:
        """(offset, size) of every run of rows that this place has."""
        mine = index(self.axis, sizes, place)
        return [(start, count) for owner, start, count in self._runs() if owner == mine]

    def most(self, sizes: Numbers) -> int:
        """The most rows that any place has."""
        return max(Counter(self.owners).values(), default=0)

    def place_of(self, position: int, sizes: Numbers) -> int:
        """Where on the axis the rank stands that has this row."""
        return self.owners[position]

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(owner, first row, number of rows)"""
        start = 0
        for owner, rows in itertools.groupby(self.owners):
            count = len(list(rows))
            yield owner, start, count
            start += count

    def placements(self, sizes: Numbers) -> dict[str, Placement]:
        """DTensor has no words for it: its `Shard`s are even, or as `torch.chunk` makes them."""
        return {}

    def complaint(self, shape: Shape, sizes: Numbers) -> str | None:
        """Why it does not fit a tensor or mesh."""
        if not shape or shape[0] != len(self.owners):
            return f"dim 0 of {tuple(shape)} does not have {len(self.owners)} rows"
        strange = next((owner for owner in self.owners if not 0 <= owner < size(self.axis, sizes)), None)
        return None if strange is None else f"there is no place {strange} on {'+'.join(self.axis)}"

    def __str__(self) -> str:
        runs = list(self._runs())
        counts, owners = "+".join(str(count) for _, _, count in runs), "+".join(str(owner) for owner, _, _ in runs)
        return f"dim 0 of {counts} at {owners} over {'+'.join(self.axis)}"


@dataclass(frozen=True)
class Layout:
    """Cuts of different dims over different mesh dims; and the axis and place of the ranks that store anything at all,
    None if all do. The others store a tensor without elements. `shape` is that of the whole tensor below."""

    cuts: tuple[Cut | Spread, ...] = ()
    owner: tuple[tuple[str, ...], int] | None = None

    @staticmethod
    def rows(count: int, axis: str) -> Layout:
        """So many rows, spread over an axis, which is mesh dims joined by "+"; "": whole."""
        return Layout((Cut(0, split_axes(axis), (count,)),) if axis else ())

    @staticmethod
    def spread(owners: Sequence[int], axis: str, ranks: int) -> Layout:
        """Row r at place `owners[r]` of an axis of so many ranks; in order and as many on each: `rows`."""
        each, more = divmod(len(owners), ranks)
        if not more and all(owner == row // each for row, owner in enumerate(owners)):
            return Layout.rows(len(owners), axis)
        return Layout((Spread(split_axes(axis), tuple(owners)),))

    @staticmethod
    def of(placements: Sequence[Placement], dims: Sequence[str], shape: Shape) -> Layout:
        """The layout of a plain DTensor whose `Shard`s are even."""
        axes: dict[int, tuple[str, ...]] = {}
        for dim, placement in zip(dims, placements):
            if not placement.is_replicate():
                assert type(placement) is Shard, f"{placement} is no cut"
                axes[placement.dim] = (*axes.get(placement.dim, ()), dim)
        return Layout(tuple(Cut(dim, axis, (shape[dim],)) for dim, axis in sorted(axes.items())))

    @staticmethod
    @functools.cache
    def read(words: str) -> Layout:
        """The layout that `str` has put in these words."""
        cuts = [_read_cut(int(dim), split_axes(axis), _numbers(counts), _numbers(owners))
                for dim, counts, owners, axis in
                re.findall(r"dim (\d+) of (\S+)(?: at (\S+))? over ([^ ,]+)", words)]  # fmt: skip
        owner = re.search(r"at place (\d+) of (\S+)", words)
        return Layout(tuple(cuts), (split_axes(owner[2]), int(owner[1])) if owner else None)

    def check(self, shape: Shape, sizes: Numbers) -> None:
        """Raises ValueError, with what does not fit, for a tensor or mesh that cannot be laid out so."""
        used = [dim for cut in self.cuts for dim in cut.axis] + list(self.owner[0] if self.owner else ())
        strange = sorted({dim for dim in used if dim not in sizes or used.count(dim) > 1})
        if strange:
            raise ValueError(f"{self}: '{strange[0]}' must be one dim of the mesh ({', '.join(sizes)}), used once")
        if self.owner and not 0 <= self.owner[1] < size(self.owner[0], sizes):
            raise ValueError(f"{self}: there is no place {self.owner[1]} on {'+'.join(self.owner[0])}")
        if len({cut.dim for cut in self.cuts}) < len(self.cuts):
            raise ValueError(f"{self}: a dim is cut twice")
        wrong = next(filter(None, (cut.complaint(shape, sizes) for cut in self.cuts)), None)
        if wrong:
            raise ValueError(f"{self}: {wrong}")

    def holds(self, sizes: Numbers, place: Numbers) -> bool:
        """Whether there is anything at this place."""
        return self._is_owner(sizes, place) and all(cut.ranges(sizes, place) for cut in self.cuts)

    def _is_owner(self, sizes: Numbers, place: Numbers) -> bool:
        return self.owner is None or index(self.owner[0], sizes, place) == self.owner[1]

    def owner_place(self, sizes: Numbers) -> dict[str, int]:
        """Where the owner stands, on the dims of its axis."""
        axis, rest = self.owner
        found = {}
        for dim in reversed(axis):
            rest, found[dim] = divmod(rest, sizes[dim])
        return found

    def shape(self, shape: Shape, sizes: Numbers, place: Numbers | None = None) -> torch.Size:
        """The shape of the part at this place, where there is one; without a place, of the largest part. It is the
        same everywhere unless rows are a `Spread`."""
        found = list(shape)
        for cut in self.cuts:
            found[cut.dim] = cut.most(sizes) if place is None else sum(n for _, n in cut.ranges(sizes, place))
        return torch.Size(found)

    def take(self, whole: Tensor, sizes: Numbers, place: Numbers) -> Tensor:
        """What is stored at this place: a view, unless a dim has several pieces or runs."""
        if not self._is_owner(sizes, place):
            return whole[:0] if whole.ndim else whole.reshape(1)[:0]
        for cut in self.cuts:
            shares = [whole.narrow(cut.dim, *found) for found in cut.ranges(sizes, place) or [(0, 0)]]
            whole = shares[0] if len(shares) == 1 else torch.cat(shares, cut.dim)
        return whole

    def put(self, whole: Tensor, part: Tensor, sizes: Numbers, place: Numbers) -> None:
        """Write what is stored at this place to where it belongs."""
        for box in self.boxes(whole.shape, sizes, place):
            whole[box.slices].copy_(box.of_local(part))

    def boxes(self, shape: Shape, sizes: Numbers, place: Numbers) -> list[Box]:
        """The blocks of the whole tensor that are stored at this place."""
        if not self.holds(sizes, place):
            return []
        ranges = [[(0, n)] for n in shape]
        for cut in self.cuts:
            ranges[cut.dim] = [found for found in cut.ranges(sizes, place) if found[1]]
        found = []
        for choice in itertools.product(*[range(len(each)) for each in ranges]):
            local = tuple(sum(n for _, n in each[:i]) for i, each in zip(choice, ranges))
            here = [each[i] for i, each in zip(choice, ranges)]
            found.append(Box(local, tuple(offset for offset, _ in here), tuple(n for _, n in here)))
        return found

    def among(self, dims: Iterable[str], sizes: Numbers) -> Layout:
        """How the ranks along these mesh dims share what they have together: of every piece, its shares one after the
        other. Cut over other dims as well, that is a part of the whole tensor."""
        dims, found = set(dims), []
        for cut in self.cuts:
            axis = tuple(dim for dim in cut.axis if dim in dims)
            if axis:
                assert isinstance(cut, Cut), f"{cut}: its places have different numbers of rows"
                rest = size(cut.axis, sizes) // size(axis, sizes)
                found.append(Cut(cut.dim, axis, tuple(piece // rest for piece in cut.pieces)))
        return Layout(tuple(found))

    def sharers(self, dims: Iterable[str]) -> tuple[str, ...]:
        """Those of the mesh dims along which all ranks store the same."""
        apart = {dim for cut in self.cuts for dim in cut.axis}.union(self.owner[0] if self.owner else ())
        return tuple(dim for dim in dims if dim not in apart)

    def placements(self, sizes: Numbers) -> tuple[Placement, ...]:
        """What DTensor says of it, by mesh dim: true wherever it can say it, `Replicate` along the dims of owners and
        of other cuts."""
        said = dict.fromkeys(sizes, Replicate())
        for cut in self.cuts:
            said.update(cut.placements(sizes))
        return tuple(said.values())

    def plain(self, sizes: Numbers) -> Layout:
        """Of the cuts those that are a `Shard` of every mesh dim: DTensor's own rules hold for what is laid out so."""
        shards = [(cut, cut.placements(sizes).values()) for cut in self.cuts]
        return Layout(tuple(cut for cut, said in shards if said and all(type(each) is Shard for each in said)))

    def of_row(self, row: int, sizes: Numbers) -> Layout:
        """The layout of one row of a tensor that is laid out so: where its rows are spread, one place has it."""
        cuts = tuple(Cut(cut.dim - 1, cut.axis, cut.pieces) for cut in self.cuts if cut.dim)
        spread = next((cut for cut in self.cuts if cut.dim == 0), None)
        if spread is None:
            return Layout(cuts, self.owner)
        assert self.owner is None, "a layout has one owner"
        return Layout(cuts, (spread.axis, spread.place_of(row, sizes)))

    def __str__(self) -> str:
        words = [str(cut) for cut in self.cuts]
        if self.owner:
            words.append(f"at place {self.owner[1]} of {'+'.join(self.owner[0])}")
        return ", ".join(words) or "whole"


def places(sizes: Numbers) -> list[dict[str, int]]:
    """The places on mesh dims of these sizes, the last dim fastest."""
    return [dict(zip(sizes, each)) for each in itertools.product(*map(range, sizes.values()))]


def part_of(x: Tensor, dim: int, pieces: Sequence[int], n: int, place: int) -> Tensor:
    """The share of place `place` of n of each piece of a dim: a view where there is one piece."""
    return _of_dim(dim, pieces).take(x, {"axis": n}, {"axis": place})


def padded(part: Tensor, dim: int, pieces: Sequence[int], n: int, place: int) -> Tensor:
    """The transpose: zeros for the shares of other places."""
    shape = list(part.shape)
    shape[dim] *= n
    whole = part.new_zeros(shape)
    _of_dim(dim, pieces).put(whole, part, {"axis": n}, {"axis": place})
    return whole


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split("+"))) if words else ()


def _read_cut(dim: int, axis: tuple[str, ...], counts: tuple[int, ...], owners: tuple[int, ...]) -> Cut | Spread:
    if not owners:
        return Cut(dim, axis, counts)
    return Spread(axis, tuple(owner for owner, count in zip(owners, counts) for _ in range(count)))


def _of_dim(dim: int, pieces: Sequence[int]) -> Layout:
    return Layout((Cut(dim, ("axis",), tuple(pieces)),))
