"""Time that adds up, and where ranks stand still for parameters of experts."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

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


class Slow:
    """What is over in 20 ms."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(0.02)


def test_the_wait_counts_and_what_is_done_beside_it_does_not():
    session = SimpleNamespace(waits={}, device=CPU, is_over=False, timeout=timedelta(seconds=1),
                              view=SimpleNamespace(device_type="cpu"))  # fmt: skip
    session.guard = lambda *_: nullcontext()
    session.standing_still = lambda *key: Session.standing_still(session, *key)
    for kind in ("gather_experts", "scatter_experts", "gather_experts", None):
        timed = None if kind is None else (kind, "mlp")
        handle = Handle(session, "text", "ep", lambda: time.sleep(0.5), work=Slow(), timed=timed)
        handle.wait()
    found = {key: watch.nanoseconds() / 1e9 for key, watch in session.waits.items()}
    assert found.keys() == {("gather_experts", "mlp"), ("scatter_experts", "mlp")}
    assert 0.02 <= found["scatter_experts", "mlp"] < 0.5
    assert 0.04 <= found["gather_experts", "mlp"] < 0.5
