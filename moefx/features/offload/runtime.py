"""Tensors that wait for the backward in the host's memory: copies out of the device's memory and back, beside its work.

A forward saves `Parked` in place of a tensor. It owns a buffer of its session's `Engines`, and the buffer is free again
when nobody has it any more: after the backward, or without one. On CPU a thread per direction copies, to memory that
the step does not allocate from; on CUDA a stream per direction, to pinned memory.
"""

from __future__ import annotations

import bisect
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from moefx.errors import OffloadError, StaleStateError, UnsupportedUse
from moefx.runtime.streams import Mark, Streams

if TYPE_CHECKING:
    from moefx.runtime.session import Session

T = TypeVar("T")
Buffer = Any  # bytes: an array of numpy, or a pinned tensor


class Pool:
    """Buffers in the host's memory, kept for the next step; no more bytes of them than were in use at once."""

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self.in_use = self.held = self.most = 0  # bytes; held: in use or free
        self.back: deque[tuple[Buffer, Any]] = deque()  # finalizers may run anywhere, so they take no lock
        self._returned: list[tuple[Buffer, Any]] = []  # those that a device may still be copying from or to
        self._free: list[Buffer] = []  # by size
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes, at most an eighth of them too many where it is a new one. Raises
        OffloadError where there is no memory."""
        size = _size_class(nbytes)
        with self._lock:
            self._sort_in()
            place = bisect.bisect_left(self._free, size, key=_nbytes)
            if place < len(self._free) and _nbytes(self._free[place]) <= 2 * size:
                buffer = self._free.pop(place)
            else:
                buffer = self._new(size)
                self.held += size
            self.in_use += _nbytes(buffer)
            self.most = max(self.most, self.in_use)
            while self._free and self.held > self.most:
                self.held -= _nbytes(self._free.pop(0))
        return buffer

    def _new(self, size: int) -> Buffer:
        try:
            if self._streams is not None:
                return self._streams.host_memory(torch.Size([size]), torch.uint8)
            return np.empty(size, dtype=np.uint8)  # not of the allocator that the step uses
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(f"the host has no {size} bytes for a saved value, beside {self.in_use} that wait there",
                               hint="offload less") from error  # fmt: skip

    def is_idle(self) -> bool:
        """Whether all buffers are back."""
        with self._lock:
            self._sort_in()
            return not self.in_use

    def _sort_in(self) -> None:
        while self.back:
            self._returned.append(self.back.popleft())
            self.in_use -= _nbytes(self._returned[-1][0])
        waiting = []
        for buffer, done in self._returned:
            if done is None or done.is_done():
                bisect.insort(self._free, buffer, key=_nbytes)
            else:
                waiting.append((buffer, done))
        self._returned = waiting


def _nbytes(buffer: Buffer) -> int:
    return buffer.nbytes


def _size_class(nbytes: int) -> int:
    """Rows that experts receive vary from step to step: sizes are rounded up, so that buffers fit again."""
    step = max(4096, 1 << max(nbytes.bit_length() - 4, 0))
    return max(1, -(-nbytes // step)) * step


class Parked:
    """What a forward saves in place of a tensor. host: the copy, strided as `torch.clone` would, once it is begun.
    done: where there are streams, the mark behind the last use of it."""

    __slots__ = ("_back", "_buffer", "done", "host")

    def __init__(self, nbytes: int, pool: Pool) -> None:
        self._back, self.done = pool.back, None
        self._buffer = pool.take(nbytes)

    def copy(self, direction: str, x: Tensor) -> None:
        """Copy x to the host ("d2h"), or what is there to x ("h2d"), on the current thread or stream."""
        if direction == "d2h":
            strides = torch.empty_like(x, device="meta").stride()
            flat = torch.as_tensor(self._buffer)[: x.numel() * x.element_size()]
            self.host = flat.view(x.dtype).as_strided(x.shape, strides)
        target, source = (self.host, x) if direction == "d2h" else (x, self.host)
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._back.append((self._buffer, self.done))


class ThreadCopy:
    """A copy that a thread does. It owns what it reads and writes until it is done."""

    def __init__(self, direction: str, parked: Parked, x: Tensor) -> None:
        self._job: Any = direction, parked, x
        self._future: Future[None] = Future()

    def run(self) -> None:
        error = None
        try:
            self._job[1].copy(self._job[0], self._job[2])
        except BaseException as caught:
            error = caught.with_traceback(None)  # which has the tensors
        self._job = None  # before anybody knows: what was read is free once the wait is over
        self._future.set_exception(error) if error is not None else self._future.set_result(None)

    def wait(self, timeout: timedelta) -> None:
        self._future.result(timeout.total_seconds())

    def on_done(self, callback: Callable[[], object]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def synchronize(self) -> None:
        pass


class Engines:
    """What copies for one session, a thread or stream per direction, made when first needed; and its pool."""

    def __init__(self, session: Session) -> None:
        self._streams = session.streams
        self.pool = Pool(self._streams)
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def copy(self, direction: str, parked: Parked, x: Tensor) -> ThreadCopy | Mark:
        """Begin `Parked.copy` behind all others of its direction. Raises UnsupportedUse once closed."""
        with self._lock:
            if self._is_closed:
                raise UnsupportedUse("The session of an offloaded value is closed.", hint="compile again")
            if self._streams is None and direction not in self._lanes:
                self._lanes[direction] = _Lane(f"moefx {direction}")
        if self._streams is None:
            return self._lanes[direction].begin(ThreadCopy(direction, parked, x))
        parked.done = self._streams.begin(direction, lambda: parked.copy(direction, x), parked.done)
        return parked.done

    def close(self) -> None:
        """End the threads, when what they were given is done."""
        with self._lock:
            self._is_closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()


class _Lane:
    """A thread that copies one thing after the other. It knows nobody, and ends with whoever has this."""

    def __init__(self, name: str) -> None:
        jobs: queue.SimpleQueue[ThreadCopy | None] = queue.SimpleQueue()
        self._jobs = jobs
        self._thread = threading.Thread(target=_copy_all, args=(jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, jobs.put, None)

    def begin(self, work: ThreadCopy) -> ThreadCopy:
        self._jobs.put(work)
        return work

    def close(self) -> None:
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _copy_all(jobs: queue.SimpleQueue[ThreadCopy | None]) -> None:
    while (work := jobs.get()) is not None:
        work.run()
        del work


class CopyHandle(Generic[T]):
    """A copy that was started, to be waited for once. It owns what is read until then: nobody else gets that memory.
    One that is dropped without a wait concerns no other rank."""

    __slots__ = ("_owned", "_result", "_session", "_text", "_work")

    def __init__(self, session: Session, text: str, work: Any, result: T, owned: object) -> None:
        self._session, self._text, self._work = session, text, work
        self._result: T | None = result
        self._owned = owned

    def wait(self) -> T:
        """The copy, on the current stream. Raises OffloadError if it failed or takes too long."""
        work, result = self._work, self._result
        if work is None:
            raise StaleStateError(f"{self._text} was already waited for.", hint="keep the result, not the handle")
        try:
            work.wait(self._session.timeout)
        except Exception as error:
            result = None  # the frames of this error outlive it: work has the error
            reason = next(iter(str(error).strip().splitlines()), "it takes too long")
            raise OffloadError(f"{self._text} failed: {type(error).__name__}: {reason}",
                               where=self._session.where(self._text)) from error  # fmt: skip
        finally:
            self._work = self._result = self._owned = work = None
        return result

    def on_done(self, callback: Callable[[], object]) -> bool:
        """Call back when the copy is done, on CUDA with its stream as the current one."""
        self._work.on_done(callback)
        return True

    def __del__(self) -> None:
        if self._work is not None:  # the memory would be used again under the copy's hands
            self._work.synchronize()


def to_host_start(session: Session, x: Tensor, *, region: str) -> CopyHandle[Parked]:
    """Begin to copy x, of any shape and strides, to the host's memory. x must stay as it is until the wait."""
    nbytes, engines = x.numel() * x.element_size(), session.held(Engines)
    parked = Parked(nbytes, engines.pool)
    work = engines.copy("d2h", parked, x)
    session.record("to_host", (), region, nbytes)
    return CopyHandle(session, f"the copy to the host of a value of {region}", work, parked, x)


def to_device_start(session: Session, h: Parked, *, region: str) -> CopyHandle[Tensor]:
    """Begin to copy back what waits in the host's memory, into memory of its own on this rank's device."""
    x = torch.empty_strided(h.host.shape, h.host.stride(), dtype=h.host.dtype, device=session.device)
    work = session.held(Engines).copy("h2d", h, x)
    session.record("to_device", (), region, x.numel() * x.element_size())
    return CopyHandle(session, f"the copy back from the host of a value of {region}", work, x, h)
