"""Level `scheduled`: a collective is two nodes, so that work can stand between them.

`h = start(op, *args)` begins, `y = wait(h)` gives the result. Run as they stand they are synchronous; the linked
program puts the runtime's asynchronous functions in their place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.op import REGISTRY, OpDef, Volume, define, lookup


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


def unsplit(node: Node) -> tuple[OpDef | None, Any]:
    """The record of the dialect op that a node calls or starts, None if none; and the call as if it were not split."""
    if node.target is not start:
        return lookup(node), node
    op, *args = node.args
    return REGISTRY.get(op), SimpleNamespace(target=op, args=args, kwargs={})


for _half in (start, wait):
    define(_half, volume=lambda node: Volume(), levels=frozenset({Level.SCHEDULED}))
