"""Who waits where: a thread per session publishes this rank's state to the store, and reads the others' on failure.

Idle cost is one small store write per period. The thread never raises, never ends the process and never keeps the
interpreter alive; when the store is gone it stops and reports say so.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

_MAX_LINES = 16
_MAX_RANKS = 16
_STORE_PATIENCE_S = 5.0


@dataclass
class _Shared:
    """What the session's thread and the watchdog's thread both see; each field is replaced whole, never edited."""

    key: str
    rank: int
    period_s: float
    step: int | None = None
    calls: int = 0
    doing: tuple[str, float] | None = None
    last: str | None = None
    status: str = "running"
    beat: int = 0
    store_lost: bool = False
    requests: queue.SimpleQueue[_Request | None] = field(default_factory=queue.SimpleQueue)

    def snapshot(self) -> dict[str, Any]:
        self.beat += 1
        doing = self.doing
        return {
            "beat": self.beat,
            "step": self.step,
            "calls": self.calls,
            "doing": doing and doing[0],
            "seconds": doing and round(time.monotonic() - doing[1], 1),
            "last": self.last,
            "status": self.status,
            "clock": time.strftime("%H:%M:%S"),
        }


@dataclass
class _Request:
    ranks: Sequence[int]
    pause_s: float  # between the two looks at the store
    before: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    after: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


class Watchdog:
    """Publishes what this rank does under `key/<rank>` in `store`; with `store` None it knows this rank alone."""

    def __init__(self, store: dist.Store | None, key: str, rank: int, *, period_s: float = 2.0) -> None:
        self._shared = _Shared(key, rank, period_s)
        self._thread: threading.Thread | None = None
        if store is None:
            return
        # A connection of its own: the session's thread may sit in a blocking store call for minutes.
        board = store.clone()
        self._thread = threading.Thread(target=_run, args=(board, self._shared), name=f"moefx {key}", daemon=True)
        self._thread.start()
        # Also runs at interpreter exit: a daemon thread inside a store call at finalisation would abort the process.
        self._finalizer = weakref.finalize(self, _stop, self._thread, self._shared)

    def set_step(self, number: int) -> None:
        """The step that this rank works on from now on."""
        self._shared.step = number

    def begin_call(self) -> None:
        """This rank calls a program; calls are counted."""
        self._shared.calls += 1

    @property
    def calls(self) -> int:
        return self._shared.calls

    @property
    def period_s(self) -> float:
        return self._shared.period_s

    @property
    def step(self) -> int | None:
        return self._shared.step

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Everything that may block on other ranks runs inside this, with a text that names it."""
        shared = self._shared
        before, shared.doing = shared.doing, (text, time.monotonic())
        try:
            yield
        finally:
            shared.doing = before
            shared.last = text

    def fail(self, text: str) -> None:
        """Tell the other ranks, at once as this process may end, that this one raised."""
        self._shared.status = f"raised an error: {text}"
        if self._thread is not None and self._thread.is_alive():
            self._look((), 0.0, patience_s=1.0)

    def report(self, ranks: Sequence[int]) -> list[str]:
        """One line per distinct state of the given global ranks. Takes a little over a period, since a rank is called
        dead only if it published nothing meanwhile; clocks of different machines are not compared."""
        others = [rank for rank in ranks if rank != self._shared.rank]
        if self._thread is None or not self._thread.is_alive():
            return ["nothing is known of the other ranks: the store is gone (the process that hosts it may be dead)"]
        request = self._look(others, 1.25 * self._shared.period_s)
        if request is None:
            return ["nothing is known of the other ranks: the store does not answer (its process may be dead)"]
        period_s = self._shared.period_s
        return _by_state({rank: _describe(request.before[rank], request.after[rank], period_s) for rank in others})

    def states(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What those of the given global ranks published that did. It may be old."""
        if self._thread is None or not self._thread.is_alive():
            return {}
        request = self._look(ranks, 0.0)
        found = {} if request is None else request.after
        return {rank: state for rank, state in found.items() if state is not None}

    def _look(self, ranks: Sequence[int], pause_s: float, patience_s: float = _STORE_PATIENCE_S) -> _Request | None:
        """What the ranks published, now and after a pause; None: the store does not answer."""
        request = _Request(ranks, pause_s)
        self._shared.requests.put(request)
        request.done.wait(pause_s + patience_s)
        return None if self._shared.store_lost or not request.done.is_set() else request

    def close(self) -> None:
        """Stop the thread after a last word; idempotent."""
        if self._thread is not None:
            self._finalizer()


def ahead(states: dict[int, dict[str, Any]], calls: int) -> list[int]:
    """Ranks that have begun more calls than that, for certain: what they published may be old."""
    return [rank for rank, state in states.items() if state["calls"] > calls]


class Silence:
    """Ranks that have published nothing for several looks, a period apart each, though they did not end their session:
    they are dead."""

    _LOOKS = 3

    def __init__(self) -> None:
        self._beats: dict[int, tuple[int, int]] = {}  # the last beat that was seen, and in how many looks

    def of(self, states: dict[int, dict[str, Any]]) -> list[int]:
        for rank, state in states.items():
            beat, looks = self._beats.get(rank, (None, 0))
            self._beats[rank] = state["beat"], looks + 1 if state["beat"] == beat else 0
        return [r for r, state in states.items() if self._beats[r][1] >= self._LOOKS and state["status"] == "running"]


def _stop(thread: threading.Thread, shared: _Shared) -> None:
    if shared.status == "running":
        shared.status = "closed its session"
    shared.requests.put(None)
    if thread is not threading.current_thread():
        thread.join(_STORE_PATIENCE_S)


def _run(board: dist.Store, shared: _Shared) -> None:
    try:
        while True:
            _publish(board, shared)
            try:
                request = shared.requests.get(timeout=shared.period_s)
            except queue.Empty:
                continue
            if request is None:
                _publish(board, shared)
                return
            _answer(board, shared, request)
    except Exception:  # the store is gone: what is known locally is all there is
        shared.store_lost = True
        while not shared.requests.empty():
            pending = shared.requests.get()
            if pending is not None:
                pending.done.set()


def _publish(board: dist.Store, shared: _Shared) -> None:
    board.set(f"{shared.key}/{shared.rank}", json.dumps(shared.snapshot()))


def _read(board: dist.Store, shared: _Shared, ranks: Sequence[int]) -> dict[int, dict[str, Any] | None]:
    states: dict[int, dict[str, Any] | None] = {}
    for rank in ranks:
        key = f"{shared.key}/{rank}"
        states[rank] = json.loads(board.get(key)) if board.check([key]) else None
    return states


def _answer(board: dist.Store, shared: _Shared, request: _Request) -> None:
    try:
        _publish(board, shared)
        request.before = _read(board, shared, request.ranks)
        time.sleep(request.pause_s)
        _publish(board, shared)
        request.after = _read(board, shared, request.ranks)
    except Exception:
        shared.store_lost = True
        raise
    finally:
        request.done.set()


def _describe(before: dict[str, Any] | None, after: dict[str, Any] | None, period_s: float) -> str:
    if after is None:
        return "never reported (not started, or dead before its session began)"
    where = f"in step {after['step']}" if after["step"] is not None else "before its first step"
    if after["status"] != "running":
        return f"{after['status']} ({where})"
    if after["doing"]:
        doing = f"waiting in {after['doing']} ({where})"
    else:
        doing = f"not waiting for anyone ({where}, last in {after['last'] or 'nothing'})"
    if before is not None and before["beat"] == after["beat"]:
        return f"silent since {after['clock']}, probably dead; up to {period_s:g} s before, {doing}"
    return doing


def _by_state(states: dict[int, str]) -> list[str]:
    """States with their ranks, the rarest first: those who differ from the rest are the news."""
    ranks: dict[str, list[int]] = {}
    for rank, text in states.items():
        ranks.setdefault(text, []).append(rank)
    lines = []
    for text, who in sorted(ranks.items(), key=lambda item: len(item[1])):
        names = ", ".join(map(str, who[:_MAX_RANKS]))
        if len(who) > _MAX_RANKS:
            names += f" and {len(who) - _MAX_RANKS} more"
        lines.append(f"rank{'s' if len(who) > 1 else ''} {names}: {text}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more states"]
    return lines
