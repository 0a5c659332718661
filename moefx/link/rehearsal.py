"""Emitted code on ranks that are threads of this process: what verification level 2 runs last.

The code runs as it will with a session, runtime functions and all; only its exchanges are those of `ir.world`, and its
streams note who uses which memory (`recorded`). Exchanges take place when they are waited for, as late as they may:
code that writes to what is on its way sends something else.
"""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moefx.errors import ExtensionError, VerifyError
from moefx.ir import world
from moefx.link.recorded import Mark, RecordedStreams, Weak
from moefx.runtime.gradients import GradientBuffers
from moefx.runtime.groups import Axes, MeshView, OnMesh, Part
from moefx.runtime.headers import HeaderBook
from moefx.runtime.held import Holder, T
from moefx.runtime.order import deadlock
from moefx.runtime.placement import Placements
from moefx.runtime.session import Step
from moefx.runtime.step import StepState
from moefx.transport.algorithms import group_of
from moefx.transport.p2p import Packed, Parcel


def run(function: Callable, inputs: Sequence[Any], axes: dict[str, int]) -> tuple[Any, ...]:
    """What an emitted function returns on the current rank of a `ThreadWorld` over `axes` ({name: size}).

    Raises VerifyError for code that writes to its inputs, does not wait for what it started, or has ranks begin
    collectives in orders that could hold them up for good.
    """
    places = tuple(world.current().coordinate(name) for name in axes)
    ranks = tuple(range(math.prod(axes.values())))
    session = WorldSession(MeshView(tuple(axes), tuple(axes.values()), places, ranks, "cpu"))
    versions = [value._version if isinstance(value, Tensor) else 0 for value in inputs]
    step = StepState(0, 0, GradientBuffers(), synchronise=True)
    with _blaming_lines(), session.streams:
        outputs = tuple(function(session, step, list(inputs)))
    for place, (value, version) in enumerate(zip(inputs, versions)):
        if isinstance(value, Tensor) and value._version != version:
            raise VerifyError(f"the code writes to its input {place}")
    left = session.streams.left()
    if left is not None:
        raise VerifyError(f"the code does not wait for {left}")
    complaint = deadlock(dict(enumerate(world.current().tell(session.begun))))
    if complaint is not None:
        raise VerifyError(complaint)
    return outputs


@contextlib.contextmanager
def _blaming_lines() -> Iterator[None]:
    """Errors say in which line of the code they are."""
    try:
        yield
    except (ExtensionError, torch.OutOfMemoryError, threading.BrokenBarrierError):
        raise  # the last: another rank failed
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<moefx ")]
        why = next(iter(str(error).strip().splitlines()), "")
        what = error.what if isinstance(error, VerifyError) else f"the code does not run: {type(error).__name__}: {why}"
        raise VerifyError(what, where=f"`{frames[-1].line}`" if frames else None) from error


class WorldSession(OnMesh):
    """What emitted code needs of a `runtime.session.Session`, on one rank of the current world."""

    is_fake = False
    is_over = True  # what is dropped without a wait is found by the streams
    profiler = None
    timeout = timedelta()

    def __init__(self, view: MeshView) -> None:
        self.view, self.streams = view, RecordedStreams()
        self.headers = HeaderBook(self.streams)
        self.device = torch.device(view.device_type)
        self.begun = []
        self.placements = Placements()
        self._held = Holder()

    def held(self, kind: type[T]) -> T:
        return self._held.of(kind, lambda: kind(self))

    def note_step(self, step: Step) -> None:
        pass

    def record(self, kind: str, axes: Axes, region: str, num_bytes: int) -> None:
        pass

    def standing_still(self, kind: str, region: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def guard(self, doing: str, axes: Axes) -> Iterator[None]:
        yield

    def all_gather(self, gathered: Tensor, mine: Tensor, axes: Axes, purpose: str = "counts") -> _Late:
        return self.all_gather_several([gathered], [mine], axes, purpose)

    def all_gather_several(self, gathered: list[Tensor], mine: list[Tensor], axes: Axes, purpose: str) -> _Late:
        axis = "+".join(self.view.axes(axes))

        def exchange(mine: list[Tensor], gathered: list[Tensor]) -> None:
            for out, x in zip(gathered, mine):
                out.copy_(world.current().all_gather(x, axis).view_as(out))

        return self._late("all_gather", axes, purpose, None, mine, gathered, exchange)

    def all_to_all(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], axes: Axes,
        part: Part | None = None, purpose: str = "tokens",
    ) -> _Late:  # fmt: skip
        axis = "+".join(self.view.axes(axes))
        among = None if part is None else group_of(part[0], self.size(axes), part[1], self.index(axes))

        def exchange(sources: list[Tensor], outputs: list[Tensor]) -> None:
            outputs[0].copy_(world.current().all_to_all(sources[0], sent, received, axis, among))

        return self._late("all_to_all", axes, purpose, part, [source], [output], exchange)

    def all_reduce(self, buffer: Tensor, axes: Axes, purpose: str) -> _Late:
        axis = "+".join(self.view.axes(axes))

        def exchange(_: list[Tensor], buffers: list[Tensor]) -> None:
            buffers[0].copy_(world.current().all_reduce(buffers[0], axis))

        return self._late("all_reduce", axes, purpose, None, [], [buffer], exchange)

    def exchange(self, send: Sequence[Parcel], receive: Sequence[Parcel], axes: Axes, purpose: str, part: Part | None,
                 tag: int) -> _Late:  # fmt: skip
        axis = "+".join(self.view.axes(axes))
        (to, sent), (of, received) = ([[*each] for each in zip(*parcels)] or [[], []] for parcels in (send, receive))

        def exchange(sent: list[Tensor], received: list[Tensor]) -> None:
            packed = Packed([*zip(to, sent)], [*zip(of, received)], self.size(axes))
            packed.output.copy_(world.current().all_to_all(packed.source, packed.sent, packed.received, axis))
            packed.unpack()

        return self._late("exchange", axes, purpose, part, sent, received, exchange)

    def announce(self, axes: Axes, purpose: str, parts: Sequence[Part | None]) -> int:
        return 0

    def _late(self, kind: str, axes: Axes, purpose: str, part: Part | None, reads: list[Tensor], writes: list[Tensor],
              exchange: Callable[[list[Tensor], list[Tensor]], None]) -> _Late:  # fmt: skip
        """What is done when it is waited for, and has to be."""
        self.begins(kind, axes, purpose, part)
        mark = self.streams.collective(f"{purpose} of ranks {self.view.members(axes, part)}", kind, reads, writes)
        return _Late(self.streams, mark, [*map(Weak, reads)], [*map(Weak, writes)], exchange)


@dataclass(frozen=True)
class _Late:
    """An exchange that takes place when it is waited for. Whoever began it owns what it reads and writes."""

    streams: RecordedStreams
    mark: Mark
    reads: list[Weak]
    writes: list[Weak]
    exchange: Callable[[list[Tensor], list[Tensor]], None]

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        self.mark.wait()
        with self.streams.unnoticed():
            self.exchange([each.get() for each in self.reads], [each.get() for each in self.writes])
        return True
