"""Write lists of the gates that are not zero, sorted by expert, as a sort of the choices.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   tokens, scores and numbers of rows that came from nonzero(gates), a matrix [T, E] with the scores
                      of the chosen experts, come from the choices [T, K] themselves; no size depends on data for it
    never  touches gates that may be zero or negative where an expert was chosen. Scores that underflow to zero count as
           chosen, which adds nothing to the output

Pseudo-code
    1. gates = zeros.scatter(-1, idx, w), w positive; pairs = nonzero(gates) [T*K, 2]; order: where sort(pairs, 0) has
       the entries of the second column from
    2. pairs[order, 0] -> the token of every sorted pair; the sorted second column -> its expert;
       gather(gates[tokens], 1, experts) -> its score
    3. compare what the tokens' rows are added to with the original

    pairs = nonzero(gates); order = pairs.sort(0)[1][:, 1]; x[pairs[order, 0]]
        ->  order = idx.flatten().argsort(stable); x[order // K]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from moefx.analysis import choices
from moefx.analysis.facts import Scattered
from moefx.analysis.names import arg, op_name
from moefx.analysis.selfcheck import SelfCheck
from moefx.analysis.signs import is_positive
from moefx.ir import edit, ragged
from moefx.ir.infer import update
from moefx.pass_types import PassContext, PassResult

_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range_for_size", "sym_constrain_range")


@dataclass
class _Lists:
    """What was made of one matrix of gates. pairs: nonzero(gates), as often as it was taken."""

    gates: Node
    fact: Scattered
    pairs: set[Node]
    tokens: list[Node] = field(default_factory=list)  # [P]
    experts: list[Node] = field(default_factory=list)  # [P] or [P, 1]
    scores: list[Node] = field(default_factory=list)  # [P, 1]


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    found = list(_find(gm))
    check = SelfCheck(gm, ctx.autocast) if found else None
    for lists in found:
        ends = _ends(lists)
        _rewrite(gm, lists, ctx)
        k = int(edit.tensor_value(lists.fact.idx).shape[-1])
        for end in ends:
            experts = int(edit.tensor_value(lists.gates).shape[-1])
            check.compare(end.name, end, lists.fact.idx, [lists.fact.w], experts, by_token=False)
        result.changed(f"{lists.gates.name}: its nonzero places are the {k} choices of every token, sorted")
    return result


def _find(gm: GraphModule) -> Iterator[_Lists]:
    facts = choices.facts(gm)
    for gates, fact in facts.items():
        if not isinstance(fact, Scattered) or edit.tensor_value(gates).dim() != 2 or not is_positive(fact.w):
            continue
        pairs = {u for u in gates.users if op_name(u) in ("nonzero", "argwhere") and not arg(u, 1, "as_tuple")}
        lists = _Lists(gates, fact, pairs)
        places = set()
        for sort in (u for p in pairs for u in p.users if op_name(u) == "sort" and arg(u, 1, "dim", -1) == 0):
            if arg(sort, 2, "descending", False) or sort.kwargs.get("descending", False):
                continue
            values, indices = ([u for u in sort.users if u.args[1] == i] for i in (0, 1))
            lists.experts += [column for value in values for column in _columns(value, 1)]
            places |= {column for index in indices for column in _columns(index, 1)}
        for p in pairs:
            lists.tokens += [u for u in p.users if u.target is operator.getitem and _is_first_of(u.args[1], places)]
        known = {*lists.tokens, *lists.experts}
        for row in (u for u in gates.users if u.target is operator.getitem and _source(u.args[1]) in lists.tokens):
            lists.scores += [u for u in row.users if op_name(u) == "gather" and arg(u, 1, "dim") == 1
                             and arg(u, 2, "index") in known]  # fmt: skip
        if lists.tokens:
            yield lists


def _columns(node: Node, number: int) -> Iterator[Node]:
    """x[:, number], as [P] or [P, 1]."""
    items = [(slice(None), column) for column in (number, slice(number, number + 1), slice(number, None))]
    for user in node.users:
        by_item = user.target is operator.getitem and user.args[1] in items
        if by_item or (op_name(user) == "select" and user.args[1:] in ((1, number), (-1, number))):
            yield user
        elif op_name(user) in ("split", "unbind", "chunk") and arg(user, 2, "dim", arg(user, 1, "dim")) in (1, -1):
            yield from (u for u in user.users if u.args[1] == number)


def _is_first_of(item: object, places: set[Node]) -> bool:
    """pairs[places, 0]."""
    return isinstance(item, tuple) and len(item) == 2 and item[1] == 0 and _source(item[0]) in places


def _source(index: object) -> object:
    """An index before it was flattened."""
    while isinstance(index, Node) and op_name(index) in ("flatten", "view", "reshape", "squeeze"):
        index = index.args[0]
    return index


def _ends(lists: _Lists) -> list[Node]:
    """Where rows come back to their tokens."""
    return [u for t in lists.tokens for u in t.users if op_name(u) in ("index_add", "index_add_") and u.args[2] is t]


def _rewrite(gm: GraphModule, lists: _Lists, ctx: PassContext) -> None:
    idx, w = lists.fact.idx, lists.fact.w
    listed = edit.descendants(lists.pairs)
    for pairs in lists.pairs:
        _drop_checks(pairs)
    with edit.at(lists.gates, after=True):
        emit = ragged.Rows(gm, edit.tensor_value(idx).fake_mode, lists.gates.name)
        flat = emit.method("reshape", idx, -1)
        order = gm.graph.call_method("argsort", (flat,), {"stable": True})
        emit._fake(order, lambda ids: ids.argsort(stable=True), flat)
        tokens = emit.emit_call(operator.floordiv, order, int(edit.tensor_value(idx).shape[-1]))
        experts = emit.emit_call(operator.getitem, flat, order)
        scores = emit.method("unsqueeze", emit.emit_call(operator.getitem, emit.method("reshape", w, -1), order), -1)
        wide = emit.method("unsqueeze", experts, -1)
    changed = []
    for olds, new in ((lists.tokens, tokens), (lists.scores, scores)):
        for old in olds:
            old.replace_all_uses_with(new)
            changed.append(new)
    for old in lists.experts:
        new = experts if edit.tensor_value(old).dim() == 1 else wide
        old.replace_all_uses_with(new)
        changed.append(new)
    for new in dict.fromkeys(changed):
        update(new, ctx.autocast)
    edit.erase_unused(listed & set(gm.graph.nodes) - edit.ancestors(gm.graph.find_nodes(op="output")))


def _drop_checks(pairs: Node) -> None:
    """Checks of how many pairs there are."""
    sizes = [u for u in pairs.users if edit.tensor_value(u) is None and op_name(u) in ("sym_size", "size")]
    for node in sizes:
        sizes += [u for u in node.users if edit.tensor_value(u) is None and u not in sizes]
    for node in sorted(sizes, reverse=True):
        if op_name(node) in _CHECKS or not node.users:
            node.graph.erase_node(node)
