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
    3. a map [E, T] of who chose whom, bool: its nonzero places are such lists by themselves, and so are the numbers of
       the tokens and the gates [E, T] that it selects
    4. compare what the tokens' rows are added to with the original
    5. nonzero(w.flatten()) -> all places, 0 to T*K
    6. before all this: sorts by choice before token become sorts by token (choice_order.py)

    pairs = nonzero(gates); order = pairs.sort(0)[1][:, 1]; x[pairs[order, 0]]
        ->  order = idx.flatten().argsort(stable); x[order // K]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition import choice_order, choices
from moefx.analysis.recognition.facts import Scattered, Tally
from moefx.analysis.recognition.host_numbers import is_number, readers
from moefx.analysis.recognition.signs import is_positive
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit, ragged
from moefx.ir.infer import update
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr


@dataclass
class _Lists:
    """What was made of one matrix of gates, or of a map. pairs: nonzero(gates), as often as it was taken, or the map;
    w: the scores [T, K], None if they are not asked for."""

    gates: Node
    idx: Node
    w: Node | None
    pairs: list[Node]
    tokens: list[Node] = field(default_factory=list)  # [P]
    experts: list[Node] = field(default_factory=list)  # [P] or [P, 1]
    scores: list[Node] = field(default_factory=list)  # [P] or [P, 1]
    sizes: list[Node] = field(default_factory=list)  # P
    other: Node | None = None  # what else was made of the pairs


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for ids, order in choice_order.by_token(gm):
        result.changed(f"{order.name}: the choices of {ids.name} are sorted by token")
    facts = choices.facts(gm)
    found = [*_find(facts), *_find_maps(facts)]
    flat = list(_find_flat(facts))
    raising = Raising(gm, ctx, result)
    for lists in found:
        if lists.other is not None:
            result.skip(lists.gates, f"{lists.other.name} reads its nonzero places in a way that is not recognised")
            continue
        ends = _ends(lists)
        k, experts = (int(edit.tensor_value(node).shape[-1]) for node in (lists.idx, lists.gates))
        with raising.candidate(lists.idx) as check:
            _rewrite(gm, lists, ctx)
            check.sweep()
            for end in ends:
                scores = [] if lists.w is None else [lists.w]
                check.compare(end, end, lists.idx, scores, experts, by_token=False)
            result.changed(f"{lists.gates.name}: its nonzero places are the {k} choices of every token, sorted")
    for scores, places in flat:
        result.changed(f"{places.name}: no score is zero")
        _take_all(gm, scores, places, ctx)
    return result


def _find(facts: dict) -> Iterator[_Lists]:
    for gates, fact in facts.items():
        if not isinstance(fact, Scattered) or edit.tensor_value(gates).dim() != 2 or not is_positive(fact.w):
            continue
        pairs = [u for u in gates.users if op_name(u) in ("nonzero", "argwhere") and not arg(u, 1, "as_tuple")]
        lists = _Lists(gates, fact.idx, fact.w, pairs)
        places = _sorted_places(lists)
        for reader in (u for p in pairs for u in p.users if not _is_ascending_sort(u)):
            if reader.target is operator.getitem and _is_first_of(reader.args[1], places):
                lists.tokens.append(reader)
            else:
                _note_other(lists, reader)
        known = {*lists.tokens, *lists.experts}
        for row in (u for u in gates.users if u.target is operator.getitem and _source(u.args[1]) in lists.tokens):
            lists.scores += [u for u in row.users if op_name(u) == "gather" and arg(u, 1, "dim") == 1
                             and arg(u, 2, "index") in known]  # fmt: skip
        if lists.tokens:
            yield lists


def _find_maps(facts: dict) -> Iterator[_Lists]:
    """Maps [T, E] whose transposes select."""
    for chosen, fact in facts.items():
        found = edit.tensor_value(chosen)
        if not isinstance(fact, Tally) or found.dtype is not torch.bool or edit.tensor_value(fact.ids.of).dim() != 2:
            continue
        for by_expert in (node for node in edit.descendants([chosen]) if _transposed(node) is chosen):
            lists = _Lists(chosen, fact.ids.of, None, [by_expert])
            for reader in by_expert.users:
                _note_selected(lists, reader, by_expert, facts)
            if lists.tokens:
                yield lists


def _find_flat(facts: dict) -> Iterator[tuple[Node, Node]]:
    """All scores, and the nonzero places [P] of all scores [T*K], where nothing but rows of these places is read."""
    scores = {fact.w for fact in facts.values() if isinstance(fact, Scattered) and is_positive(fact.w)}
    by_flat = ((f, n) for w in scores for f in w.users if _is_flat(f) for n in f.users if op_name(n) == "nonzero")
    for flat, found in by_flat:
        split = arg(found, 1, "as_tuple")
        read = [u for u in found.users if not _is_count(u)]
        places = read[0] if len(read) == 1 and (not split or read[0].args[1] == 0) else None
        if places and edit.tensor_value(places).dim() == 1 and all(
            _is_count(u) or _reads_places(u, flat, places) for u in places.users
        ):
            yield flat, places


def _is_count(reader: Node) -> bool:
    """How many places there are."""
    return op_name(reader) in ("sym_size", "size") and is_number(reader) and arg(reader, 1, "dim") == 0


def _reads_places(node: Node, flat: Node, places: Node) -> bool:
    """x[places] of as many rows as scores, or places[order]."""
    if node.target is not operator.getitem or not all(isinstance(a, Node) for a in node.args):
        return False
    of, index = map(edit.tensor_value, node.args)
    if node.args[0] is places:
        return index is not None and not index.dtype.is_floating_point and index.dtype is not torch.bool
    return expr(of.shape[0]) == expr(edit.tensor_value(flat).shape[0])


def _note_selected(lists: _Lists, reader: Node, by_expert: Node, facts: dict) -> None:
    name = op_name(reader)
    selects = name in ("masked_select", "getitem") and arg(reader, 1, "mask") is by_expert
    source = reader.args[0] if selects else None
    gates = facts.get(_transposed(source)) if source is not None else None
    if source is not None and _numbers_tokens(source):
        lists.tokens.append(reader)
    elif isinstance(gates, Scattered) and gates.idx is lists.idx and lists.w in (None, gates.w):
        lists.scores.append(reader)
        lists.w = gates.w
    elif name in ("where", "nonzero") and len(reader.args) == 1 and all(_is_item(u) for u in reader.users):
        lists.experts += [u for u in reader.users if u.args[1] in (0, -2)]
        lists.tokens += [u for u in reader.users if u.args[1] in (1, -1)]
    elif _transposed(reader) is not lists.gates or not _is_same(reader):
        _note_other(lists, reader)


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _is_flat(node: Node) -> bool:
    return op_name(node) in ("flatten", "view", "reshape") and edit.tensor_value(node).dim() == 1


def _is_same(node: Node) -> bool:
    return op_name(node) in ("contiguous", "clone")


def _transposed(node: object) -> Node | None:
    """x [T, E] of a node that is x with the axes exchanged."""
    while isinstance(node, Node) and _is_same(node):
        node = node.args[0]
    if not isinstance(node, Node) or edit.tensor_value(node) is None or edit.tensor_value(node).dim() != 2:
        return None
    name = op_name(node)
    turned = name in ("t", "T", "mT") or (name == "getattr" and node.args[1] in ("T", "mT"))
    turned = turned or (name == "transpose" and set(node.args[1:]) in ({0, 1}, {-2, -1}, {0, -1}, {1, -2}))
    turned = turned or (name == "permute" and node.args[1:] in ((1, 0), ((1, 0),), ([1, 0],)))
    if not turned:
        return None
    source = node.args[0]
    while _is_same(source):
        source = source.args[0]
    return source


def _numbers_tokens(node: Node) -> bool:
    """0, 1, .. along the last of two axes."""
    while (name := op_name(node)) in ("expand", "expand_as", "repeat", "unsqueeze", "broadcast_to", "contiguous"):
        if name == "unsqueeze" and node.args[1] not in (0, -2):
            return False
        node = node.args[0]
    plain = op_name(node) == "arange" and len(node.args) == 1 and "step" not in node.kwargs
    return plain and edit.tensor_value(node).dim() == 1


def _sorted_places(lists: _Lists) -> set[Node]:
    """Where in the list of pairs those sorted by expert come from; notes their experts."""
    places: set[Node] = set()
    for part in (part for p in lists.pairs for u in p.users if _is_ascending_sort(u) for part in u.users):
        columns = list(_columns(lists, part, 1))
        if part.args[1] == 0:
            lists.experts += columns
        else:
            places.update(columns)
    return places


def _is_ascending_sort(node: Node) -> bool:
    return op_name(node) == "sort" and arg(node, 1, "dim", -1) == 0 and not arg(node, 2, "descending", False)


def _columns(lists: _Lists, node: Node, number: int) -> Iterator[Node]:
    """x[:, number], as [P] or [P, 1]. Notes what else is read."""
    items = [(slice(None), column) for column in (number, slice(number, number + 1), slice(number, None))]
    for user in node.users:
        by_item = user.target is operator.getitem and user.args[1] in items
        if by_item or (op_name(user) == "select" and user.args[1:] in ((1, number), (-1, number))):
            yield user
        elif op_name(user) in ("split", "unbind", "chunk") and arg(user, 2, "dim", arg(user, 1, "dim")) in (1, -1):
            yield from (u for u in user.users if u.args[1] == number)
            lists.other = next((u for u in user.users if u.args[1] != number and u.users), lists.other)
        else:
            _note_other(lists, user)


def _note_other(lists: _Lists, reader: Node) -> None:
    """A reader of pairs that is none of the known ones: how many there are may be asked."""
    if _is_count(reader):
        lists.sizes.append(reader)
    elif reader.users:
        lists.other = reader


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
    idx, w = lists.idx, lists.w
    with edit.at(max(n for n in (lists.gates, w) if n is not None), after=True):
        emit = ragged.Rows(gm, edit.tensor_value(idx).fake_mode, lists.gates.name)
        flat = emit.method("reshape", idx, -1)
        order = emit.emit_call(torch.argsort, flat, stable=True)
        tokens = emit.emit_call(operator.floordiv, order, int(edit.tensor_value(idx).shape[-1]))
        experts = emit.emit_call(operator.getitem, flat, order)
        new_of = {id(lists.tokens): tokens, id(lists.experts): experts}
        if lists.scores:
            new_of[id(lists.scores)] = emit.emit_call(operator.getitem, emit.method("reshape", w, -1), order)
        wide_of = {key: emit.method("unsqueeze", new, -1) for key, new in new_of.items()}
    for size in lists.sizes:
        _count(gm, size, order)
    changed = [order] if any(order in size.all_input_nodes for size in lists.sizes) else []
    for olds in (lists.tokens, lists.experts, lists.scores):
        for old in olds:
            new = (new_of if edit.tensor_value(old).dim() == 1 else wide_of)[id(olds)]
            old.replace_all_uses_with(new)
            changed.append(new)
    for new in dict.fromkeys(changed):
        update(new, ctx.autocast)


def _count(gm: GraphModule, size: Node, rows: Node) -> None:
    """Have a number that counts other rows count these; what is only checked about it holds."""
    checks = readers(size)
    for node in checks or ():
        gm.graph.erase_node(node)
    if checks is None:
        size.args, size.kwargs = (rows, 0), {}


def _take_all(gm: GraphModule, flat: Node, places: Node, ctx: PassContext) -> None:
    """Leave out a list of all places of `flat`, in order: x[places] is x, places[order] is order."""
    listed = [places, *places.all_input_nodes]
    for size in [u for n in listed for u in n.users if _is_count(u)]:
        _count(gm, size, flat)
    changed = [flat]
    for reader in [u for u in places.users if u.target is operator.getitem]:
        with edit.at(reader):
            emit = ragged.Rows(gm, edit.tensor_value(reader).fake_mode, reader.name)
            new = emit.method("clone", *(a for a in reader.args if a is not places))
        reader.replace_all_uses_with(new)
        gm.graph.erase_node(reader)
        changed.append(new)
    for new in changed:
        update(new, ctx.autocast)
    edit.erase_unused(edit.descendants([flat]) & {*listed, *(u for n in listed for u in n.users)})
