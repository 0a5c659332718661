"""What moefx is doing while a call takes over a second: a line on the first rank's terminal, and the log.

    with progress.task("compiling Qwen3MoeForCausalLM"):
        progress.step("capture")
        ..
        progress.step("layer 3", done=3, total=48)

A task inside another one says more of it. `TORCH_LOGS="+moefx"` shows each step with its seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger("moefx.progress")

DELAY_S = 1.0
_line: _Line | None = None  # of this process, which has one terminal


class _Line:
    """The line of the outermost task, shown after `DELAY_S` by a thread: who works only notes what it does."""

    def __init__(self, console: Console) -> None:
        self.tasks: list[str] = []
        self._step, self._since = "", 0.0
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
            TimeElapsedColumn(), console=console, transient=True, refresh_per_second=5,
        )  # fmt: skip
        self._shown = self._bar.add_task("", total=None)
        self._lock, self._timer = threading.Lock(), threading.Timer(DELAY_S, self._show)
        self._timer.daemon = True
        if console.is_terminal and not console.quiet:
            self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._timer.finished.is_set():
                self._bar.start()

    def step(self, words: str, done: int | None = None, total: int | None = None) -> None:
        if self._step:
            log.debug("%s: %s: %.2f s", ", ".join(self.tasks), self._step, time.perf_counter() - self._since)
        self._step, self._since = words, time.perf_counter()
        described = ": ".join(filter(None, (", ".join(self.tasks), words)))
        self._bar.update(self._shown, description=described, total=total, completed=done or 0)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar.live.is_started:
                self._bar.stop()


@contextmanager
def task(words: str, console: Console | None = None) -> Iterator[None]:
    """Show that `words` is under way until the block ends. console: where; None: stderr, of the first rank alone."""
    global _line
    if not _is_here():
        yield
        return
    line = _line
    if line is None:
        _line = line = _Line(console or Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
    line.step("")  # of the task around it: over
    line.tasks.append(words)
    try:
        line.step("")
        yield
    finally:
        line.step("")
        line.tasks.pop()
        if not line.tasks:
            _line = None
            line.close()


def step(words: str, done: int | None = None, total: int | None = None) -> None:
    """The task under way now does this. done, total: how many such steps are over, and how many there are."""
    if _line is not None and _is_here():
        _line.step(words, done, total)


def _is_here() -> bool:
    return threading.current_thread() is threading.main_thread()
