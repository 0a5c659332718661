"""Write masks of tokens that come of no routing, one for each expert, as a routing.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   experts that pick their tokens by masks of any origin (a threshold, a top-p, a capacity, padding)
                      pick them by the ids of a routing that names nobody where no mask is set
    never  touches masks that a routing is known of, or those of branches that are not one function

Pseudo-code
    1. (idx == e) & z, with one z for all experts: the routing is where(z, idx, nobody)
    2. any other masks m_e [..] whose rows f(x[m_e], W_e) are added to one output: the routing [.., E] has e in column e
       where m_e is set. Where rows are assigned, the last expert that wrote a token keeps it: one choice
    3. numbers y_e [..] that only expert e reads, at its tokens, become columns of one tensor; every m_e becomes
       (ids == e).any(-1), and ops move up to the first use of a mask if the routing needs them
    4. compare the output with the original

    Before: rows that are cut, or put at once, get an index for each piece (row_pieces.py); indices of any origin become
    the places of masks (places.py). Rows that are put into zeros, which then are added to a sum, are added to the sum.

    for e: t = (p[:, e] > 0.3).nonzero(); out.index_add_(0, t, f(x[t], W_e) * p[t, e])
        ->  ids = where(stack([p[:, e] > 0.3]), arange(E), E)
            for e: t = (ids == e).any(-1).nonzero(); out.index_add_(0, t, f(x[t], W_e) * p[ids == e])
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.checking.raising import Raising
from moefx.analysis.checking.selfcheck import SelfCheck
from moefx.analysis.recognition import choices, index_forms, loops, places, routings, row_pieces
from moefx.analysis.recognition.facts import Flat, Index, Mask, tokens_of
from moefx.analysis.recognition.puts import add_without_zeros, put_into_zeros
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.mark import Mark
from moefx.ir.names import arg, op_name
from moefx.ir.op import numel
from moefx.ir.randomness import first_draw, is_random
from moefx.ir.writes import storage, writes, written_after_reads


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if (cut := row_pieces.cut_indices(gm)) > 0:
        result.changed(f"{cut} indices are cut instead of the rows that they take")
    if (found := places.as_masks(gm)) > 0:
        result.changed(f"{found} indices of rows are places of masks")
    if (puts := put_into_zeros(gm)) > 0:
        result.changed(f"{puts} tensors are not written to, but chosen from")
    _narrow_routings(gm, result)
    _as_masks(gm)
    for total in add_without_zeros(gm):
        result.changed(f"{total.name} adds rows, not zeros that hold them")
    raising, tried = Raising(gm, ctx, result), set()
    while (chain := next((c for c in _chains(gm) if c.end not in tried), None)) is not None:
        tried.add(chain.end)
        with raising.candidate(chain.masks[0], doubtful=True) as check:
            ids = _number(gm, chain, check)
            ctx.decisions.tentative.add(ids.name)
            result.changed(f"{chain.end.name}: {len(chain.masks)} masks are those of a routing")
    return result


# ---- one mask for all experts

_BOTH = ("and", "and_", "logical_and", "bitwise_and", "mul")  # not zero where both are not zero


def _narrow_routings(gm: GraphModule, result: PassResult) -> None:
    facts, changing = choices.facts(gm), written_after_reads(gm)
    found: dict[tuple[Node, Node], list[tuple[Node, Mask]]] = {}
    for node in gm.graph.nodes:
        if op_name(node) not in _BOTH or len(node.args) != 2 or not _is_mask(node) or storage(node) in changing:
            continue
        for mine, other in (node.args, node.args[::-1]):
            fact = facts.get(mine)
            if not isinstance(fact, Mask) or not _is_mask(other) or _is_known(other, facts):
                continue
            fits = (fact.is_of_pairs or (fact.is_of_tokens and not fact.is_flat)) and _dims(other) == _dims(mine)
            if fits and storage(other) not in changing:
                found.setdefault((fact.idx, other), []).append((node, fact))
    for (idx, other), reads in found.items():
        if len({fact.expert for _, fact in reads}) < 2 or len({fact.dims for _, fact in reads}) > 1:
            continue
        experts = max(fact.expert for _, fact in reads) + 1
        nobody = max(experts, routings.number_of_ids(idx) or 0)
        with edit.at(reads[0][0]):
            emit = ragged.Rows(gm, edit.tensor_value(idx).fake_mode, "")
            by_pair = other if reads[0][1].is_of_pairs else emit.method("unsqueeze", other, -1)
            narrowed = emit.emit_call(torch.where, by_pair, idx, nobody)
        for node, fact in reads:
            with edit.at(node):
                new = emit.emit_call(operator.eq, narrowed, fact.expert)
                new = new if fact.is_of_pairs else emit.method("any", new, -1)
            node.replace_all_uses_with(new)
            edit.erase_unused([node, *node.all_input_nodes])
        result.changed(f"{narrowed.name}: what {other.name} masks chooses nobody")


def _is_mask(node: object) -> bool:
    found = edit.tensor_value(node)
    return found is not None and found.dtype is torch.bool


def _is_known(node: Node, facts: dict) -> bool:
    """Whether a routing is known of it; that it was flattened says nothing."""
    return not isinstance(facts.get(node, Flat(node)), Flat)


def _dims(node: Node) -> int:
    return edit.tensor_value(node).dim()


# ---- a mask for every expert


def _as_masks(gm: GraphModule) -> None:
    facts = choices.facts(gm)
    for node in list(gm.graph.nodes):
        picked = _picks_by(node) if op_name(node) in ("where", "nonzero", "argwhere") else None
        if isinstance(picked, Node) and not _is_known(picked, facts) and _dims(picked) > 0:
            index_forms.of_tokens(gm, node)
    index_forms.columns(gm)
    index_forms.shorten(gm)


@dataclass
class _Chain:
    """What is added to one output by masks. masks: in the order of the additions; end: where the output is to be read
    in the end. assigns: rows are put, not added."""

    end: Node
    masks: list[Node] = field(default_factory=list)
    assigns: bool = False


@dataclass(frozen=True)
class _Number:
    """A read of one number per token, at the tokens of an expert. y: [..] or [.., 1], or with a `column` [.., C]."""

    node: Node
    y: Node
    column: int | None

    @property
    def is_wide(self) -> bool:
        return _dims(self.node) == 2


def _chains(gm: GraphModule) -> list[_Chain]:
    """Outputs to which at least two masks add. To see them, each mask becomes that of a routing for a while."""
    facts = choices.facts(gm)
    readers = _readers(gm, facts)
    known = {facts[mask]: mask for mask in readers if _is_known(mask, facts)}
    if len(known) == len(readers):
        return []
    mark = Mark(gm)
    masks: dict[Node, Node] = {}  # routing of one expert -> mask
    for mask, users in readers.items():
        with edit.at(mask, after=True):
            emit = ragged.Rows(gm, edit.tensor_value(mask).fake_mode, "")
            ids = emit.emit_call(torch.where, emit.method("unsqueeze", mask, -1), 0, 1)
            hit = emit.method("any", emit.emit_call(operator.eq, ids, 0), -1)
        masks[ids] = mask
        for user in users:
            user.replace_input_with(mask, hit)
    found: dict[Node, _Chain] = {}
    for root, node, added in loops.chained(gm, choices.facts(gm)):
        for term, _ in added.terms:
            mask = masks.get(term.idx, known.get(term))
            if mask is not None and not added.pairs:
                chain = found.setdefault(root, _Chain(root))
                chain.masks.append(mask)
                chain.assigns |= added.assigns
                if node.target is not operator.setitem:
                    chain.end = node
    mark.put_back()
    return [chain for chain in found.values() if len(set(chain.masks)) == len(chain.masks) > 1
            and not all(_is_known(mask, facts) for mask in chain.masks)]  # fmt: skip


def _readers(gm: GraphModule, facts: dict) -> dict[Node, list[Node]]:
    """The masks that pick or place rows and that no routing is known of, and what reads them so. Nor is one known that
    gives rows of some experts alone: the others' capacities were exceeded."""
    found: dict[Node, list[Node]] = {}
    partly = {each.idx for each in loops.find(gm, facts) if len(each.adds) < (routings.number_of_ids(each.idx) or 0)}
    for node in gm.graph.nodes:
        mask = _picks_by(node)
        if not _is_mask(mask) or not _dims(mask):
            continue
        if not _is_known(mask, facts) or getattr(facts[mask], "idx", None) in partly:
            found.setdefault(mask, []).append(node)
    return found


