"""All-to-all algorithms as data: a list of steps, each an exchange within a group of ranks or a reordering at home.

n ranks on the axis, m of them per node: rank r is number r % m of node r // m. What one rank (`source`) sends to
another (`target`) is a block; blocks are never cut. Every step says where its blocks go, or in which order they stand;
sizes, splits and permutations follow from that and from the matrix `pairs` [n, n] of rows per (source, target).

    before the first step   rank p holds (p, 0), (p, 1), .. (p, n-1)      its rows by target
    after the last step     rank p holds (0, p), (1, p), .. (n-1, p)      its rows by source

The way back is the same algorithm with the roles of source and target exchanged, that is, with `pairs` transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from moefx.errors import ExtensionError, UnsupportedUse
from moefx.options import NAMES
from moefx.options.groups import OTHER_ROWS
from moefx.registered import Registered, check_name

INPUT = "rows"  # what the first step reads
OVER = ("intra", "inter", "all")


@dataclass(frozen=True)
class Blocks:
    """Blocks of all ranks, sorted by the rank that holds them and there by their order in memory; [B] int64 each."""

    source: np.ndarray
    target: np.ndarray
    holder: np.ndarray
    n: int
    m: int

    def take(self, places: np.ndarray) -> Blocks:
        return Blocks(self.source[places], self.target[places], self.holder[places], self.n, self.m)

    @property
    def is_near(self) -> np.ndarray:
        """Whether source and target are on one node."""
        return self.source // self.m == self.target // self.m


Rule = Callable[[Blocks], np.ndarray]


@dataclass(frozen=True)
class Exchange:
    """Every rank sends each block to the rank `to(blocks)`; what arrives stands by sender, then as it was sent.

    over: the group, `intra` (the ranks of a node), `inter` (the ranks of equal number on all nodes) or `all`.
    reads: the step whose blocks it sends, the one before if empty. They must stand in the order of their receivers.
    """

    name: str
    over: str
    to: Rule
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Local:
    """Every rank joins the blocks of the steps `reads` (the one before if empty), of them those with `keep(blocks)`,
    and sorts them by the keys `by`, the first of which counts most; equal ones keep their order."""

    name: str
    by: tuple[Rule, ...] = ()
    keep: Rule | None = None
    reads: tuple[str, ...] = ()


Step = Exchange | Local


@dataclass(frozen=True)
class Algorithm:
    """The steps of an all-to-all. hierarchical: it is worth nothing unless several nodes have several ranks each."""

    steps: tuple[Step, ...]
    hierarchical: bool = True

    def reads(self, step: Step) -> tuple[str, ...]:
        """The names of the steps that `step` reads; `INPUT` is what comes in."""
        place = self.steps.index(step)
        return step.reads or (self.steps[place - 1].name if place else INPUT,)

    def step(self, name: str) -> Step:
        """Raises UnsupportedUse for an unknown name."""
        for step in self.steps:
            if step.name == name:
                return step
        raise UnsupportedUse(f"the all-to-all has no step '{name}'", hint=", ".join(s.name for s in self.steps))


_ALGORITHMS: dict[str, Algorithm] = {}
NAMES["alltoall"] = "all-to-all", lambda: (*_ALGORITHMS, *OTHER_ROWS)


def register_all_to_all(name: str, algorithm: Algorithm) -> None:
    """Make an algorithm known as `name`, on every rank and before compiling.

    It is tried on small clusters first. Raises ExtensionError if it is not an Algorithm, if one of its functions
    raises, if a block does not arrive, arrives in the wrong order or leaves its group; UnsupportedUse for a name that
    is taken.
    """
    check_name("all-to-all", name)
    if name in (*_ALGORITHMS, *OTHER_ROWS):
        raise UnsupportedUse(f"there is an all-to-all '{name}' already", hint="give yours another name")
    with _naming(name):
        if not isinstance(algorithm, Algorithm):
            raise ExtensionError(f"it is of type {type(algorithm).__name__}", hint="give a moefx.extend.Algorithm")
        if not isinstance(algorithm.steps, (tuple, list)) or not algorithm.steps:
            raise ExtensionError(f"its steps are {algorithm.steps!r}", hint="give a tuple of Exchange and Local")
        algorithm = replace(algorithm, steps=tuple(map(_with_registered_rules, algorithm.steps)))
        for n, m in ((1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (8, 4)):
            _trace(algorithm, n, m)
    _ALGORITHMS[name] = algorithm


def _with_registered_rules(step: Any) -> Step:
    if not isinstance(step, (Exchange, Local)):
        raise ExtensionError(f"a step is of type {type(step).__name__}", hint="give an Exchange or a Local")
    if not isinstance(step.name, str):
        raise ExtensionError(f"the name of a step is {step.name!r}", hint="give a text")
    if not isinstance(step.reads, (tuple, list)) or not all(isinstance(name, str) for name in step.reads):
        _refuse(step, f"reads {step.reads!r}, not a tuple of names")
    step = replace(step, reads=tuple(step.reads))

    def rule(field: str, fn: Rule) -> Registered:
        return Registered(f"`{field}` of step '{step.name}'", fn)

    if isinstance(step, Exchange):
        if step.over not in OVER:
            _refuse(step, f"runs over {step.over!r}, not one of {', '.join(OVER)}")
        return replace(step, to=rule("to", step.to))
    if not isinstance(step.by, (tuple, list)):
        _refuse(step, "has a `by` that is not a tuple of functions")
    return replace(step, by=tuple(rule("by", fn) for fn in step.by), keep=step.keep and rule("keep", step.keep))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """What an algorithm does wrong is told with its name."""
    try:
        yield
    except ExtensionError as error:
        raise ExtensionError(f"the all-to-all '{name}': {error.what}", where=error.where, hint=error.hint) from error


def all_to_all_named(name: str) -> Algorithm:
    """Raises UnsupportedUse with the known names for any other."""
    if name not in _ALGORITHMS:
        raise UnsupportedUse(f"there is no all-to-all '{name}'",
                             hint=f"one of {', '.join((*_ALGORITHMS, *OTHER_ROWS))}")  # fmt: skip
    return _ALGORITHMS[name]


def group_of(over: str, n: int, m: int, rank: int) -> list[int]:
    """The ranks of the group of `rank`, in order."""
    if over == "intra":
        return list(range(rank // m * m, rank // m * m + m))
    return list(range(rank % m, n, m)) if over == "inter" else list(range(n))


@dataclass(frozen=True)
class _Moved:
    """The result of a step: its blocks, the rank (of an exchange) or the input (of a local step) where each came from,
    and its place among the blocks that its holder had there (of a local step)."""

    blocks: Blocks
    origin: np.ndarray
    place: np.ndarray


@lru_cache(maxsize=64)
def _trace(algorithm: Algorithm, n: int, m: int) -> dict[str, _Moved]:
    """What every rank holds after every step. Raises ExtensionError for an algorithm that is none."""
    source, target = (part.ravel() for part in np.indices((n, n)))
    nowhere = np.zeros(n * n, dtype=np.int64)
    known = {INPUT: _Moved(Blocks(source, target, source, n, m), nowhere, nowhere)}
    for step in algorithm.steps:
        reads = algorithm.reads(step)
        if step.name in known or not set(reads) <= known.keys():
            _refuse(step, "has the name of another" if step.name in known else f"reads {reads}, not all made before it")
        if isinstance(step, Exchange) and len(reads) > 1:
            _refuse(step, f"reads {reads}: an exchange reads one step")
        inputs = [known[name].blocks for name in reads]
        known[step.name] = _exchanged(step, *inputs) if isinstance(step, Exchange) else _sorted(step, inputs)
    last = algorithm.steps[-1]
    end = known[last.name].blocks
    arrived = np.array_equal(end.holder, source) and np.array_equal(end.target, source)
    if not arrived or not np.array_equal(end.source, target):
        _refuse(last, f"leaves blocks in the wrong place or order (n={n}, m={m})")
    return known


def _exchanged(step: Exchange, blocks: Blocks) -> _Moved:
    before, after = blocks.holder, _told(step, "to", step.to, blocks)
    if np.any((after < 0) | (after >= blocks.n)):
        _refuse(step, "sends blocks to ranks that do not exist")
    key = {"intra": lambda r: r // blocks.m, "inter": lambda r: r % blocks.m, "all": lambda r: r * 0}[step.over]
    if not np.array_equal(key(before), key(after)):
        _refuse(step, f"sends blocks out of their group '{step.over}'")
    if np.any((np.diff(after) < 0) & (np.diff(before) == 0)):
        _refuse(step, "sends blocks that do not stand in the order of their receivers")
    order = np.argsort(after, kind="stable")
    moved = Blocks(blocks.source, blocks.target, after, blocks.n, blocks.m).take(order)
    return _Moved(moved, before[order], np.zeros_like(order))


def _sorted(step: Local, inputs: Sequence[Blocks]) -> _Moved:
    n, m = inputs[0].n, inputs[0].m
    fields = [np.concatenate([getattr(b, name) for b in inputs]) for name in ("source", "target", "holder")]
    joined = Blocks(*fields, n, m)
    origin = np.concatenate([np.full(len(b.holder), i) for i, b in enumerate(inputs)])
    place = np.concatenate([np.arange(len(b.holder)) - np.searchsorted(b.holder, b.holder) for b in inputs])
    keep = np.arange(len(origin)) if step.keep is None else np.flatnonzero(_told(step, "keep", step.keep, joined))
    kept = joined.take(keep)
    order = np.lexsort((*(_told(step, "by", rule, kept) for rule in reversed(step.by)), kept.holder))
    return _Moved(kept.take(order), origin[keep][order], place[keep][order])


def _told(step: Step, field: str, rule: Rule, blocks: Blocks) -> np.ndarray:
    """What a rule says of every block, [B]: ranks, truths, or keys to sort by."""
    answer, count = rule(blocks), len(blocks.holder)
    try:
        told = np.asarray(answer)
    except (TypeError, ValueError):  # not an array at all, such as lists of unequal lengths
        told = np.empty(())
    if told.shape != (count,) or told.dtype.kind not in ("biuf" if field == "by" else "biu"):
        _refuse(step, f"has a rule `{field}` that gives {type(answer).__name__} {told.dtype}{list(told.shape)} for "
                      f"{count} blocks, not one whole number or truth for each")  # fmt: skip
    return told


def _refuse(step: Step, what: str) -> NoReturn:
    raise ExtensionError(f"step '{step.name}' {what}")


class Transport:
    """One algorithm as one rank sees it. `pairs` [n, n] int64: rows from every source (row) to every target."""

    def __init__(self, algorithm: Algorithm, n: int, m: int, rank: int) -> None:
        self._algorithm, self._n, self._m, self._rank = algorithm, n, m, rank
        self._lanes = {name: _at(moved, rank) for name, moved in _trace(algorithm, n, m).items()}

    def peers(self, step: str) -> list[int]:
        """The ranks that take part in an exchange, this one included."""
        return group_of(self._algorithm.step(step).over, self._n, self._m, self._rank)

    def over(self, step: str) -> str:
        """The group of an exchange, one of `OVER`."""
        return self._algorithm.step(step).over

    def num_rows(self, step: str, pairs: np.ndarray) -> int:
        """How many rows this rank holds after the step."""
        return int(self._sizes(step, pairs).sum())

    def splits(self, step: str, pairs: np.ndarray) -> tuple[list[int], list[int]]:
        """(rows to each of `peers`, rows from each of them) of an exchange."""
        (before,) = self._algorithm.reads(self._algorithm.step(step))
        peers = self.peers(step)
        leaving, arriving = self._lanes[before].blocks, self._lanes[step]
        to = np.asarray(self._algorithm.step(step).to(leaving), dtype=np.int64)
        return _sums(peers, to, self._sizes(before, pairs)), _sums(peers, arriving.origin, self._sizes(step, pairs))

    def is_idle(self, step: str, pairs: np.ndarray) -> bool:
        """Whether no rank of the exchange's group sends anything to another. All of them agree on it."""
        peers = self.peers(step)
        moved = _trace(self._algorithm, self._n, self._m)[step]
        here = np.isin(moved.blocks.holder, peers) & (moved.blocks.holder != moved.origin)
        return not pairs[moved.blocks.source[here], moved.blocks.target[here]].any()

    def segments(self, step: str, pairs: np.ndarray) -> list[tuple[int, int, int]]:
        """The result of a local step, piece by piece: (which input, its first row, number of rows), none empty."""
        lane, reads = self._lanes[step], self._algorithm.reads(self._algorithm.step(step))
        ends = [np.concatenate([[0], np.cumsum(self._sizes(name, pairs))]) for name in reads]
        found: list[tuple[int, int, int]] = []
        for which, place in zip(lane.origin.tolist(), lane.place.tolist()):
            start, stop = int(ends[which][place]), int(ends[which][place + 1])
            if found and found[-1][0] == which and sum(found[-1][1:]) == start:
                found[-1] = (which, found[-1][1], stop - found[-1][1])
            elif start < stop:
                found.append((which, start, stop - start))
        return found

    def _sizes(self, step: str, pairs: np.ndarray) -> np.ndarray:
        blocks = self._lanes[step].blocks
        return pairs[blocks.source, blocks.target]


