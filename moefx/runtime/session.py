"""The runtime side of one compiled model on one rank: mesh, process groups, watchdog, and the waits that name names."""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moefx import errors
from moefx._torch_compat import all_gather_flat, default_store, join_dims
from moefx.errors import CollectiveError, DivergenceError, ExtensionError, MoefxError, OffloadError, UnsupportedUse
from moefx.runtime.groups import Axes, GroupSet, MeshView, OnMesh, Part, agree_on_label, is_fake
from moefx.runtime.headers import HeaderBook
from moefx.runtime.held import Holder, T
from moefx.runtime.overdue import Overdue
from moefx.runtime.placement import Placements
from moefx.runtime.profiler import Profiler
from moefx.runtime.stopwatch import Stopwatch
from moefx.runtime.streams import CudaStreams
from moefx.runtime.watchdog import Silence, Watchdog, ahead
from moefx.transport.p2p import TAGS, Parcel, all_gather_several, all_to_all, exchange


class Step(Protocol):
    """A step of a program: the hash of the program (fits int64), the number of the step, whether its backward reduces
    gradients, and the digest of the tables that say where experts are (fits int64)."""

    program: int
    number: int
    synchronise: bool
    tables: int


class Work(Protocol):
    """Something under way: a collective of torch.distributed, or a copy to the host."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future: ...


class Traffic(NamedTuple):
    """One collective, for the trace: its kind, axes, region and the bytes this rank sends to other ranks. Or, over no
    axes, a copy to the host's memory or back."""

    kind: str
    axes: tuple[str, ...]
    region: str
    num_bytes: int


# Of every rank's view (ranks may be threads). They are not closed with a session: torch takes equal meshes for one, and
# keeps what it knows of tensors on them.
_root_meshes: dict[MeshView, tuple[DeviceMesh, GroupSet]] = {}


