"""Streams that note who uses which memory, for code that runs on CPU as it would on CUDA.

Everything runs at once and in order, so that numbers say nothing of streams. (On a GPU they do not show a missing edge
either, until work happens to take longer.) So each use of memory is noted, with what it is behind: on a stream whatever
came before it there, what the stream has waited for, and what the host knew to be done. A use is right if it is behind
all others of the same memory, except that reads may meet reads. And memory that a lane or a collective uses must be
there until the host or the current stream is behind it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefx import _torch_compat as compat
from moefx.errors import VerifyError
from moefx.runtime.streams import HOST_READS

COMPUTE = "compute"  # the current stream
HOST = "host"  # no stream; what it knows to be done, whatever begins now is behind
_READ_NOTHING = {f"aten::{name}" for name in ("empty_like", "full_like", "new_empty", "new_empty_strided", "new_full",
                                              "new_ones", "new_zeros", "ones_like", "zeros_like")}  # fmt: skip

Clock = dict[str, int]  # {stream: how many of its uses something is behind}


class _Use(NamedTuple):
    """Of the bytes from `first` to before `end` of some memory; the one of number `tick` on its stream."""

    first: int
    end: int
    stream: str
    tick: int
    writes: bool
    what: str

    def meets(self, other: _Use) -> bool:
        """Whether the two may not be in any order."""
        return self.first < other.end and other.first < self.end and (self.writes or other.writes)


class RecordedStreams(compat.TorchDispatchMode):
    """Of one rank; operators that run in this context are on its current stream. A use that is not behind another one
    raises VerifyError."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._uses: weakref.WeakKeyDictionary[Any, list[_Use]] = weakref.WeakKeyDictionary()
        self._stream: str | None = COMPUTE  # None: nobody notes anything
        self._touched: list[Tensor] = []  # by what a lane does; what it makes itself is its own
        self._marks: list[Mark] = []

    def left(self) -> str | None:
        """Something that nobody has waited for, but for what the host reads when it is there."""
        return next((each.what for each in self._marks if not each.is_over and each.stream != HOST_READS), None)

    def begin(self, lane: str, work: Callable[[], object], behind: Any = None) -> Mark:
        self.join(lane, self.clocks[COMPUTE])
        if behind is not None:
            self.join(lane, behind.clock)
        with self._on(lane):
            work()
        touched, self._touched = self._touched, []
        return self._mark(lane, f"a copy ({lane})", touched)

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def collective(self, stream: str, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Mark:
        """One begins on the stream of its group, behind what the current stream has to do so far."""
        self.join(stream, self.clocks[COMPUTE])
        self._use(stream, what, reads, writes)
        return self._mark(stream, what, [*reads, *writes])

    def _mark(self, stream: str, what: str, tensors: Sequence[Tensor]) -> Mark:
        self._marks.append(Mark(self, stream, what, tensors))
        return self._marks[-1]

    @contextmanager
    def _on(self, stream: str | None) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def unnoticed(self) -> Any:
        """What runs inside is no work of this device."""
        return self._on(None)

    def join(self, stream: str, clock: Clock) -> None:
        """The stream waits for all that the clock is behind."""
        mine = self.clocks[stream]
        for other, tick in clock.items():
            mine[other] = max(mine.get(other, 0), tick)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._stream is None:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        written = compat.written_arguments(func, args, kwargs)
        idle = [*written, *compat.viewed_arguments(func, args, kwargs)]
        reads = [] if func._schema.name in _READ_NOTHING else [x for x in given if all(x is not y for y in idle)]
        found = func(*args, **kwargs)
        known = {_memory(each) for each in given}
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor) and _memory(each) not in known]
        if self._stream != COMPUTE:
            self._touched += [*reads, *written]
        self._use(self._stream, str(func), reads, [*written, *made])
        return found

    def _use(self, stream: str, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.join(stream, self.clocks[HOST])
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        for tensor in (*reads, *writes):
            if tensor.numel() and not tensor.is_meta:
                use = _Use(*_extent(tensor), stream, clock[stream], any(tensor is each for each in writes), what)
                self._note(self._uses.setdefault(tensor.untyped_storage(), []), use, clock)

    def _note(self, uses: list[_Use], new: _Use, clock: Clock) -> None:
        for old in filter(new.meets, uses):
            if clock.get(old.stream, 0) < old.tick:
                does, did = (("writes to" if each.writes else "reads") for each in (new, old))
                raise VerifyError(f"{new.what} on the stream '{new.stream}' {does} memory that {old.what} on "
                                  f"'{old.stream}' {did}, and does not wait for it")  # fmt: skip
        uses[:] = [old for old in uses if not self._says_more(new, old, clock)] + [new]

    @staticmethod
    def _says_more(new: _Use, old: _Use, clock: Clock) -> bool:
        """Whether who is behind the new use is behind the old one, which nobody needs to know any more."""
        covers = new.first <= old.first and old.end <= new.end and (new.writes or not old.writes)
        return covers and clock.get(old.stream, 0) >= old.tick


class Mark:
    """A place on a stream of `RecordedStreams`."""

    def __init__(self, streams: RecordedStreams, stream: str, what: str, tensors: Sequence[Tensor]) -> None:
        self._streams, self.stream, self.what, self.is_over = streams, stream, what, False
        self.clock = dict(streams.clocks[stream])
        self._memory = [weakref.ref(each.untyped_storage()) for each in tensors]

    def _check_memory(self) -> None:
        memory, self._memory = self._memory, []
        if any(each() is None for each in memory):
            raise VerifyError(f"memory that {self.what} uses was given back before anybody waited for it")

    def is_done(self) -> bool:
        self._check_memory()
        self.synchronize()
        return True

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        self.is_over = True
        self._check_memory()
        self._streams.join(COMPUTE, self.clock)

    def synchronize(self) -> None:
        self._streams.join(HOST, self.clock)

    def on_done(self, callback: Callable[[], object]) -> None:
        callback()


class Weak:
    """A tensor that does not keep its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = weakref.ref(tensor.untyped_storage())
        self._how = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def get(self) -> Tensor:
        """Behind a wait, which finds memory that is gone."""
        return torch.empty(0, dtype=self._dtype).set_(self._memory(), *self._how)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory from the first to behind the last that it has."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
