"""Functions that users register: what goes wrong in one of them is told with its name and its line."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from moefx.errors import ExtensionError, MoefxError


@dataclass(frozen=True)
class Registered:
    """A function of the user's, called as it is. what: how messages call it. gives: the types that it may return.

    Raises ExtensionError if it cannot be called, and, in a call, where it raises or returns something else.
    """

    what: str
    fn: Callable[..., Any]
    gives: tuple[type, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ExtensionError(f"{self.what} is of type {type(self.fn).__name__}", hint="give a function")

    def __call__(self, *args: Any) -> Any:
        try:
            value = self.fn(*args)
        except Exception as error:
            text, hint = (error.what, error.hint) if isinstance(error, MoefxError) else (error, None)
            raise ExtensionError(f"{self.what} raised {type(error).__name__}: {text}", where=self._line_of(error),
                                 hint=hint) from error  # fmt: skip
        if self.gives and not isinstance(value, self.gives):
            found = "None" if value is None else type(value).__name__
            raise ExtensionError(f"{self.what} returned {found}", where=self.line,
                                 hint=f"return a value of type {self.gives[0].__name__}")  # fmt: skip
        return value

    @property
    def line(self) -> str | None:
        """`file.py:123`, where the function is defined; None if it is not written in Python."""
        code = _code(self.fn)
        return code and f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"

    def _line_of(self, error: Exception) -> str | None:
        """The innermost line of the function's own file that the error came through."""
        code = _code(self.fn)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else self.line


def check_name(kind: str, name: Any) -> None:
    """Raises ExtensionError unless `name` can be the name of a `kind` of thing that is registered."""
    if not isinstance(name, str) or not name:
        raise ExtensionError(f"the name of a {kind} is {name!r}", hint="give a text that is not empty")


def _code(fn: Callable[..., Any]) -> CodeType | None:
    """What Python runs for it, behind decorators and `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
