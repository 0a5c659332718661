"""Ops that change how the ranks along an axis have one tensor: what follows from where it comes from and where it goes.

Types along an axis (`ir.types`): I and R, the same on all ranks, I where all read it alike, R where each has another
part of the gradient; V, another part on each; P, a summand on each. From what an op takes and gives follow

    V -> I or R   all-gather       all parts but its own arrive at a rank, and as much leaves
    P -> V        reduce-scatter   all parts of its summand but its own leave
    P -> I or R   all-reduce       twice a summand leaves
    else          nobody sends: a rank takes its own part, or fills up with zeros

and the types of its transpose, `TRANSPOSED`. Ops differ in how a tensor is cut: equal shares of rows (`ops.shares`),
given numbers of them (`ops.gathers`), a layout (`ops.weights`), entries of a dim (`ops.dense`), several at once. Where
parts are rows that differ from rank to rank in any case, their type stays V (`MOVED`), and the rest holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from torch.fx import Node

from moefx.ir.op import MOVED, Along, OpDef, Volume, argument, define, nbytes

COLLECTIVES = {("V", "I"): "all_gather", ("V", "R"): "all_gather", ("P", "V"): "reduce_scatter",
               ("P", "I"): "all_reduce", ("P", "R"): "all_reduce"}  # fmt: skip
REDISTRIBUTING: dict[Any, tuple[str, str]] = {}  # what was registered: the types that an op takes and gives
# The types that the gradient of a tensor of a type may have.
TRANSPOSED = {"I": "I", "R": "P", "V": "V", "P": "IR"}


def redistribute(target: Any, takes: str, gives: str, *, of: str = "", dim: int | str | None = 0, moved: bool = False,
                 whole: Callable[[Node], sympy.Expr] | None = None, **known: Any) -> OpDef:  # fmt: skip
    """Registers an op by its types. of, dim: as of `Along`. moved: parts are rows that differ in any case. whole: bytes
    of what all ranks have together, by default of the result of an all-gather and of what is summed. known: the other
    fields of `OpDef`."""
    kind = COLLECTIVES.get((takes, gives), "")
    operand = of or target._schema.arguments[0].name
    size = whole or (nbytes if kind == "all_gather" else lambda node: nbytes(argument(node, operand)))
    if kind:
        known["collective"] = kind
    if kind == "reduce_scatter":
        known = {"payload": operand} | known

    def volume(node: Node) -> Volume:
        axes = found.axes_of(node) if kind else ""
        if not axes:
            return Volume(hbm_bytes=sympy.S.Zero if kind else nbytes(node))
        if kind == "all_reduce":
            return Volume(wire_bytes={axes: 2 * size(node)}, messages={axes: sympy.S.One})
        n = argument(node, "n")
        return Volume(wire_bytes={axes: size(node) * (n - 1) / n}, messages={axes: sympy.Integer(n - 1)})

    REDISTRIBUTING[target] = takes, gives
    along = MOVED if moved else Along(takes, gives, of=of, dim=dim)
    found = define(target, **{"volume": volume, "along": along} | known)
    return found
