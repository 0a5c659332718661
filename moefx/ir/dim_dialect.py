"""What the dialect's ops of level moe do to dims."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from moefx.ir.fates import CONTRACTED, MIXED, ORDERED, TAKEN, UNREAD, Operand, kept, shape_of, stay
from moefx.ir.op import argument, value


def _dim(node: Node) -> int:
    return value(node).dim()


def _route(node: Node) -> list[Operand]:
    tables = (argument(node, name) for name in ("table", "quota"))
    return [Operand(argument(node, "idx"), (ORDERED, ORDERED)),
            *(Operand(a, (MIXED,) * _dim(a)) for a in tables if a is not None)]  # fmt: skip


def _dispatch(node: Node) -> list[Operand]:
    x = argument(node, "x")
    return [Operand(x, stay(shape_of(value(x)), {0: TAKEN})), _perm(node)]


def _dispatch_choices(node: Node) -> list[Operand]:
    return [Operand(argument(node, "choices"), (TAKEN, TAKEN)), _perm(node)]


def _perm(node: Node) -> Operand:
    """Of some of the pairs, the rows of these."""
    perm = argument(node, "perm")
    return Operand(perm, stay(shape_of(value(perm))))


def _combine(node: Node) -> list[Operand]:
    rows, perm, weights = (argument(node, name) for name in ("rows", "perm", "weights"))
    found = [Operand(rows, stay(shape_of(value(rows)), {0: MIXED})), Operand(perm, (MIXED,))]
    return found if weights is None else [*found, Operand(weights, (MIXED, MIXED))]


def _grouped_linear(node: Node) -> list[Operand]:
    """Which slot a row is of depends on its place."""
    rows, weight, counts, transposed, bias = (
        argument(node, name) for name in ("rows", "weight", "counts", "transposed", "bias"))  # fmt: skip
    last = _dim(rows) - 1
    size = shape_of(value(weight))
    matrix = (CONTRACTED, kept(last, size[2])) if transposed else (kept(last, size[1]), CONTRACTED)
    found = [Operand(rows, stay(shape_of(value(rows)), {0: ORDERED, last: CONTRACTED})),
             Operand(weight, (TAKEN, *matrix)), Operand(counts, (MIXED,))]  # fmt: skip
    return found if bias is None else [*found, Operand(bias, (TAKEN, kept(last, shape_of(value(bias))[1])))]


def _expert_rows(node: Node) -> list[Operand]:
    param, counts = argument(node, "param"), argument(node, "counts")
    return [Operand(param, stay(shape_of(value(param)), {0: TAKEN})), Operand(counts, (MIXED,))]


def _marker(node: Node) -> list[Operand]:
    """The identity; of other tensors, the counts, no entry is read."""
    x, *others = [a for a in node.args if isinstance(a, Node)]
    return [Operand(x, stay(shape_of(value(x)))), *(Operand(a, (UNREAD,) * _dim(a)) for a in others)]


RULES: dict[str, Callable[[Node], list[Operand]]] = {
    "route": _route, "dispatch": _dispatch, "dispatch_choices": _dispatch_choices, "combine": _combine,
    "grouped_linear": _grouped_linear, "expert_rows": _expert_rows,
    **dict.fromkeys(("enter_experts", "leave_experts", "expert_parameter"), _marker),
}  # fmt: skip
