"""Gradients on their way to `.grad`: averaged over the ranks that share the parameter, or kept until a later step does.

Inside `no_sync()` nothing is communicated: gradients add up here. The next synchronising backward adds what waits to
its own gradient before it is reduced, so every micro-step is communicated once.

Small gradients travel together, in buckets, as those of torch's DDP do: a collective takes longer to begin than they
take to be sent. Which do in a program, and when, the program says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefx.runtime.collectives import all_reduce_start
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session

Way = tuple[str, tuple[str, ...], float]  # a parameter's name; the axes to sum over, and the scale of that sum


class Ready(NamedTuple):
    """A gradient that can be reduced. owned: its memory may be written to."""

    way: Way
    grad: Tensor
    owned: bool


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


def reduce_gradient_start(
    session: Session, step, grad: Tensor, *, axes: tuple[str, ...], scale: float, name: str, owned: bool
) -> Handle[Tensor | None]:
    """Begin `scale * sum over the ranks of axes` of a gradient and of what waits to go the same way.

    In an unsynchronised step the gradient is put aside and the handle gives None.
    """
    buffers: GradientBuffers = step.buffers
    if not step.synchronise:
        buffers.add((name, axes, scale), grad, owned=owned)
        return Handle(session, f"gradient of {name}, put aside", axes, lambda: None)
    waiting = buffers.take((name, axes, scale))
    if waiting is not None:
        grad, owned = waiting.add_(grad), True
    return _start(session, (name, axes, scale), grad, owned)


def reduce_gradients_start(
    session: Session, step, grads: Sequence[Tensor], *, axes: tuple[str, ...], scale: float, names: Sequence[str]
) -> Handle[dict[str, Tensor | None]]:
    """The same of several, of one dtype, in one all-reduce: a bucket. Each is left alone; results, by `told_apart`
    names, are parts of one piece of memory."""
    buffers: GradientBuffers = step.buffers
    ways = [(name, axes, scale) for name in names]
    if not step.synchronise:
        for way, grad in zip(ways, grads, strict=True):
            buffers.add(way, grad, owned=False)
        nothing = dict.fromkeys(told_apart(names))
        return Handle(session, f"gradients of {_several(names)}, put aside", axes, lambda: nothing)
    waiting = [buffers.take(way) for way in ways]
    return _start_bucket(session, ways, [grad if before is None else before.add_(grad)
                                         for grad, before in zip(grads, waiting, strict=True)])  # fmt: skip


def _start_bucket(session: Session, ways: Sequence[Way], grads: Sequence[Tensor]) -> Handle[dict[str, Tensor]]:
    (_, axes, scale), names = ways[0], [name for name, _, _ in ways]
    name = _several(names)
    shapes = [grad.shape for grad in grads]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    sent = all_reduce_start(session, flat, axes=axes, scale=scale, name=name, owned=True)

    def finish() -> dict[str, Tensor]:
        totals = sent.wait().split([shape.numel() for shape in shapes])
        return {name: total.view(shape) for name, total, shape in zip(told_apart(names), totals, shapes)}

    return Handle(session, f"gradients of {name}", axes, finish, behind=sent)


def told_apart(names: Sequence[str]) -> list[str]:
    """Names of which none stands twice: a model that calls its experts twice has two stacks of them, of one name."""
    return [f"{name}, {before + 1}" if (before := names[:place].count(name)) else name
            for place, name in enumerate(names)]  # fmt: skip


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _start(session: Session, way: Way, grad: Tensor, owned: bool) -> Handle[Tensor]:
    name, axes, scale = way
    if session.size(axes) > 1:
        return all_reduce_start(session, grad, axes=axes, scale=scale, name=name, owned=owned)
    if owned and scale == 1:
        result = grad
    else:
        result = grad.mul_(scale) if owned else grad * scale
    return Handle(session, f"gradient of {name}", axes, lambda: result)


def reduce_gradients(session: Session, step, given: Sequence[Ready]) -> list[Tensor | None]:
    """Gradients that no program reduces, with what waits to go the same ways; small ones share collectives. All ranks
    give the same ones in the same order. In an unsynchronised step they are put aside, and come back as None."""
    buffers: GradientBuffers = step.buffers
    if not step.synchronise:
        for each in given:
            buffers.add(each.way, each.grad, owned=each.owned)
        return [None] * len(given)
    waiting = [buffers.take(each.way) for each in given]
    return _reduced(session, [each if before is None else Ready(each.way, before.add_(each.grad), True)
                              for each, before in zip(given, waiting)])  # fmt: skip


def reduce_waiting(session: Session, buffers: GradientBuffers) -> dict[str, Tensor]:
    """Reduce what still waits: gradients that the synchronising step did not touch itself."""
    ways, totals = buffers.ways(), {}
    for (name, _, _), total in zip(ways, _reduced(session, [Ready(way, buffers.take(way), True) for way in ways])):
        totals[name] = totals[name] + total if name in totals else total
    return totals


def _reduced(session: Session, given: Sequence[Ready]) -> list[Tensor]:
    together = _together(session, given)
    handles = [_start_bucket(session, [given[place].way for place in places], [given[place].grad for place in places])
               if len(places) > 1 else _start(session, *given[places[0]]) for places in together]  # fmt: skip
    totals: dict[int, Tensor] = {}
    for places, handle in zip(together, handles):
        found = handle.wait()
        totals |= zip(places, found.values() if len(places) > 1 else [found])
    return [totals[place] for place in range(len(given))]


def _together(session: Session, given: Sequence[Ready]) -> list[list[int]]:
    """The places of those that share a collective, in the order in which these begin."""
    filling: dict[tuple, list[int]] = {}
    full: list[list[int]] = []
    for place, ((_, axes, scale), grad, _) in enumerate(given):
        if grad.nbytes >= session.bucket_bytes or session.size(axes) == 1:
            full.append([place])
            continue
        key = axes, scale, grad.dtype, grad.device
        filling.setdefault(key, []).append(place)
        if sum(given[each].grad.nbytes for each in filling[key]) >= session.bucket_bytes:
            full.append(filling.pop(key))
    return [*full, *filling.values()]