class Session(OnMesh):
    """Everything that one compiled model holds at run time on this rank; made by all ranks of `mesh` in the same order.

    timeout: how long this rank waits for others before it raises CollectiveError, whatever the backend allows.
    `trace` is None, or a list to which every collective is added; `waits` are by kind and region what ranks stood still
    for. While there is a `profiler`, programs run the copies of their code that report to it. root: {dim: size} of the
    root mesh, if `mesh` has other dims. placement: who has copies of which experts, as in `Options`. Raises MeshError
    for a mesh that cannot be used.
    """

    def __init__(self, mesh: DeviceMesh, name: str, timeout: timedelta, *, watch_period_s: float = 2.0,
                 root: Mapping[str, int] | None = None, placement: str | None = None) -> None:  # fmt: skip
        given = MeshView.of(mesh)
        self.view = given.factored(root or dict(zip(given.names, given.sizes)))
        self.name = name
        self.rank = dist.get_rank()
        self.timeout = timeout
        self.is_fake = is_fake()
        self.trace: list[Traffic] | None = None
        self.waits: dict[tuple[str, str], Stopwatch] = {}
        self.profiler: Profiler | None = None
        self.streams = CudaStreams() if self.view.device_type == "cuda" else None
        self.headers = HeaderBook(self.streams)
        self._held = Holder()
        self.placements = Placements(placement)
        self.is_closed = False
        self.has_failed = False
        self._exchanges = self._tag = 0
        label = self._label = agree_on_label(given, name)
        # Longer than ours, so that the error is the one that names the rank and not the backend's.
        self._groups = GroupSet(self.view, label, 2 * timeout + timedelta(seconds=5))
        self._earlier: list[GroupSet] = []
        alone = self.is_fake or len(self.view.table) == 1
        self._store = None if alone else default_store()
        self._meetings: dict[str, int] = {}  # how many there were, by group
        self._watchdog = Watchdog(self._store, f"{label}/watch", self.rank, period_s=watch_period_s)
        self._broken: CollectiveError | None = None  # on CUDA: why its groups are no longer there
        this = weakref.proxy(self)
        self._overdue = Overdue(lambda *failure: this._give_up(*failure), lambda: this.timeout.total_seconds(),
                                watch_period_s)  # fmt: skip

    def tell(self, words: str) -> None:
        """A warning of what all ranks know; the lowest one gives it."""
        if self.rank == min(self.view.table):
            errors.warn(words)

    def held(self, kind: type[T]) -> T:
        """The one of a kind of `runtime.held` that this session has, and closes."""
        return self._held.of(kind, lambda: kind(self))

    @property
    def is_over(self) -> bool:
        """Closed or failed: what was started before need not be waited for any more."""
        return self.is_closed or self.has_failed

    @property
    def device(self) -> torch.device:
        """Where the tensors of this rank live."""
        return torch.device(self.view.device_type)

    def group(self, axes: Axes, purpose: str, part: Part | None = None, *, alone: bool = False,
              ) -> dist.ProcessGroup | None:  # fmt: skip
        """This session's process group along `axes`, or the part of it within or between nodes, for a purpose. Made on
        first use: all its ranks ask in the same order. None where the axes hold one rank, who needs no group unless
        `alone`. Raises CollectiveError if it cannot be made."""
        if self.is_closed:
            raise UnsupportedUse(f"The session '{self.name}' is closed.", hint="compile again")
        if self._broken is not None:
            raise self._broken
        names = self.view.axes(axes)
        if not names and not alone:
            return None
        if (names, purpose, part) in self._groups:
            return self._groups.get(names, purpose, part)
        return self._joined(self._groups, names, purpose, part)

    def _joined(self, groups: GroupSet, names: tuple[str, ...], purpose: str,
                part: Part | None = None) -> dist.ProcessGroup:  # fmt: skip
        kind = f"{part[0]}-node {purpose}" if part else purpose
        with self.guard(f"making the {kind} group over {'+'.join(names)}", names):
            ranks, name = groups.describe(names, purpose, part)
            self._await(ranks, f"{name}/here")  # torch would wait for them as long as an exchange may take in the group
            group = groups.get(names, purpose, part)
            self._await(ranks, f"{name}/made")  # a rank that closed it now would break the connecting of slower ones
            return group

    def refactor(self, root: Mapping[str, int]) -> None:
        """From now on the ranks, in the same order, have other dims {name: size}. Groups that were made stay until
        `close`. All ranks of the mesh call this together."""
        self._earlier.append(self._groups)
        self._label += "/factored again"
        self.view = self.view.factored(root)
        self._groups = GroupSet(self.view, self._label, 2 * self.timeout + timedelta(seconds=5))

    def root_mesh(self, mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
        """The root mesh: `mesh` itself if it has the same dims, else one for all sessions until the default group is
        gone. axes: along which parameters are cut. Raises DivergenceError where ranks factor the mesh differently."""
        names, place = self.view.names, f"{self._label}/factored"
        words = " x ".join(f"{name}={size}" for name, size in zip(names, self.view.sizes))
        if self._store is not None:
            self._store.add(f"{place}/{words}", 1)
        if names == mesh.mesh_dim_names:
            if self._store is not None:
                self._store.add(place, 1)  # who folds experts into the mesh waits for all
            return mesh
        with self.guard("factoring the mesh", names):
            self._await(self.view.table, place)
            alike = len(self.view.table) if self._store is None else self._store.add(f"{place}/{words}", 0)
            if alike < len(self.view.table):
                raise DivergenceError(
                    f"of {len(self.view.table)} ranks {alike} have a root mesh of {words}",
                    where=f"rank {self.rank}",
                    hint="give all ranks the same compile(.., ep=.., esp=..)",
                )
        root, groups = _root_meshes.get(self.view, (None, None))
        if root is None or not groups.is_open:
            groups = GroupSet(self.view, f"moefx/root of {words}", 2 * self.timeout + timedelta(seconds=5))
            along = [self._joined(groups, self.view.axes(name), name) for name in names]
            ranks = torch.tensor(self.view.table).view(self.view.sizes)
            root = DeviceMesh.from_group(along, mesh.device_type, mesh=ranks, mesh_dim_names=names)
            for dims in dict.fromkeys(map(self.view.axes, axes)):
                if len(dims) > 1:
                    join_dims(root, dims, self._joined(groups, dims, "several"))
            _root_meshes[self.view] = root, groups
        return root

    # The bare exchanges, each started inside a guard by all ranks along the axes; what is under way is returned.

    def all_gather(self, gathered: Tensor, mine: Tensor, axes: Axes, purpose: str = "counts") -> Work:
        """mine [N] -> gathered [n * N], by rank."""
        self.begins("all_gather", axes, purpose)
        return all_gather_flat(gathered, mine, self.group(axes, purpose))

    def all_gather_several(self, gathered: list[Tensor], mine: list[Tensor], axes: Axes, purpose: str) -> Work:
        """mine [N, ..] each -> gathered [n * N, ..] each, by rank, in one exchange."""
        self.begins("all_gather", axes, purpose)
        return all_gather_several(gathered, mine, self.group(axes, purpose))

    def all_to_all(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], axes: Axes,
        part: Part | None = None, purpose: str = "tokens",
    ) -> Work | None:  # fmt: skip
        """Rows [sum(sent), ...] -> output [sum(received), ...], with the ranks along the axes, or a part of them."""
        self.begins("all_to_all", axes, purpose, part)
        group = self.group(axes, purpose, part)
        if self.is_fake and not source.numel():
            return None  # the fake backend refuses to receive where nothing is sent
        return all_to_all(output, source, received, sent, group)

    def exchange(self, send: Sequence[Parcel], receive: Sequence[Parcel], axes: Axes, purpose: str, part: Part | None,
                 tag: int) -> Work | None:  # fmt: skip
        """Tensors to and from single ranks along the axes, or a part of them, who all call this, behind `announce`."""
        self.begins("exchange", axes, purpose, part)
        return exchange(self.group(axes, purpose, part), self.ranks(axes), send, receive, tag)

    def announce(self, axes: Axes, purpose: str, parts: Sequence[Part | None]) -> int:
        """Before the ranks along the axes call `exchange`, once for each part, and not all at the same place: makes the
        groups, and gives the first of as many tags."""
        for part in parts:
            is_new = (self.view.axes(axes), purpose, part) not in self._groups
            group = self.group(axes, purpose, part)
            if is_new and group is not None and self.view.device_type == "cuda":  # NCCL: all come to a first call
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._tag, found = (self._tag + len(parts)) % TAGS, self._tag
        return found

    def all_reduce(self, buffer: Tensor, axes: Axes, purpose: str) -> Work:
        """The sum over the ranks, in place, in the group of its purpose: gradients hold up nothing that is awaited."""
        self.begins("all_reduce", axes, purpose)
        return dist.all_reduce(buffer, group=self.group(axes, purpose), async_op=True)

    def _await(self, ranks: Sequence[int], place: str) -> None:
        """Wait, inside a guard, until all ranks have come to a place, each of them once."""
        if self._store is None:
            return
        self._store.add(place, 1)
        start = time.monotonic()
        while self._store.add(place, 0) < len(ranks):
            if time.monotonic() - start > self.timeout.total_seconds():
                raise RuntimeError("Operation timed out!")
            time.sleep(1e-3)

    def begin_call(self, step: Step) -> None:
        """A call of a program begins, which is this step. Raises CollectiveError where an earlier one broke off between
        exchanges: others' would be taken for those of this call."""
        if self._broken is not None:
            raise self._broken
        if self.has_failed and not self.is_closed:
            raise CollectiveError(
                "an earlier call of the model broke off between exchanges, after which the exchanges of ranks no "
                "longer match",
                where=self.where("the next call"),
                hint="start all ranks again, from a checkpoint",
            )
        self._watchdog.begin_call()
        self.note_step(step)

    def note_step(self, step: Step) -> None:
        """Errors and the watchdog name this step from now on."""
        self._watchdog.set_step(step.number)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a program; an error in it after its first exchange, which other ranks do not have, is the last call's."""
        before = self._exchanges
        try:
            yield
        except BaseException as error:
            of_this_rank = not isinstance(error, MoefxError) or isinstance(error, (ExtensionError, OffloadError))
            if of_this_rank and self._exchanges != before:
                what = f": {error.what} ({error.where})" if isinstance(error, ExtensionError) else ""
                self._mark_failed(f"a call of the model, by {type(error).__name__}{what}")
            raise

    @contextmanager
    def guard(self, doing: str, axes: Axes) -> Iterator[None]:
        """Run something that may block on the ranks along `axes`; its failure becomes a CollectiveError that says what
        this rank did and where the others are."""
        try:
            with self._watchdog.waiting(doing):
                yield
        except MoefxError:
            raise
        except RuntimeError as error:
            raise self._failure(doing, axes, error) from error

    def meet(self, doing: str, axes: Axes) -> None:
        """Wait, inside a guard, until all ranks along `axes` are here, or one is dead: the exchange that follows will
        find that. Raises DivergenceError if some have begun a call that this rank has not: they went past this place,
        and would be waited for until the time-out. Nothing is left pending then, which would keep a process alive."""
        if self._store is None:
            return
        ranks, group = self._groups.describe(self.view.axes(axes), "compile")
        number = self._meetings.get(group, 0)
        place, pause, start = f"{group}/meeting{number}", 1e-3, time.monotonic()
        look, silence = start + self._watchdog.period_s, Silence()
        self._store.add(place, 1)
        while self._store.add(place, 0) < len(ranks):
            if time.monotonic() - start > self.timeout.total_seconds() and self._leaves(place, len(ranks)):
                raise RuntimeError("Operation timed out!")
            if time.monotonic() > look:
                states = self._watchdog.states(ranks)
                if ahead(states, self._watchdog.calls) and self._leaves(place, len(ranks)):
                    self._refuse_to_lag(doing, axes)
                if silence.of(states):
                    break
                look = time.monotonic() + self._watchdog.period_s
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)
        self._meetings[group] = number + 1

    def _leaves(self, place: str, count: int) -> bool:
        """Whether this rank could leave a meeting, so that others wait for it: not if all have just come."""
        if self._store.add(place, -1) < count - 1:
            return True
        self._store.add(place, 1)
        return False

    def _refuse_to_lag(self, doing: str, axes: Axes) -> NoReturn:
        self._mark_failed(doing)
        raise DivergenceError(
            f"Rank {self.rank} alone came to {doing}; others have gone on to the next call of the model:\n"
            f"{self._others(axes)}",
            where=self.where(doing),
            hint="give every rank as many calls of the same kinds: training, gradients, arguments, sizes that fit, "
            "values of Python that the forward reads",
        )

    def record(self, kind: str, axes: Axes, region: str, num_bytes: int) -> None:
        """Add one collective to the trace, if there is one; a copy, if the axes are none."""
        self._exchanges += axes != () and len(self.view.table) > 1
        if self.trace is not None:
            self.trace.append(Traffic(kind, self.view.axes(axes), region, num_bytes))

    def standing_still(self, kind: str, region: str) -> AbstractContextManager[None]:
        """While this rank, or on CUDA its current stream, waits for a collective and does nothing else."""
        return self.waits.setdefault((kind, region), Stopwatch(self.device)).span()

    def awaits(self, work: Work, doing: str, axes: Axes) -> None:
        """The device waits for this, and the host does not."""
        self._overdue.add(work, doing, axes)

    def close(self) -> None:
        """Stop the watchdog and what is held, and destroy this session's groups and no others; idempotent, also after
        the default group is gone."""
        self.is_closed = True
        self._held.close()
        self._overdue.close()
        self._watchdog.close()
        for groups in (self._groups, *self._earlier):
            if self.has_failed:
                groups.abort()
            groups.close()

    def _failure(self, doing: str, axes: Axes, error: RuntimeError) -> CollectiveError:
        self._mark_failed(doing)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        found = CollectiveError(
            f"Rank {self.rank} failed in {doing}: {reason}\n  the other ranks over '{_spell(axes)}':\n"
            f"{self._others(axes)}",
            where=self.where(doing),
            hint="look at the first rank above that is dead, silent, elsewhere or raised an error. One that is "
            "elsewhere went another way through the model (by a condition on its own values), or makes calls that the "
            "others do not",
        )
        if self.view.device_type == "cuda":  # whatever waits for the device would wait for good, destructors too
            self._broken = found
            for groups in (self._groups, *self._earlier):
                groups.abort()
        return found

    def _give_up(self, doing: str, axes: Axes, error: RuntimeError) -> None:
        """From another thread, while this one may wait for the device: it goes on, and the next exchange raises."""
        if not self.has_failed:
            errors.warn(str(self._failure(doing, axes, error)), RuntimeWarning)

    def _mark_failed(self, doing: str) -> None:
        self.has_failed = True
        self._watchdog.fail(doing)

    def _others(self, axes: Axes) -> str:
        return "\n".join(f"    {line}" for line in self._watchdog.report(self.ranks(axes)))

    def where(self, doing: str) -> str:
        step = self._watchdog.step
        return f"rank {self.rank}, {'before the first step' if step is None else f'step {step}'}, {doing}"


def _spell(axes: Axes) -> str:
    return axes if isinstance(axes, str) else "+".join(axes)


def region_number(region: str) -> int:
    """A number for a region's name that is the same on all ranks."""
    return zlib.crc32(region.encode())
