"""Finds gated activations: act(gate) * up, however gates and ups lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, run, value
from moefx.ir.writes import is_written

_PICKS = ("chunk", "split", "split_with_sizes", "tensor_split", "narrow", "slice", "getitem")


@dataclass(frozen=True)
class Gated:
    """An activation by its `kind`, as the op for it takes it. halves: one tensor that has gates and ups, or both.
    spent: what it is computed with, views of these included, that nobody may want any more."""

    kind: str
    halves: tuple[Node, ...]
    interleaved: bool
    limit: float | None
    alpha: float | None
    spent: tuple[Node, ...]


@dataclass(frozen=True)
class _Parts:
    kind: str
    gate: Node
    up: Node
    inner: tuple[Node, ...]
    limit: float | None = None
    alpha: float | None = None


def find(product: Node) -> Gated | str | None:
    """The activation that a node is the result of; why an op for it cannot take its place; None: it is none."""
    parts = _by_factors(product)
    if parts is None or not _alike(product, parts.gate, parts.up):
        return None
    mine = {product, *parts.inner}
    other = next((u for n in parts.inner for u in n.users if u not in mine), None)
    if other is not None:
        return f"{other.name} reads a part of it, too"
    if any(map(is_written, (parts.gate, parts.up))):
        return "what it reads is written to"
    halves, interleaved = _halves(parts.gate, parts.up)
    if any(value(half).stride(-1) != 1 for half in halves):
        return "gates or ups do not lie side by side"
    views = [view for each in (parts.gate, parts.up) for view in _views(each) if view not in halves]
    return Gated(parts.kind, halves, interleaved, parts.limit, parts.alpha, (product, *parts.inner, *views))


def _by_factors(product: Node) -> _Parts | None:
    """What is multiplied, by the kinds that there are."""
    factors = _factors(product)
    if factors is None:
        return None
    for a, b in (factors, factors[::-1]):
        name = op_name(a)
        if name == "silu":
            return _Parts("swiglu", a.args[0], b, (a,))
        if name == "gelu":
            return _Parts("geglu_tanh" if arg(a, 1, "approximate", "none") == "tanh" else "geglu", a.args[0], b, (a,))
    for inner, other in (factors, factors[::-1]):
        pair = _factors(inner)
        for three in () if pair is None else ((*pair, other), (*pair[::-1], other), (pair[0], other, pair[1]),
                                              (pair[1], other, pair[0])):  # fmt: skip
            found = _by_sigmoid(*three)
            if found is not None:
                return _Parts(found.kind, found.gate, found.up, (inner, *found.inner), found.limit, found.alpha)
    return None


def _by_sigmoid(gate: Node, sigmoid: Node, up: Node) -> _Parts | None:
    """gate * sigmoid(gate) * up, or the clamped one."""
    if op_name(sigmoid) != "sigmoid":
        return None
    (inside,) = sigmoid.args
    if inside is gate:
        return _Parts("swiglu", gate, up, (sigmoid,))
    scaled, shifted = _with_number(inside, "mul"), _with_number(up, "add")
    if scaled is None or shifted is None or scaled[0] is not gate or shifted[1] != 1:
        return None
    near, limit = shifted[0], _limit(gate, shifted[0])
    if limit is None:
        return None
    return _Parts("clamped", gate.args[0], near.args[0], (sigmoid, inside, up, gate, near), limit, float(scaled[1]))


def _limit(gate: Node, up: Node) -> float | None:
    """That up to which gates are clamped, and ups on either side."""
    low, near = _clamped(gate), _clamped(up)
    if low is None or near is None or low[0] is not None or low[1] is None:
        return None
    return float(low[1]) if near == (-low[1], low[1]) else None


def _factors(node: Node) -> tuple[Node, Node] | None:
    found = node.args if op_name(node) in ("mul", "multiply") and not node.kwargs else ()
    return tuple(found) if len(found) == 2 and all(isinstance(each, Node) for each in found) else None


def _with_number(node: Node, name: str) -> tuple[Node, float] | None:
    """The operands of an op on a tensor and a number."""
    if op_name(node) != name or node.kwargs or len(node.args) != 2:
        return None
    number, tensor = sorted(node.args, key=lambda each: isinstance(each, Node))
    is_pair = isinstance(tensor, Node) and isinstance(number, (int, float))
    return (tensor, number) if is_pair else None


def _clamped(node: Node) -> tuple[float | None, float | None] | None:
    """Numbers between which a clamp leaves what it takes."""
    if op_name(node) not in ("clamp", "clip"):
        return None
    found = arg(node, 1, "min"), arg(node, 2, "max")
    return found if all(each is None or isinstance(each, (int, float)) for each in found) else None


def _alike(*nodes: Node) -> bool:
    found = [value(each) for each in nodes]
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in found):
        return False
    return len({(each.dtype, *map(expr, each.shape)) for each in found}) == 1


# ---- how gates and ups lie


def _halves(gate: Node, up: Node) -> tuple[tuple[Node, ...], bool]:
    """(the tensor that has gates and ups in an order that the op knows, or both; whether they are interleaved)"""
    (rows, *_), (other, *_) = _views(gate), _views(up)
    if rows is other and rows is not gate:
        width = value(rows).shape[-1]
        where = [_entries(each, rows) for each in (gate, up)] if isinstance(width, int) and width % 2 == 0 else []
        places = list(range(width)) if where else []
        if where == [places[: width // 2], places[width // 2 :]]:
            return (rows,), False
        if where == [places[::2], places[1::2]]:
            return (rows,), True
    return (gate, up), False


def _views(node: Node) -> list[Node]:
    """A tensor, and the views that lead from it to the node, of some entries of its last dim."""
    found = [node]
    while op_name(node) in _PICKS and len(node.all_input_nodes) == 1 and node.args[0] is node.all_input_nodes[0]:
        node = node.args[0]
        found.insert(0, node)
    return found


def _entries(node: Node, base: Node) -> list[int] | None:
    """The numbers of a tensor's last entries that views of it have, row by row; None if they are of other rows."""
    whole, mine = value(base), value(node)
    if list(map(expr, whole.shape[:-1])) != list(map(expr, mine.shape[:-1])):
        return None
    found = torch.arange(whole.shape[-1]).view(*[1] * (whole.dim() - 1), -1)
    first, *views = _views(node)
    assert first is base, "the views are of this tensor"
    try:
        for view in views:
            found = run(view, (found, *view.args[1:]), view.kwargs)
    except (IndexError, RuntimeError, TypeError):
        return None
    return found.flatten().tolist() if found.numel() == mine.shape[-1] else None