def _picks_by(node: Node) -> object:
    name = op_name(node)
    if name in ("nonzero", "argwhere") or (name == "where" and len(node.args) == 1):
        return node.args[0]
    if node.target in (operator.getitem, operator.setitem):
        return node.args[1][0] if isinstance(node.args[1], tuple) and node.args[1] else node.args[1]
    if name in ("index_put", "index_put_"):
        indices = arg(node, 1, "indices")
        return indices[0] if indices else None
    return None


def _number(gm: GraphModule, chain: _Chain, check: SelfCheck) -> Node:
    """Rewrite; the ids of the routing."""
    masks = chain.masks
    if len({index_forms.sizes(mask) for mask in masks}) > 1:
        raise RaiseError("the masks of an output number the tokens differently")
    facts = choices.facts(gm)
    readers = list(map(_readers(gm, facts).__getitem__, masks))
    wide = choices.origin(gm, masks)
    _check_earlier(gm, masks, readers)
    ids, pairs, emit = _routing(gm, masks, chain.assigns, wide)
    for mask, pair, users in zip(masks, pairs, readers):
        with edit.at(pair, after=True):
            hit = emit.method("any", pair, -1)
        for user in users:
            user.replace_input_with(mask, hit)
    edit.move_in_order(gm)
    numbers = _numbers(gm, ids, len(masks))
    reads = [number.y for of_one in numbers for number in of_one]
    _check_earlier(gm, reads, readers)
    for of_one in numbers:
        _join(gm, of_one, ids, pairs, emit)
    edit.move_in_order(gm)
    loops.check_experts(gm, choices.facts(gm), ids, len(masks))
    parts = None if wide is None else (wide, masks)
    inputs = {n for n in (*masks, *reads, *(() if wide is None else (wide,))) if n.op != "placeholder"}
    check.compare(chain.end, chain.end, None, sorted(inputs), len(masks), by_token=False, parts=parts)
    return ids


