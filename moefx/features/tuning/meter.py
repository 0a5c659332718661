"""What the programs of one call of a model take on this rank, and what ranks tell one another of it.

The header that opens every backward carries `WORDS` numbers of this: ranks learn from one another what earlier calls
took, and how large this one is, without another message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from moefx.runtime.session import Session
from moefx.runtime.stopwatch import Clock, Stopwatch

WORDS = 2  # nanoseconds of an earlier call (0: not known), tokens of this one


class Book(Protocol):
    """Who keeps what calls took."""

    def tell(self, meter: Meter) -> tuple[int, int]:
        """The words for a backward of this call that begins."""
        ...

    def hear(self, meter: Meter, words: Numbers) -> None:
        """What all ranks told at that place."""
        ...

    def note_done(self, meter: Meter) -> None:
        """All its backwards are done."""
        ...


class Numbers:
    """int64 [n, WORDS] of n ranks, on their way to the host."""

    def __init__(self, session: Session, found: Tensor) -> None:
        self._copy = session.to_host(found)
        self._found = found.clone() if self._copy is None else None

    def wait(self) -> list[list[int]]:
        if self._copy is not None:
            self._copy.wait()
            self._found = self._copy.host
        return self._found.tolist()


class Meter:
    """One call of a model: time from the start to the end of each of its forwards and backwards, not of what is between
    them. On CUDA that of the device."""

    def __init__(self, book: Book, session: Session, clock: Clock = time.perf_counter_ns) -> None:
        self._book, self._session, self._watch = book, session, Stopwatch(session.device, clock)
        self.to_come = self.backwards = 0

    @contextmanager
    def forward(self, *, has_backward: bool) -> Iterator[None]:
        with self._watch.span():
            yield
        self.to_come += has_backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        with self._watch.span():
            yield
        self.backwards += 1
        self.to_come -= 1
        if not self.to_come:
            self._book.note_done(self)

    def words(self) -> tuple[int, int]:
        return self._book.tell(self)

    def hear(self, found: Tensor) -> None:
        """found [n, WORDS] int64, on the device."""
        self._book.hear(self, Numbers(self._session, found))

    def nanoseconds(self) -> int:
        """0: the device is not done yet."""
        return max(1, self._watch.nanoseconds()) if self._watch.is_done else 0
