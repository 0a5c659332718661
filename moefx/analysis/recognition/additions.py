"""Where the rows of an expert are added to an output: the ends of the branches of a loop over experts."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from moefx.analysis.recognition import indexing, routings
from moefx.analysis.recognition.facts import Index, Mask, Weighed, tokens_of
from moefx.analysis.recognition.indexing import FRESH, ZEROS
from moefx.ir import edit
from moefx.ir.names import op_name


def is_nothing(base: Node | None) -> bool:
    """Whether an output is still empty."""
    return base is None or op_name(base) in FRESH


@dataclass(frozen=True)
class Addition:
    """To an output [.., D]; `base` is the output before, None: nothing. terms: (mask of the expert's tokens, its rows).
    dense: the rows are those of all tokens, and count where the mask is set. pairs: the output is [.., K, D], with a
    place for every choice, in which the rows are put. assigns: the rows are put, not added."""

    base: Node | None
    terms: tuple[tuple[Mask, Node], ...]
    dense: bool = False
    pairs: bool = False
    assigns: bool = False


def of(node: Node, facts: dict) -> Addition | None:
    """What `node` adds to an output of what an expert computed."""
    return _of_picked_rows(node, facts) or _of_all_rows(node, facts)


def _of_picked_rows(node: Node, facts: dict) -> Addition | None:
    """An expert's tokens were picked, and its rows are added or put at their places."""
    put = indexing.put(node)
    mask, rest = (None, ()) if put is None else tokens_of(facts, put.indices)
    if mask is None:
        return None
    out, total = put.base, put.rows
    if rest:
        is_pair = len(rest) == 1 and facts.get(rest[0]) == Index(mask, "k") and put.whole is out
        return Addition(out, ((mask, total),), pairs=True) if is_pair and _is_fresh(out) else None
    if put.adds:
        return Addition(out, ((mask, total),))
    is_sum = node.target is operator.setitem and op_name(total) in ("add", "iadd")
    for old, rows in (total.args[:2], total.args[1::-1]) if is_sum else ():
        read = old.args if isinstance(old, Node) and old.target is operator.getitem else (None, None)
        if read[0] is out and tokens_of(facts, read[1]) == (mask, ()):  # a token named twice keeps one of both sums
            return Addition(out, ((mask, rows),)) if names_once(mask, put.indices) else None
    return Addition(out, ((mask, total),), assigns=True) if _may_assign(out, mask) else None


def _of_all_rows(node: Node, facts: dict) -> Addition | None:
    """An expert computed all tokens, and its rows count where it was chosen."""
    chosen = _where_chosen(node, facts)
    if chosen is not None:
        mask, rows, base = chosen
        may = isinstance(base, Node) and _may_assign(base, mask)
        return Addition(base, ((mask, rows),), dense=True) if may else None
    if op_name(node) not in ("add", "add_", "iadd") or len(node.args) != 2 or node.kwargs:
        return None
    terms = [_dense_term(a, facts) for a in node.args]
    found = [term for term in terms if term is not None]
    others = [a for term, a in zip(terms, node.args) if term is None]
    if not found or (others and not isinstance(others[0], Node) and others[0] != 0):
        return None
    base = others[0] if others and isinstance(others[0], Node) else None
    return Addition(base, tuple(found), dense=True)


def _dense_term(term: object, facts: dict) -> tuple[Mask, Node] | None:
    """(mask, rows [T, ..]) of the expert whose rows these are, zero where it was not chosen: by a product with its
    weights, or where(mask, rows, 0)."""
    chosen = _where_chosen(term, facts)
    if chosen is not None:
        mask, rows, other = chosen
        is_zero = op_name(other) in ZEROS if isinstance(other, Node) else other == 0
        return (mask, rows) if is_zero else None
    product = product_of(term)
    if not isinstance(product, Node) or op_name(product) != "mul":
        return None
    for factor in product.args[:2]:
        fact = facts.get(factor)
        if isinstance(fact, Weighed) and fact.is_of_tokens:
            return fact.mask, term
    return None


def product_of(term: object) -> object:
    """The product of rows and weights behind casts and factors that are one number."""
    *_, last = behind_numbers(term)
    return last


def behind_numbers(term: object) -> Iterator[object]:
    """A term, and what it is but for casts and factors that are one number."""
    yield term
    while isinstance(term, Node):
        inputs = term.args[:2] if op_name(term) == "mul" else term.args[1:2] if op_name(term) in _DIVISIONS else ()
        number = next((a for a in inputs if _is_number(a)), None)
        if number is None and op_name(term) not in ("to", "type_as", "float"):
            break
        term = next((a for a in term.args if a is not number), None)
        yield term


_DIVISIONS = ("div", "truediv")


def _is_number(factor: object) -> bool:
    tensor = edit.tensor_value(factor) if isinstance(factor, Node) else None
    return isinstance(factor, (int, float)) or (tensor is not None and tensor.dim() == 0)


def _where_chosen(node: object, facts: dict) -> tuple[Mask, Node, object] | None:
    """(mask of tokens, rows, other) of where(mask, rows, other)."""
    if not isinstance(node, Node) or node.target is not torch.where or len(node.args) != 3:
        return None
    fact = facts.get(node.args[0])
    is_rows = isinstance(fact, Mask) and fact.is_of_tokens and isinstance(node.args[1], Node)
    return (fact, *node.args[1:]) if is_rows else None


def _may_assign(out: Node, mask: Mask | None) -> bool:
    """Whether rows may be assigned where they are otherwise added: every token has one expert, and nothing stands there
    yet. `out` may be what earlier experts were assigned to."""
    return mask is not None and routings.has_single_choice(mask.idx) and _is_fresh(out)


def names_once(mask: Mask, tokens: object) -> bool:
    """Whether an index holds no token twice: a boolean mask cannot, and a token's choices may all differ."""
    index = tokens[0] if isinstance(tokens, tuple) else tokens
    return edit.tensor_value(index).dtype is torch.bool or mask.is_of_tokens or routings.is_distinct(mask.idx)


def _is_assigned(out: Node) -> bool:
    put = indexing.put(out)
    return put is not None and put.whole is out and not put.adds


def _is_fresh(out: Node) -> bool:
    while isinstance(out, Node) and (op_name(out) == "where" or _is_assigned(out)):
        out = out.args[2 if op_name(out) == "where" else 0]
    return is_nothing(out)
