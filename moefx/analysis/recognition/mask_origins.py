"""Of which routing a mask of tokens is a part: a capacity, padding or a threshold took tokens away from its experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node

from moefx.analysis.recognition.facts import Mask, Scattered
from moefx.analysis.recognition.indexing import entry
from moefx.analysis.recognition.routings import is_distinct
from moefx.ir import edit
from moefx.ir.dims import axes_of
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, numel

BOTH = ("and", "and_", "logical_and", "bitwise_and", "mul")  # not zero where both are not zero
_SAME = ("to", "type_as", "type", "bool", "int", "long", "float", "contiguous", "clone", "detach")
_SHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze")
_SUMS = ("sum", "any", "amax")


def origin(masks: Sequence[Node], facts: Mapping[Node, Any]) -> Node | None:
    """Ids [..] or [.., K], all of a token different, by which every token of the e-th mask [..] chose expert e."""
    found = [_chosen_by(mask, e, facts) for e, mask in enumerate(masks)]
    common = set.intersection(*found) if found else set()
    tokens = _sizes(masks[0]) if masks else []
    of_one = [i for i in common if numel(i) == numel(masks[0])]
    of_some = [i for i in common if _sizes(i)[:-1] == tokens and is_distinct(i)]
    return min(of_one or of_some, default=None)


def _chosen_by(mask: Any, e: int, facts: Mapping[Node, Any]) -> set[Node]:
    """Ids that name e wherever a mask of tokens or pairs is not zero."""
    fact, source, old = facts.get(mask), *_source(mask)
    if isinstance(fact, Mask) and fact.expert == e and (fact.is_of_tokens or fact.is_of_pairs):
        return {fact.idx}
    if op_name(mask) in BOTH:
        return set().union(*(_chosen_by(factor, e, facts) for factor in _factors(mask)))
    if old is None:
        return set()
    sums = op_name(mask) == "any" and arg(mask, 1, "dim") in (-1, old.dim() - 1)
    if sums or _is_cast(mask) or op_name(mask) in _SHAPES:
        return _chosen_by(source, e, facts)
    axis, number = entry(mask) or (None, None)
    return _column_chosen_by(source, e, axis, facts) if number == e else set()


def _column_chosen_by(node: Any, e: int, axis: int, facts: Mapping[Node, Any]) -> set[Node]:
    """Ids that name e wherever the e-th entry of `node` along an axis is not zero."""
    name, source, old = op_name(node), *_source(node)
    if name in BOTH:
        return set().union(*(_column_chosen_by(factor, e, axis, facts) for factor in _factors(node)))
    if old is None:
        return set()
    if _is_cast(node):
        return _column_chosen_by(source, e, axis, facts)
    if (axes := axes_of(node)) is not None:
        return _column_chosen_by(source, e, axes[axis], facts)
    if axis != edit.tensor_value(node).dim() - 1:
        return set()
    if isinstance(facts.get(node), Scattered):
        return {facts[node].idx}
    if name == "one_hot":
        return {source}
    dim = arg(node, 1, "dim")
    sums = name in _SUMS and isinstance(dim, int) and dim % old.dim() < old.dim() - 1
    if sums or (name in _SHAPES and _sizes(source)[-1:] == _sizes(node)[-1:]):
        return _column_chosen_by(source, e, old.dim() - 1, facts)
    return set()


def _source(node: Any) -> tuple[Any, Any]:
    """The first argument of an op, and its value, if it is a tensor."""
    source = node.args[0] if isinstance(node, Node) and node.args else None
    return source, edit.tensor_value(source)


def _factors(node: Node) -> list[Node]:
    dims = edit.tensor_value(node).dim()
    return [a for a in node.args if edit.tensor_value(a) is not None and edit.tensor_value(a).dim() == dims]


def _is_cast(node: Node) -> bool:
    """Whether an op keeps what is zero and what is not."""
    return op_name(node) in _SAME or (op_name(node) in ("ne", "gt") and arg(node, 1, "other") == 0)


def _sizes(node: Node) -> list:
    return [expr(size) for size in edit.tensor_value(node).shape]
