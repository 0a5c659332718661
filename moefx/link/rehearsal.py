"""Emitted code on ranks that are threads of this process: what verification level 2 runs last.

The code runs as it will with a session, runtime functions and all; only its exchanges are those of `ir.world`. They
take place when they are waited for, as late as they may: code that writes to what is on its way sends something else.
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
    with _blaming_lines():
        outputs = tuple(function(session, step, list(inputs)))
    for place, (value, version) in enumerate(zip(inputs, versions)):
        if isinstance(value, Tensor) and value._version != version:
            raise VerifyError(f"the code writes to its input {place}")
    if session.under_way:
        raise VerifyError(f"the code does not wait for {session.under_way[0]}")
    complaint = deadlock(dict(enumerate(world.current().tell(session.begun))))
    if complaint is not None:
        raise VerifyError(complaint)
    return outputs


@contextlib.contextmanager
def _blaming_lines() -> Iterator[None]:
    """Errors say in which line of the code they are."""
    try:
        yield
    except (VerifyError, ExtensionError, torch.OutOfMemoryError, threading.BrokenBarrierError):
        raise  # the last: another rank failed
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<moefx ")]
        why = next(iter(str(error).strip().splitlines()), "")
        raise VerifyError(f"the code does not run: {type(error).__name__}: {why}",
                          where=f"`{frames[-1].line}`" if frames else None) from error  # fmt: skip


class WorldSession(OnMesh):
    """What emitted code needs of a `runtime.session.Session`, on one rank of the current world."""

    is_fake = False
    is_over = True  # what is dropped without a wait is found in `under_way`
    profiler = None
    timeout = timedelta()

    def __init__(self, view: MeshView) -> None:
        self.view, self.headers = view, HeaderBook()
        self.device = torch.device(view.device_type)
        self.under_way: list[str] = []
        self.begun = []
        self.placements = Placements()
        self._held = Holder()

    def held(self, kind: type[T]) -> T:
        return self._held.of(kind, lambda: kind.rehearsed(self))

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
        self.begins("all_gather", axes, purpose)
        axis = "+".join(self.view.axes(axes))
        return self.late("an all-gather", lambda: gathered.copy_(world.current().all_gather(mine, axis)))

    def all_gather_several(self, gathered: list[Tensor], mine: list[Tensor], axes: Axes, purpose: str) -> _Late:
        self.begins("all_gather", axes, purpose)
        axis = "+".join(self.view.axes(axes))
        return self.late("an all-gather", lambda: [out.copy_(world.current().all_gather(x, axis))
                                                    for out, x in zip(gathered, mine)])  # fmt: skip

    def all_to_all(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], axes: Axes,
        part: Part | None = None, purpose: str = "tokens",
    ) -> _Late:  # fmt: skip
        self.begins("all_to_all", axes, purpose, part)
        axis = "+".join(self.view.axes(axes))
        among = None if part is None else group_of(part[0], self.size(axes), part[1], self.index(axes))
        return self.late(
            "an all-to-all", lambda: output.copy_(world.current().all_to_all(source, sent, received, axis, among))
        )

    def all_reduce(self, buffer: Tensor, axes: Axes, purpose: str) -> _Late:
        self.begins("all_reduce", axes, purpose)
        axis = "+".join(self.view.axes(axes))
        return self.late("an all-reduce", lambda: buffer.copy_(world.current().all_reduce(buffer, axis)))

    def exchange(self, send: Sequence[Parcel], receive: Sequence[Parcel], axes: Axes, purpose: str, part: Part | None,
                 tag: int) -> _Late:  # fmt: skip
        self.begins("exchange", axes, purpose, part)
        axis = "+".join(self.view.axes(axes))

        def exchange() -> None:
            packed = Packed(send, receive, self.size(axes))
            packed.output.copy_(world.current().all_to_all(packed.source, packed.sent, packed.received, axis))
            packed.unpack()

        return self.late("tensors for single ranks", exchange)

    def announce(self, axes: Axes, purpose: str, parts: Sequence[Part | None]) -> int:
        return 0

    def late(self, what: str, exchange: Callable[[], object]) -> _Late:
        """What is done when it is waited for, and has to be."""
        self.under_way.append(what)
        return _Late(what, exchange, self.under_way)


@dataclass(frozen=True)
class _Late:
    """An exchange that takes place when it is waited for."""

    what: str
    exchange: Callable[[], object]
    under_way: list[str]

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        self.under_way.remove(self.what)
        self.exchange()
        return True
