"""Who executes the collectives when a graph is run as it stands (verification, debugging, tests).

A graph at level `placed` names mesh axes only. Running it needs somebody who knows the ranks: a `World`. The linked
program does not come here; it calls the runtime with its session in hand. One world per thread, since tests run ranks
as threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moefx.axes import MeshSpec

_active = threading.local()


class World(Protocol):
    """Collectives over an axis, "ep" or "dp+ep"; every tensor is this rank's own."""

    def size(self, axis: str) -> int: ...

    def coordinate(self, axis: str) -> int: ...

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """[d0, ...] -> [n * d0, ...], rank-major."""

    def all_to_all(
        self, x: Tensor, send: list[int], receive: list[int], axis: str, among: Sequence[int] | None = None
    ) -> Tensor:
        """Rows [sum(send), ...] -> [sum(receive), ...]. among: the places on the axis that take part; None: all."""

    def all_reduce(self, x: Tensor, axis: str) -> Tensor: ...

    def tell(self, what: Any) -> list[Any]:
        """What all ranks tell one another, by rank."""


class SingleWorld:
    """One rank that stands for every axis: what a mesh of ones does."""

    def size(self, axis: str) -> int:
        return 1

    def coordinate(self, axis: str) -> int:
        return 0

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return x.clone()

    def all_to_all(
        self, x: Tensor, send: list[int], receive: list[int], axis: str, among: Sequence[int] | None = None
    ) -> Tensor:
        assert send == receive, f"one rank sends {send} but receives {receive}"
        return x[: send[0]].clone()

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x.clone()

    def tell(self, what: Any) -> list[Any]:
        return [what]


class ThreadWorld:
    """Ranks as threads of this process: real numbers on a mesh of any shape, with no process group.

    axes: {name: size}. `run(function)` gives `[function(rank), ...]`, each call in a thread of its own inside which
    `current()` is that rank's world. All ranks must make the same collectives in the same order; a rank that fails
    ends the others, and its error is raised.
    """

    def __init__(self, axes: Mapping[str, int], timeout_s: float = 60.0) -> None:
        self.mesh = MeshSpec(axes)
        self.size = self.mesh.size(axes)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}  # by the ranks that meet
        self._is_over = False  # a rank failed

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                with use(_ThreadRank(self, rank)):
                    results[rank] = function(rank)
            except BaseException as error:  # raised in the caller's thread
                errors.append((rank, error))
                self._end()

        self._meetings, self._is_over = {}, False
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
            raise own[0] if own else RuntimeError("the ranks do not make the same collectives")
        return results

    def swap(self, rank: int, ranks: Sequence[int], what: str, given: Any, take: Callable[[list[Any]], Any]) -> Any:
        """What `take` makes of what each of `ranks` gave to their collective number so-and-so. None goes on before all
        have taken: they may write to what they gave."""
        meeting = self._meeting(tuple(ranks))
        meeting.board[rank] = (what, given)
        meeting.barrier.wait(self._timeout_s)
        kinds = sorted({kind for kind, _ in meeting.board.values()})
        if len(kinds) > 1:
            raise RuntimeError(f"the ranks meet in different collectives: {kinds}")
        taken = take([meeting.board[other][1] for other in ranks])
        meeting.barrier.wait(self._timeout_s)
        return taken

    def _meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        with self._lock:
            found = self._meetings.setdefault(ranks, _Meeting(threading.Barrier(len(ranks))))
            if self._is_over:
                found.barrier.abort()
            return found

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()


@dataclass
class _Meeting:
    """Where some ranks swap: everybody writes to the board, and reads it when all have."""

    barrier: threading.Barrier
    board: dict[int, Any] = field(default_factory=dict)


class _ThreadRank:
    """The world as one rank of a ThreadWorld sees it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.mesh = world, rank, world.mesh

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)

    def coordinate(self, axis: str) -> int:
        return self.mesh.place(axis, self.mesh.coordinates(self.rank))

    def _peers(self, axis: str) -> list[int]:
        """The ranks that differ from this one along the axis only, in order."""
        dims = self.mesh.dims(axis)
        fixed = {dim: c for dim, c in self.mesh.coordinates(self.rank).items() if dim not in dims}
        return [r for r in range(self.world.size) if fixed.items() <= self.mesh.coordinates(r).items()]

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return self.world.swap(self.rank, self._peers(axis), f"all_gather over {axis}", x, torch.cat)

    def all_to_all(
        self, x: Tensor, send: list[int], receive: list[int], axis: str, among: Sequence[int] | None = None
    ) -> Tensor:
        peers = self._peers(axis)
        peers = peers if among is None else [peers[place] for place in among]
        me = peers.index(self.rank)

        def take(given: list[Sequence[Tensor]]) -> Tensor:
            parts = [to_all[me] for to_all in given]
            found = [part.shape[0] for part in parts]
            if found != receive:
                raise RuntimeError(f"rank {self.rank} expects {receive} rows over {axis} and gets {found}")
            return torch.cat(parts)

        return self.world.swap(self.rank, peers, f"all_to_all over {axis}", x[: sum(send)].split(send), take)

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        what = f"all_reduce over {axis}"
        return self.world.swap(self.rank, self._peers(axis), what, x, lambda given: torch.stack(given).sum(0))

    def tell(self, what: Any) -> list[Any]:
        return self.world.swap(self.rank, range(self.world.size), "telling", what, list)


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
