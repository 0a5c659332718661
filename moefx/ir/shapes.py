"""The sizes of nodes as expressions, and einsums by their letters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.dim_arguments import place_of_sizes
from moefx.ir.names import op_name
from moefx.ir.op import expr

LIKE = {"view_as": "view", "reshape_as": "reshape"}


def name_sizes(node: Node) -> bool:
    """Let an op that makes its result as large as a tensor name the sizes of that one; whether it is such an op.

    y = x.view_as(like); y = x.view(like.size())   ->   y = x.view((like.size(0), 4, 8))
    """
    name = op_name(node)
    place = 1 if name in LIKE else place_of_sizes(node)
    given = node.args[place] if place is not None and len(node.args) > place else None
    like = given if name in LIKE else _measured(given)
    if like is None:
        return False
    with edit.at(node):
        shape = [size if type(size) is int else edit.valued(edit.call(node.graph, torch.ops.aten.sym_size.int, like, d))
                 for d, size in enumerate(edit.tensor_value(like).shape)]  # fmt: skip
    if name in LIKE:
        node.op, node.target = "call_method", LIKE[name]
    node.args = (*node.args[:place], tuple(shape), *node.args[place + 1 :])
    edit.erase_unused([given] if given is not like else [])
    return True


def _measured(found: Any) -> Node | None:
    """The tensor that this is all sizes of."""
    is_size = isinstance(found, Node) and op_name(found) == "size" and len(found.args) == 1 and not found.kwargs
    return found.args[0] if is_size else None


def sizes(node: Any) -> tuple[sympy.Expr, ...]:
    """Of what is no tensor: none."""
    found = edit.tensor_value(node)
    return () if found is None else tuple(expr(size) for size in found.shape)


def features(found: Iterable[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """The sizes other than one."""
    return tuple(size for size in found if size != 1)


@dataclass(frozen=True)
class Term:
    """An operand of an einsum. letters: of its axes that are not of size one."""

    node: Node
    all_letters: str
    letters: str

    def split(self, front: int) -> tuple[str, str]:
        """The letters of the first `front` axes, and of the others."""
        lead, tail = self.all_letters[:front], self.all_letters[front:]
        return "".join(c for c in lead if c in self.letters), "".join(c for c in tail if c in self.letters)

    def letters_before(self, last: str) -> int:
        """How many axes there are before one, or at all."""
        return self.all_letters.index(last) if last else len(self.all_letters)


def einsum_terms(node: Node) -> tuple[list[Term], str] | None:
    """The operands of a canonical einsum and the letters of its result."""
    equation, *operands = node.args
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    subscripts = left.split(",")
    if any(len(set(letters)) < len(letters) for letters in subscripts):
        return None
    size = {c: s for letters, operand in zip(subscripts, operands) for c, s in zip(letters, sizes(operand)) if s != 1}
    terms = [Term(o, s, "".join(c for c in s if c in size)) for o, s in zip(operands, subscripts)]
    return terms, "".join(c for c in out if c in size)
