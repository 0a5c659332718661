"""Level `scheduled`: a collective is two nodes, so that work can stand between them.

`h = start(op, *args)` begins, `y = wait(h)` gives the result. Run as they stand they are synchronous; the linked
program puts the runtime's asynchronous functions in their place.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.op import REGISTRY, OpDef, Volume, define, lookup, value


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


def begun(node: Node) -> Node | None:
    """The start of what a node has the result of, or one of several results; None: it is no wait."""
    found = node.args[0] if node.target is operator.getitem else node
    return found.args[0] if isinstance(found, Node) and found.target is wait else None


def parts(node: Node) -> list[Node]:
    """The several results of a wait: they stand right behind it, so that each of them dies by itself."""
    is_several = node.target is wait and isinstance(value(node), (list, tuple))
    return [user for user in node.users if user.target is operator.getitem] if is_several else []


for _half in (start, wait):
    define(_half, volume=lambda node: Volume(), levels=frozenset({Level.SCHEDULED}))
