"""Products in one form: every axis of an einsum has a letter, the result is said, and the weights of experts meet one
operand at a time; batched products add no bias."""

from __future__ import annotations

import string
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassResult
from moefx.ir import edit, ragged
from moefx.ir.names import op_name
from moefx.ir.shapes import Term, einsum_terms, sizes


def spell_out(gm: GraphModule) -> None:
    """einsum("... d, d i", [x, w]) of an x of three axes becomes einsum("ABd,di->ABi", x, w)."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.einsum):
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = list(operands[0])
        if isinstance(equation, str) and all(isinstance(operand, Node) for operand in operands):
            node.args = (_spelled_out(equation.replace(" ", ""), operands), *operands)


def _spelled_out(equation: str, operands: list[Node]) -> str:
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # letters that stand once, behind the axes of "..."
        single = sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        out = ("..." if "." in left else "") + "".join(single)
    covered = [len(sizes(o)) - len(t.replace(".", "")) for t, o in zip(terms, operands) if "." in t]
    free = [c for c in string.ascii_letters if c not in equation][: max(covered, default=0)]

    def letters(term: str, count: int) -> str:
        return term.replace("...", "".join(free[len(free) - count :]))

    spelled = [letters(t, len(sizes(o)) - len(t.replace(".", ""))) for t, o in zip(terms, operands)]
    return f"{','.join(spelled)}->{letters(out, len(free))}"


def by_pairs(gm: GraphModule, is_weight: Callable[[Node], bool], result: PassResult) -> None:
    """einsum("tkh,tkhd,tk->td", x, W[ids], scores) becomes one of x and W[ids], and one of this and the scores."""
    for node in list(gm.graph.nodes):
        terms = _terms(node, is_weight)
        if terms is None:
            continue
        current, *others = terms
        out = node.args[0].split("->")[1]
        with edit.at(node):
            for i, term in enumerate(others):
                kept = {c for later in others[i + 1 :] for c in later.all_letters} | set(out)
                current = _product(gm, current, term, out if term is others[-1] else None, kept)
        node.replace_all_uses_with(current.node)
        gm.graph.erase_node(node)
        result.changed(f"{node.name} is cut into einsums of two operands")


def _terms(node: Node, is_weight: Callable[[Node], bool]) -> list[Term] | None:
    """The operands of an einsum of three or more: what the weights of experts are multiplied by, these weights, and
    the rest. None if the node is none such."""
    known = einsum_terms(node) if op_name(node) == "einsum" else None
    if known is None or len(known[0]) < 3:
        return None
    weights = [term for term in known[0] if is_weight(term.node)]
    others = [term for term in known[0] if term not in weights]
    if not weights or not others:
        return None
    *rest, rows = sorted(others, key=lambda term: len(term.all_letters))
    return [rows, *sorted(weights, key=lambda term: len(term.all_letters)), *rest]


def biases_apart(gm: GraphModule, is_weight: Callable[[Node], bool], result: PassResult) -> None:
    """baddbmm(bias, x, w) of experts' weights becomes bmm(x, w) + bias."""
    for node in list(gm.graph.nodes):
        if op_name(node) != "baddbmm" or len(node.args) != 3 or node.kwargs or not is_weight(node.args[2]):
            continue
        bias, rows, weight = node.args
        with edit.at(node):
            emit = ragged.Rows(gm, edit.tensor_value(rows).fake_mode, "")
            total = emit.emit_call(torch.add, emit.emit_call(torch.bmm, rows, weight), bias)
        node.replace_all_uses_with(total)
        gm.graph.erase_node(node)
        result.changed(f"{node.name} adds its bias after the product")


def _product(gm: GraphModule, a: Term, b: Term, out: str | None, kept: set[str]) -> Term:
    """The einsum of two operands, with the letters `out`, or those to be kept."""
    letters = out if out is not None else "".join(c for c in dict.fromkeys(a.all_letters + b.all_letters) if c in kept)
    emit = ragged.Rows(gm, edit.tensor_value(a.node).fake_mode, "")
    new = emit.emit_call(torch.einsum, f"{a.all_letters},{b.all_letters}->{letters}", a.node, b.node)
    return Term(new, letters, letters)