def _routing(gm: GraphModule, masks: list[Node], assigns: bool,
             wide: Node | None) -> tuple[Node, list[Node], ragged.Rows]:  # fmt: skip
    """(ids [.., K], for every expert where they name it, emitter). wide: a routing of which the masks are a part."""
    experts, last = len(masks), max(masks, key=list(gm.graph.nodes).index)
    with edit.at(last, after=True):
        emit = ragged.Rows(gm, edit.tensor_value(last).fake_mode, "")
        stacked, every = emit.stacked(masks), range(experts)
        device = edit.tensor_value(last).device
        if wide is not None and numel(wide) != numel(last) and not assigns:
            chosen = emit.method("clamp", wide, 0, experts - 1)
            kept = emit.emit_call(operator.and_, emit.method("gather", stacked, -1, chosen),
                                  emit.emit_call(operator.eq, chosen, wide))  # fmt: skip
            ids = emit.emit_call(torch.where, kept, wide, max(experts, routings.number_of_ids(wide) or 0))
        elif wide is not None or assigns:  # where tokens are assigned, the last expert's row stands
            ranks = emit.emit_call(operator.mul, stacked, emit.emit_call(torch.arange, 1, experts + 1, device=device))
            ids = emit.emit_call(torch.where, emit.method("any", stacked, -1, True),
                                 emit.method("argmax", ranks, -1, True), experts)  # fmt: skip
        else:
            ids = emit.emit_call(torch.where, stacked, emit.emit_call(torch.arange, experts, device=device), experts)
        return ids, [emit.emit_call(operator.eq, ids, e) for e in every], emit


