"""Level `scheduled`: a collective is two nodes, so that work can stand between them.

`h = start(op, *args)` begins, `y = wait(h)` gives the result. Run as they stand they are synchronous; the linked
program puts the runtime's asynchronous functions in their place.
"""

from __future__ import annotations

from typing import Any

from moefx.ir.op import Volume, define


class Started:
    """A collective that began. Waited for exactly once."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.waited = False


def start(op: Any, *args: Any) -> Started:
    """Begin the dialect op `op`."""
    return Started(op(*args))


def wait(handle: Started) -> Any:
    """The result of what was started."""
    assert not handle.waited, "waited for twice"
    handle.waited = True
    return handle.result


define(start, volume=lambda node: Volume())
define(wait, volume=lambda node: Volume())
