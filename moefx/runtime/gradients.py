"""Gradients on their way to `.grad`: averaged over the ranks that share the parameter, or kept until a later step does.

Inside `no_sync()` nothing is communicated: gradients add up here. The next synchronising backward adds what waits to
its own gradient before it is reduced, so every micro-step is communicated once.

Small gradients travel together (`Buckets`), as those of torch's DDP do: a collective takes longer to begin than they
take to be sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefx.runtime.collectives import all_reduce_start
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session

Way = tuple[str, tuple[str, ...], float]  # a parameter's name; the axes to sum over, and the scale of that sum


class GradientBuffers:
    """Sums of unscaled gradients of unsynchronised micro-steps. Programs may reduce one parameter in several ways:
    only what goes the same way adds up before it is reduced."""

    def __init__(self) -> None:
        self._waiting: dict[Way, Tensor] = {}
        self._chosen: dict[str, Tensor] = {}  # by name: experts of a stack that have a part in what waits

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, way: Way, grad: Tensor, *, owned: bool) -> None:
        """Add one micro-step's gradient; `owned`: its memory may be kept and written to."""
        if way in self._waiting:
            self._waiting[way].add_(grad)
        else:
            self._waiting[way] = grad if owned else grad.clone()

    def kept_back(self, name: str, total: Tensor, synchronise: bool) -> Tensor | None:
        """A gradient that was reduced already: put aside in an unsynchronised step, else with what waits of it."""
        way = name, (), 1.0
        if synchronise:
            waiting = self.take(way)
            return total if waiting is None else total.add_(waiting)
        return self.add(way, total, owned=True)

    def with_chosen(self, name: str, own: Tensor, *, synchronise: bool) -> Tensor:
        """Experts of a stack that have a part in its gradient, uint8 [E]: `own`, by the step whose backward begins, and
        those in what waits. An unsynchronised step leaves them with it."""
        before = self._chosen.pop(name, None)
        if before is not None:
            own = own | before
        elif name in self.names():  # of a program that leaves no expert out
            own = torch.ones_like(own)
        if not synchronise:
            self._chosen[name] = own
        return own

    def take(self, way: Way) -> Tensor | None:
        """What waits to be reduced this way, and no longer does."""
        return self._waiting.pop(way, None)

    def ways(self) -> list[Way]:
        """In an order that all ranks share."""
        return sorted(self._waiting)

    def names(self) -> list[str]:
        """Of the parameters whose gradients wait."""
        return list(dict.fromkeys(name for name, _, _ in self._waiting))

    def drop(self, name: str) -> None:
        """Forget what waits for a parameter."""
        self._waiting = {way: total for way, total in self._waiting.items() if way[0] != name}
        self._chosen.pop(name, None)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._chosen.clear()


class Bucket:
    """Gradients that go the same way in one all-reduce, which begins when they are enough, or somebody waits."""

    def __init__(self, session: Session, axes: tuple[str, ...], scale: float) -> None:
        self.session, self.axes, self.scale = session, axes, scale
        self.names: list[str] = []
        self.nbytes = 0
        self._grads: list[Tensor] = []
        self._handle: Handle[Tensor] | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._totals: list[Tensor | None] = []

    def add(self, name: str, grad: Tensor) -> int:
        """Returns its place."""
        self.names.append(name)
        self._grads.append(grad)
        self.nbytes += grad.nbytes
        return len(self.names) - 1

    def send(self) -> None:
        if self._handle is not None:
            return
        flat = torch.cat([grad.flatten() for grad in self._grads])
        name = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"
        self._handle = all_reduce_start(self.session, flat, axes=self.axes, scale=self.scale, name=name, owned=True)
        for callback in self._callbacks:
            self._handle.on_done(callback)

    def on_done(self, callback: Callable[[], object]) -> bool:
        """As that of a handle; it may not have begun."""
        if self._handle is not None:
            return self._handle.on_done(callback)
        self._callbacks.append(callback)
        return True

    def total(self, place: int) -> Tensor:
        """The sum of the gradient at this place, a part of the bucket's memory; once."""
        if self._grads:
            sizes = [grad.numel() for grad in self._grads]
            totals = self._handle.wait().split(sizes)
            self._totals = [total.view(grad.shape) for total, grad in zip(totals, self._grads)]
            self._grads = []
        total, self._totals[place] = self._totals[place], None
        return total


class _InBucket(Handle[Tensor]):
    """Of one gradient in a bucket."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Bucket, place: int, send: Callable[[], None]) -> None:
        def finish() -> Tensor:
            send()
            return bucket.total(place)

        super().__init__(bucket.session, f"gradient of {bucket.names[place]}", bucket.axes, finish)
        self._bucket = bucket

    def on_done(self, callback: Callable[[], object]) -> bool:
        return self._bucket.on_done(callback)


class Buckets:
    """The buckets of one backward that are not sent yet. All ranks fill and send them in the order of the program."""

    def __init__(self) -> None:
        self._open: dict[tuple, Bucket] = {}

    def start(self, session: Session, way: Way, grad: Tensor, owned: bool) -> Handle[Tensor]:
        """Begin the all-reduce of a gradient, or put it to others."""
        name, axes, scale = way
        if grad.nbytes >= session.bucket_bytes or session.size(axes) == 1:
            return _start(session, way, grad, owned)
        key = axes, scale, grad.dtype, grad.device
        bucket = self._open.setdefault(key, Bucket(session, axes, scale))
        place = bucket.add(name, grad if owned else grad.clone())
        if bucket.nbytes >= session.bucket_bytes:
            self._open.pop(key).send()
        return _InBucket(bucket, place, self.send)

    def send(self) -> None:
        """Whoever waits for one waits for all soon."""
        for key in list(self._open):
            self._open.pop(key).send()


def reduce_gradient_start(
    session: Session, step, grad: Tensor, *, axes: tuple[str, ...], scale: float, name: str, owned: bool
) -> Handle[Tensor | None]:
    """Begin `scale * sum over the ranks of axes` of a gradient and of what waits to go the same way, or put it into a
    bucket that begins later.

    In an unsynchronised step the gradient is put aside and the handle gives None.
    """
    buffers: GradientBuffers = step.buffers
    if not step.synchronise:
        buffers.add((name, axes, scale), grad, owned=owned)
        return Handle(session, f"gradient of {name}, put aside", axes, lambda: None)
    waiting = buffers.take((name, axes, scale))
    if waiting is not None:
        grad, owned = waiting.add_(grad), True
    return step.buckets.start(session, (name, axes, scale), grad, owned)


def _start(session: Session, way: Way, grad: Tensor, owned: bool) -> Handle[Tensor]:
    name, axes, scale = way
    if session.size(axes) > 1:
        return all_reduce_start(session, grad, axes=axes, scale=scale, name=name, owned=owned)
    if owned and scale == 1:
        result = grad
    else:
        result = grad.mul_(scale) if owned else grad * scale
    return Handle(session, f"gradient of {name}", axes, lambda: result)


def reduce_waiting(session: Session, buffers: GradientBuffers) -> dict[str, Tensor]:
    """Reduce what still waits: gradients that the synchronising step did not touch itself."""
    buckets = Buckets()
    handles = [(way[0], buckets.start(session, way, buffers.take(way), True)) for way in buffers.ways()]
    totals: dict[str, Tensor] = {}
    for name, handle in handles:
        total = handle.wait()
        totals[name] = totals[name] + total if name in totals else total
    return totals
