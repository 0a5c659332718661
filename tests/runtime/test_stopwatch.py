"""Time that adds up, and where ranks stand still for parameters of experts."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch

from moefx.runtime.handles import Handle
from moefx.runtime.session import Session
from moefx.runtime.stopwatch import Stopwatch

CPU = torch.device("cpu")


def test_spans_add_up():
    watch = Stopwatch(CPU, itertools.accumulate([0, 5, 100, 7]).__next__)
    for _ in range(2):
        with watch.span():
            pass
    assert watch.is_done
    assert watch.nanoseconds() == 5 + 7


class Clock:
    """Nanoseconds that pass when somebody says so."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Slow:
    """What is over in 20 ns."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        self.clock.now += 20


def test_the_wait_counts_and_what_is_done_beside_it_does_not():
    clock = Clock()
    session = SimpleNamespace(waits={}, device=CPU, is_over=False, timeout=timedelta(seconds=1),
                              guard=lambda *_: nullcontext(), view=SimpleNamespace(device_type="cpu"))  # fmt: skip
    session.standing_still = lambda *key: Session.standing_still(session, *key)

    def finish() -> None:
        clock.now += 500

    with mock.patch("moefx.runtime.session.Stopwatch", partial(Stopwatch, clock=clock)):
        for kind in ("gather_experts", "scatter_experts", "gather_experts", None):
            timed = None if kind is None else (kind, "mlp")
            Handle(session, "text", "ep", finish, work=Slow(clock), timed=timed).wait()
    found = {key: watch.nanoseconds() for key, watch in session.waits.items()}
    assert found == {("gather_experts", "mlp"): 40, ("scatter_experts", "mlp"): 20}