def _numbers(gm: GraphModule, ids: Node, experts: int) -> list[tuple[_Number, ...]]:
    """Numbers that every expert reads of a tensor, or of a column, of its own."""
    facts = choices.facts(gm)
    of: dict[int, list[_Number]] = {e: [] for e in range(experts)}
    for node in gm.graph.nodes:
        if node.target is operator.getitem:
            y, item = node.args
        elif op_name(node) == "index_select" and arg(node, 1, "dim") == 0:
            y, item = node.args[0], arg(node, 2, "index")
        else:
            continue
        mask, rest = tokens_of(facts, item)
        found = edit.tensor_value(y)
        if mask is None or mask.idx is not ids or not found.dtype.is_floating_point or isinstance(facts.get(y), Index):
            continue
        front, rest = len(mask.token_axes), [i for i in rest if i is not None]
        is_number = found.dim() == front or (found.dim() == front + 1 and found.shape[-1] == 1)
        by_column = len(rest) == 1 and type(rest[0]) is int and found.dim() == front + 1
        if _dims(node) <= 2 and (by_column or (not rest and is_number)):
            of[mask.expert].append(_Number(node, y, rest[0] if by_column else None))
    if len({len(each) for each in of.values()}) > 1:
        return []
    return [each for each in zip(*of.values()) if len({(n.y, n.column) for n in each}) > 1]


def _check_earlier(gm: GraphModule, needed: list[Node], readers: list[list[Node]]) -> None:
    """What the routing needs may stand behind the first use of a mask. Raises RaiseError if it cannot be computed
    before."""
    changing = written_after_reads(gm)
    users = [user for of_one in readers for user in of_one]
    start, picked = min(users), edit.descendants(users)
    moved = [node for node in edit.ancestors(needed) if node >= start]
    for node in moved:
        if node in picked:
            raise RaiseError("what experts compute decides about the tokens of others")
        if writes(node) or any(storage(n) in changing for n in (node, *node.all_input_nodes)):
            raise RaiseError("a mask comes from a tensor that is written to in between")
    last = max((node for node in moved if is_random(node)), default=start)
    if first_draw(node for node in gm.graph.nodes if start < node < last and node not in moved) is not None:
        raise RaiseError("a mask comes from random numbers that are drawn between those of experts")


def _join(gm: GraphModule, numbers: tuple[_Number, ...], ids: Node, pairs: list[Node], emit: ragged.Rows) -> None:
    """Reads of numbers of every expert become reads of one tensor with as many entries as the routing."""
    first, experts = numbers[0], len(numbers)
    whole = [(n.y, n.column) for n in numbers] == [(first.y, e) for e in range(experts)]
    with edit.at(pairs[-1], after=True):
        if whole and edit.tensor_value(first.y).shape[-1] == experts:
            joined = first.y
        else:
            joined = emit.stacked([_of_tokens(emit, n, _dims(ids) - 1) for n in numbers])
        if op_name(ids.args[1]) != "arange":  # not a column for every expert
            joined = emit.method("gather", joined, -1, emit.method("clamp", ids, 0, experts - 1))
    for pair, number in zip(pairs, numbers):
        old = edit.tensor_value(number.node)
        with edit.at(number.node):
            new = edit.call(gm.graph, operator.getitem, joined, pair)
            with compat.faking(old.fake_mode):
                new.meta["val"] = old.squeeze(-1) if number.is_wide else old
            new = emit.method("unsqueeze", new, -1) if number.is_wide else new
        number.node.replace_all_uses_with(new)
        gm.graph.erase_node(number.node)


def _of_tokens(emit: ragged.Rows, number: _Number, front: int) -> Node:
    """[..]"""
    if number.column is not None:
        return emit.method("select", number.y, -1, number.column)
    return number.y if _dims(number.y) == front else emit.method("squeeze", number.y, -1)
