"""What the tests tell Python so that it wastes no time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any


def roomy(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, with room for the frames of all that it calls.

    CPython keeps frames in chunks of 16 KB, and maps and unmaps a chunk whenever a call crosses the end of one: ten
    thousand times in a second of compiling. This function's own frame asks for so much that one chunk of a megabyte
    holds it and what comes after.
    """
    return fn(*args, **kwargs)


roomy.__code__ = roomy.__code__.replace(co_stacksize=66_000)


def keep_what_is_imported() -> None:
    """The garbage collector no longer walks what there is now: a million objects of modules, which nobody frees; and
    the graphs that tests make no more often than while moefx compiles."""
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(100_000, *older)
