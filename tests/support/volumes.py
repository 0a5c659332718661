"""Volumes of ops, as numbers."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.fx import Node

from moefx.ir.op import lookup


def at(amount: object, where: dict[sympy.Symbol, int]) -> sympy.Expr:
    return sympy.sympify(amount).subs(where)


def check_volume(node: Node, known: Mapping[sympy.Symbol, int]) -> None:
    """That amounts are whole numbers, and bytes are sent by collectives alone, along their axis."""
    opdef = lookup(node)
    if opdef is None:
        return
    found = opdef.volume(node)
    amounts = [found.flops, found.hbm_bytes, *found.wire_bytes.values(), *found.messages.values()]
    assert all(at(a, known).is_Integer and at(a, known) >= 0 for a in amounts), node.name
    assert found.wire_bytes.keys() == found.messages.keys()
    if opdef.is_collective:
        assert list(found.wire_bytes) == [opdef.axes_of(node)]
        assert at(found.wire_bytes[opdef.axes_of(node)], known) > 0
    else:
        assert not found.wire_bytes, node.name
