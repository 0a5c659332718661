"""What a long call shows while it runs, and to whom."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from moefx import progress


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.05)


def shown(terminal: bool = True, quiet: bool = False, pause_s: float = 0.2) -> str:
    """What a task wrote. A terminal is given time until it has."""
    out = io.StringIO()
    with progress.task("compiling it", Console(file=out, force_terminal=terminal, quiet=quiet, width=100)):
        progress.step("capture")
        with progress.task("program 2"):
            progress.step("layer [3]", done=3, total=4)
            until(lambda: "layer [3]" in out.getvalue(), 10.0 if terminal and not quiet and pause_s else pause_s)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue())


def until(holds: Callable[[], bool], most_s: float) -> None:
    end = time.monotonic() + most_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.usefixtures("soon")
def test_a_terminal_shows_what_is_done_and_nothing_stays():
    text = shown()
    assert "compiling it, program 2: layer [3]" in text
    assert progress._line is None


@pytest.mark.usefixtures("soon")
def test_others_and_short_calls_show_nothing(monkeypatch: pytest.MonkeyPatch):
    assert not shown(terminal=False)
    assert not shown(quiet=True)
    monkeypatch.setattr(progress, "DELAY_S", 60.0)
    assert not shown(pause_s=0.0)


@pytest.mark.usefixtures("soon")
def test_a_task_that_fails_ends_its_line():
    out = io.StringIO()
    with pytest.raises(ValueError), progress.task("failing", Console(file=out, force_terminal=True)):  # noqa: PT012
        until(lambda: "failing" in out.getvalue(), 10.0)
        raise ValueError
    assert progress._line is None
    assert out.getvalue().endswith("\x1b[2K"), "the line is wiped out"


def test_the_log_has_each_step_with_its_seconds(caplog: pytest.LogCaptureFixture):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("moefx.progress")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        shown(terminal=False, pause_s=0.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [each.rpartition(": ")[0] for each in said] == [
        "compiling it: capture", "compiling it, program 2: layer [3]",
    ]
    assert all(re.search(r"\d\.\d\d s$", each) for each in said)


def test_other_threads_are_not_shown():
    found: list[object] = []

    def work() -> None:
        with progress.task("elsewhere"):
            progress.step("a step")
            found.append(progress._line)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
