"""Who executes the collectives when a graph is run as it stands (verification, debugging, tests).

A graph at level `placed` names mesh axes only. Running it needs somebody who knows the ranks: a `World`. The linked
program does not come here; it calls the runtime with its session in hand. One world per thread, since tests run ranks
as threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

_active = threading.local()


class World(Protocol):
    """Collectives by axis name; every tensor is this rank's own."""

    def coordinate(self, axis: str) -> int: ...

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """[d0, ...] -> [n * d0, ...], rank-major."""

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], axis: str) -> Tensor:
        """Rows [sum(send), ...] -> [sum(receive), ...]."""

    def all_reduce(self, x: Tensor, axes: tuple[str, ...]) -> Tensor: ...


class SingleWorld:
    """One rank that stands for every axis: what a mesh of ones does."""

    def coordinate(self, axis: str) -> int:
        return 0

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return x.clone()

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], axis: str) -> Tensor:
        assert send == receive, f"one rank sends {send} but receives {receive}"
        return x[: send[0]].clone()

    def all_reduce(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.clone()


class ThreadWorld:
    """Ranks as threads of this process: real numbers on a mesh of any shape, with no process group.

    axes: {name: size}. `run(function)` gives `[function(rank), ...]`, each call in a thread of its own inside which
    `current()` is that rank's world. All ranks must make the same collectives in the same order; a rank that fails
    ends the others, and its error is raised.
    """

    def __init__(self, axes: dict[str, int], timeout_s: float = 60.0) -> None:
        self.axes = dict(axes)
        self.size = 1
        for size in axes.values():
            self.size *= size
        self._timeout_s = timeout_s
        self._barrier = threading.Barrier(self.size)
        self._board: list[Any] = [None] * self.size

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: place on it}, the last axis fastest."""
        found = {}
        for axis, size in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                with use(_ThreadRank(self, rank)):
                    results[rank] = function(rank)
            except BaseException as error:  # raised in the caller's thread
                errors.append((rank, error))
                self._barrier.abort()

        self._barrier.reset()
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
            raise own[0] if own else RuntimeError("the ranks do not make the same collectives")
        return results

    def swap(self, rank: int, what: str, given: Any) -> list[Any]:
        """What every rank gave to its collective number so-and-so."""
        self._board[rank] = (what, given)
        self._barrier.wait(self._timeout_s)
        found = list(self._board)
        self._barrier.wait(self._timeout_s)
        kinds = sorted({kind for kind, _ in found})
        if len(kinds) > 1:
            raise RuntimeError(f"the ranks meet in different collectives: {kinds}")
        return [item for _, item in found]


class _ThreadRank:
    """The world as one rank of a ThreadWorld sees it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.place = world, rank, world.coordinates(rank)

    def coordinate(self, axis: str) -> int:
        return self.place[axis]

    def _peers(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from this one in `axes` only, in order."""
        fixed = {a: c for a, c in self.place.items() if a not in axes}
        return [r for r in range(self.world.size) if fixed.items() <= self.world.coordinates(r).items()]

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        given = self.world.swap(self.rank, f"all_gather over {axis}", x)
        return torch.cat([given[r] for r in self._peers((axis,))])

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], axis: str) -> Tensor:
        me = self.coordinate(axis)
        given = self.world.swap(self.rank, f"all_to_all over {axis}", x[: sum(send)].split(send))
        parts = [given[r][me] for r in self._peers((axis,))]
        found = [part.shape[0] for part in parts]
        if found != receive:
            raise RuntimeError(f"rank {self.rank} expects {receive} rows over {axis} and gets {found}")
        return torch.cat(parts)

    def all_reduce(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        given = self.world.swap(self.rank, f"all_reduce over {'+'.join(axes)}", x)
        return torch.stack([given[r] for r in self._peers(axes)]).sum(0)


def current() -> World:
    """The world of this thread; one rank when nobody set one."""
    return getattr(_active, "world", None) or SingleWorld()


@contextlib.contextmanager
def use(world: World) -> Iterator[None]:
    before = getattr(_active, "world", None)
    _active.world = world
    try:
        yield
    finally:
        _active.world = before


def split_axes(axes: str) -> tuple[str, ...]:
    """`"dp+ep"` -> `("dp", "ep")`; the empty string names no axis."""
    return tuple(a for a in axes.split("+") if a)
