"""Gradients on their way to `.grad`: averaged over the ranks that share the parameter, or kept until a later step does.

Inside `no_sync()` nothing is communicated: gradients add up here. The next synchronising backward adds what waits to
its own gradient before it is reduced, so every micro-step is communicated once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moefx.runtime.collectives import all_reduce_start
from moefx.runtime.handles import Handle
from moefx.runtime.session import Session


@dataclass
class Waiting:
    """A sum of unscaled gradients of this rank, and how it is to be reduced."""

    total: Tensor
    axes: tuple[str, ...]
    scale: float


class GradientBuffers:
    """Gradients of unsynchronised micro-steps by parameter name."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str, grad: Tensor, axes: tuple[str, ...], scale: float, *, owned: bool) -> None:
        """Add one micro-step's gradient; `owned`: its memory may be kept and written to."""
        found = self._waiting.get(name)
        if found is None:
            self._waiting[name] = Waiting(grad if owned else grad.clone(), axes, scale)
        else:
            found.total.add_(grad)

    def take(self, name: str) -> Waiting | None:
        return self._waiting.pop(name, None)

    def names(self) -> list[str]:
        return list(self._waiting)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()


def reduce_gradient_start(
    session: Session, step, grad: Tensor, *, axes: tuple[str, ...], scale: float, name: str, owned: bool
) -> Handle[Tensor | None]:
    """Begin `scale * sum over the ranks of axes` of a gradient and of what waits for the same parameter.

    In an unsynchronised step the gradient is put aside and the handle gives None.
    """
    buffers: GradientBuffers = step.buffers
    if not step.synchronise:
        buffers.add(name, grad, axes, scale, owned=owned)
        return Handle(session, f"gradient of {name}, put aside", axes, lambda: None)
    waiting = buffers.take(name)
    if waiting is not None:
        grad, owned = waiting.total.add_(grad), True
    if session.size(axes) > 1:
        return all_reduce_start(session, grad, axes=axes, scale=scale, name=name, owned=owned)
    if owned and scale == 1:
        result = grad
    else:
        result = grad.mul_(scale) if owned else grad * scale
    return Handle(session, f"gradient of {name}", axes, lambda: result)


def reduce_waiting(session: Session, buffers: GradientBuffers) -> dict[str, Tensor]:
    """Reduce what still waits, parameter by parameter: gradients that the synchronising step did not touch itself."""
    handles = {}
    for name in sorted(buffers.names()):
        waiting = buffers.take(name)
        if session.size(waiting.axes) > 1:
            handles[name] = all_reduce_start(
                session, waiting.total, axes=waiting.axes, scale=waiting.scale, name=name, owned=True
            )
        else:
            total = waiting.total if waiting.scale == 1 else waiting.total.mul_(waiting.scale)
            handles[name] = Handle(session, f"gradient of {name}", waiting.axes, lambda t=total: t)
    return {name: handle.wait() for name, handle in handles.items()}
