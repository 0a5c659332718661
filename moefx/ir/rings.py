"""Rings: of the values that a region has once per chunk, only so many are alive at the same time.

No buffers stand for a ring. It is the order of the graph: a value is made when the readers of an earlier one are done.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch.fx import Node

from moefx.ir.ops.order import start, wait
from moefx.ir.writes import is_view

RING = "moefx_ring"  # the key of a member's `Ring` in its meta


class Ring(NamedTuple):
    """name: of its first member. slots: how many members may be alive at once."""

    name: str
    slots: int


def maker(node: Node) -> Node:
    """From where on the memory of a value is taken: what is received needs it from the start."""
    if node.target is wait or (node.target is operator.getitem and not looks(node)):
        return node.args[0]
    return node


def looks(node: Node) -> bool:
    """Whether a value is a view of another one, or one of several."""
    if node.target is operator.getitem:
        return looks(node.args[0])
    return node.op == "call_function" and is_view(node.target)


def readers(node: Node) -> list[Node]:
    """What reads a value, views of it or one of several, the output among them."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if looks(user) or user.target is operator.getitem:
                stack.append(user)
            else:
                found[user] = None
    return list(found)


def done(reader: Node) -> Node:
    """Behind which node a reader needs its arguments no more: what is sent stays until the wait."""
    return next(iter(reader.users), reader) if reader.target is start else reader
