"""Numbers that a captured graph computes on the host, of sizes or of `.tolist()`, and the checks that read them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moefx.ir.names import op_name
from moefx.ir.op import value

_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range_for_size", "sym_constrain_range")
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def is_check(node: Node) -> bool:
    """Whether the node only demands something of a number."""
    return op_name(node) in _CHECKS


def readers(node: Node, but: Node | None = None) -> list[Node] | None:
    """The users of `node`, theirs, and so on, the last first, where they are only numbers on the host and checks of
    such; None if something else comes of it. but: a user that does not count."""
    found = [user for user in node.users if user is not but]
    for each in found:
        if not is_check(each) and not is_number(each):
            return None
        found += [user for user in each.users if user not in found]
    return sorted(found, reverse=True)


def is_number(node: Node) -> bool:
    """Whether the node has a number on the host, or a list of such."""
    return _are_numbers(value(node))


def _are_numbers(found: Any) -> bool:
    return all(map(_are_numbers, found)) if isinstance(found, (list, tuple)) else isinstance(found, _NUMBERS)
