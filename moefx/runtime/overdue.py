"""Collectives for which a device waits and the host does not: one that takes too long is named all the same.

On CUDA a wait is that of the current stream. The host goes on until it reads something of the device, a loss perhaps,
and would be held there for good, with nobody to ask why. So a thread looks at what the device waits for.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from moefx.runtime.order import Axes


class _Awaited(NamedTuple):
    work: Any
    doing: str
    axes: Axes


class Overdue:
    """Of one session. give_up: called from the thread, once, with what a device has waited for longer than
    `timeout_s()` without getting any further: what was done, over which axes, and why."""

    def __init__(self, give_up: Callable[[str, Axes, RuntimeError], object], timeout_s: Callable[[], float],
                 period_s: float) -> None:  # fmt: skip
        self._how = give_up, timeout_s, period_s
        self._awaited: deque[_Awaited] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, doing: str, axes: Axes) -> None:
        """The device waits for this from now on, behind what was added before."""
        self._awaited.append(_Awaited(work, doing, axes))
        if self._thread is None:
            how = (self._awaited, self._stop, *self._how)
            self._thread = threading.Thread(target=_look, args=how, name="moefx overdue", daemon=True)
            weakref.finalize(self, self._stop.set)
            self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()


def _look(awaited: deque[_Awaited], stop: threading.Event, give_up: Callable[[str, Axes, RuntimeError], object],
          timeout_s: Callable[[], float], period_s: float) -> None:  # fmt: skip
    first, since = None, time.monotonic()
    while not stop.wait(period_s):
        while awaited and awaited[0].work.is_completed():
            awaited.popleft()
        head = awaited[0] if awaited else None
        if head is not first:
            first, since = head, time.monotonic()
        elif head is not None and time.monotonic() - since > timeout_s():
            give_up(head.doing, head.axes, RuntimeError(f"the device has waited for it for {timeout_s():g} s"))
            return
