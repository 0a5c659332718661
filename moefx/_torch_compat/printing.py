"""What a forward prints or logs: dynamo leaves it out of the graph, where it would stop otherwise."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._dynamo import config
from torch._dynamo.variables import misc

LEVELS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")
PRINTS = {print, *(getattr(logging.Logger, level) for level in LEVELS if hasattr(logging.Logger, level))}
_OPTION = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"


@contextlib.contextmanager
def left_out() -> Iterator[list[str]]:
    """The lines that print or log, as "model.py:41", once what runs inside has been captured."""
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(**{_OPTION: PRINTS}))
        for name, method in (("IgnoredFunctionVariable", "call_function"), ("LoggingLoggerVariable", "call_method")):
            if (kind := getattr(misc, name, None)) is not None:
                stack.enter_context(mock.patch.object(kind, method, _noting(getattr(kind, method), found)))
        yield found


def _noting(original: Any, found: list[str]) -> Any:
    def call(self: Any, tx: Any, *args: Any) -> Any:
        result = original(self, tx, *args)
        frame = tx.frame_summary()
        found.append(f"{frame.filename}:{frame.lineno}")
        return result

    return call
