"""What ops do to shapes: which ones keep the order of entries, which axes they permute, pick or sum over."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import expr

CASTS = ("to", "float", "half", "bfloat16", "type_as", "contiguous", "clone", "detach")
_POINTWISE = (*CASTS, "truediv", "dropout", "hardswish", "logsigmoid", "softsign", "tanhshrink", "relu6")
_SHAPES = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as", "ravel"}


def is_reshape(node: Node) -> bool:
    """Whether a node has all entries of its first argument, in the same order."""
    if node.target is operator.getitem:
        item = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return edit.tensor_value(node) is not None and all(i in (None, slice(None), Ellipsis) for i in item)
    return op_name(node) in _SHAPES and isinstance(node.args[0], Node)


def sizes(node: Node) -> tuple[sympy.Expr, ...]:
    return tuple(expr(size) for size in edit.tensor_value(node).shape)


def is_pointwise(name: str) -> bool:
    """Whether an op acts on every entry by itself: torch says so of its own ones, not of what is composed of them. Ops
    in place, which the canonical form still has where another view is used, are not meant."""
    packet = getattr(torch.ops.aten, name, None)
    tagged = packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    return (tagged and not name.endswith("_")) or name in _POINTWISE


def features(found: Iterable[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """The sizes other than one."""
    return tuple(size for size in found if size != 1)


def axes_of(node: Node) -> list[int] | None:
    """Which axes of its argument a transpose or permutation has, in order; None if the node is none."""
    name = "mT" if node.target is getattr and node.args[1] == "mT" else op_name(node)
    if name not in ("transpose", "swapaxes", "permute", "mT") or edit.tensor_value(node) is None:
        return None
    axes = list(range(edit.tensor_value(node).dim()))
    given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
    if name == "permute":
        return [axes[a] for a in given]
    a, b = (-1, -2) if name == "mT" else (axes[d] for d in given)
    axes[a], axes[b] = axes[b], axes[a]
    return axes


def items(item: Any, dims: int) -> list[tuple[int, Any]] | None:
    """(axis, what is taken of it) for every axis that an index names; None if it takes anything else than slices and
    single entries."""
    item = [i for i in (item if isinstance(item, tuple) else (item,)) if i is not None]
    if not all(i is Ellipsis or isinstance(i, (int, slice)) for i in item):
        return None
    if Ellipsis in item:
        at = item.index(Ellipsis)
        item[at : at + 1] = [slice(None)] * (dims - len(item) + 1)
    return list(enumerate(item))


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