def _at(moved: _Moved, rank: int) -> _Moved:
    first, last = np.searchsorted(moved.blocks.holder, [rank, rank + 1])
    here = slice(first, last)
    return _Moved(moved.blocks.take(here), moved.origin[here], moved.place[here])


def _sums(peers: Sequence[int], ranks: np.ndarray, sizes: np.ndarray) -> list[int]:
    total = np.zeros(len(peers), dtype=np.int64)
    np.add.at(total, np.searchsorted(peers, ranks), sizes)
    return total.tolist()


@lru_cache(maxsize=256)
def transport(name: str, n: int, m: int, rank: int) -> Transport:
    """The algorithm `name` as seen by rank `rank` of n, m per node. Raises UnsupportedUse for an unknown name."""
    with _naming(name):
        return Transport(all_to_all_named(name), n, m, rank)


def _leader(rank: np.ndarray, m: int) -> np.ndarray:
    return rank // m * m


register_all_to_all(
    "direct",
    Algorithm((Exchange("exchange", "all", to=lambda b: b.target),), hierarchical=False),
)

# HetuMoE (Nie et al. 2022), hierarchical all-to-all: all rows of a node go to its first rank, which alone talks to
# other nodes; few and large messages between nodes, but one rank's link carries everything.
register_all_to_all(
    "1dh",
    Algorithm((
        Exchange("gather", "intra", to=lambda b: _leader(b.source, b.m)),
        Local("by_node", by=(lambda b: b.target // b.m,)),
        Exchange("leaders", "inter", to=lambda b: _leader(b.target, b.m)),
        Local("by_rank", by=(lambda b: b.target,)),
        Exchange("scatter", "intra", to=lambda b: b.target),
    )),
)

# Tutel (Hwang et al. 2023), section 3.4, two-dimensional hierarchical all-to-all: rows for the ranks of number j,
# on whatever node, meet on the node's rank j, which exchanges with the ranks j of other nodes: n/m messages between
# nodes instead of n.
register_all_to_all(
    "2dh",
    Algorithm((
        Local("by_number", by=(lambda b: b.target % b.m,)),
        Exchange("intra", "intra", to=lambda b: _leader(b.source, b.m) + b.target % b.m),
        Local("by_node", by=(lambda b: b.target // b.m,)),
        Exchange("inter", "inter", to=lambda b: b.target),
    )),
)

# ScheMoE (Shi et al. 2024), section 5, Pipe-A2A: rows within the node and rows between nodes use different
# links, so both exchanges run at the same time, on groups of their own.
register_all_to_all(
    "pipe",
    Algorithm((
        Local("near", keep=lambda b: b.is_near, reads=(INPUT,)),
        Local("far", keep=lambda b: ~b.is_near, reads=(INPUT,)),
        Exchange("far_a2a", "all", to=lambda b: b.target, reads=("far",)),
        Exchange("near_a2a", "intra", to=lambda b: b.target, reads=("near",)),
        Local("join", by=(lambda b: b.source,), reads=("near_a2a", "far_a2a")),
    )),
)
