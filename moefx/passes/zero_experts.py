"""Let experts that have no matrices compute all tokens where they are, weighed by zero where they were not chosen.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   a loop over experts, some of which have no parameters or a few vectors (zero-computation experts:
                      LongCat-Flash, arXiv:2509.01322; MoE++, arXiv:2410.07348), is a loop over the others; the rest is
                      added beside it, and its tokens need not travel
    never  touches loops whose experts all have matrices, or where those that have none do not come last

Pseudo-code
    1. loops over experts; which branches read nothing but their tokens, scores, and parameters of a few rows?
    2. those that are one function f: add f(x) * (w * (idx in theirs)).sum(-1) to the output, before the loop or where
       it writes to one tensor behind it; take their additions out of it
    3. compare the sum of both with the original

    out = out.index_add(0, t_e, x[t_e] * w[t_e, k_e, None])  for e = 6, 7
        ->  out = out + x * (w * (idx >= 6)).sum(-1, keepdim=True)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.recognition import additions, choices, loops
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import token_axes
from moefx.analysis.recognition.loops import Loop
from moefx.analysis.recognition.roles import Scores, Shared, Tokens
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import op_name
from moefx.ir.op import numel
from moefx.ir.shapes import sizes


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    facts = choices.facts(gm)
    found = [(loop, free) for loop in loops.find(gm, facts) if (free := list(_free(facts, loop)))]
    raising = Raising(gm, ctx, result)
    for loop, groups in found:
        experts = sorted(e for branches in groups for e in branches.experts)
        others = set(loop.adds) - set(experts)
        if loop.twice is not None or others != set(range(len(others))) or not _may_start_otherwise(loop):
            result.skip(loop.adds[experts[0]], f"experts {experts} have no matrices, but others come after them")
            continue
        number = len(loop.adds)
        with raising.candidate(loop.idx) as check:
            old, total, reads = _rewrite(gm, loop, groups)
            check.sweep()
            check.compare(old, total, loop.idx, reads, number)
            result.changed(f"{old.name}: experts {experts} have no matrices and compute all tokens where they are")
    return result


def _free(facts: dict, loop: Loop) -> Iterator[Branches]:
    """The branches of experts without matrices; of those without parameters, those of one function together."""
    kinds: dict[tuple, list[int]] = {}
    for expert, rows in sorted(loop.rows.items()):
        kinds.setdefault(_shape_of(rows, 3), []).append(expert)
    if loop.how.dense or loop.how.pairs or len(kinds) == 1:
        return
    alone = {e: Branches(facts, [rows], experts=[e]) for e, rows in loop.rows.items()}
    some_have = not all(map(_is_free, alone.values()))  # else what is small is all that there is to spread
    for experts in kinds.values():
        each = [alone[e] for e in experts]
        if not all(map(_is_free, each)):
            continue
        if any(isinstance(role, Shared) for branches in each for role in branches.roles.values()):
            yield from each if some_have else ()
            continue
        try:
            yield Branches(facts, [loop.rows[e] for e in experts], experts=experts)
        except RaiseError:
            continue


def _shape_of(node: Node, depth: int) -> tuple:
    """The ops in front of a node: enough to tell experts that multiply by parameters from those that do not."""
    return (op_name(node), *(_shape_of(n, depth - 1) for n in node.all_input_nodes)) if depth else ()


def _is_free(branches: Branches) -> bool:
    """Whether the one expert of these multiplies its tokens by no matrix."""
    few = _FEW * (numel(branches.rows[0]) / sizes(branches.rows[0])[0])
    return bool(branches.roles) and all(
        _is_of_tokens(role) or (isinstance(role, Shared) and is_weight(node) and numel(node) <= few)
        for node, role in branches.roles.items())  # fmt: skip


_FEW = 4  # rows of a parameter, as wide as a token


def _is_of_tokens(role: object) -> bool:
    return isinstance(role, Tokens) or (isinstance(role, Scores) and not role.dense)


def _may_start_otherwise(loop: Loop) -> bool:
    """Whether what the loop adds to may be another tensor: an output of its own, or one that is not written to."""
    assigns = any(node.target is operator.setitem for node in loop.bases)
    return loop.base is not None and (additions.is_nothing(loop.base) or not assigns)


def _rewrite(gm: GraphModule, loop: Loop, groups: list[Branches]) -> tuple[Node, Node, list[Node]]:
    """(the output before, the output now, what is read of the tokens)."""
    first, last = min(loop.adds.values()), max(loop.adds.values())
    base, in_place = loop.base, last.target is operator.setitem
    roles = [role for branches in groups for role in branches.roles.values() if _is_of_tokens(role)]
    reads = list(dict.fromkeys(role.x if isinstance(role, Tokens) else role.w for role in roles))
    late = [n for n in (*reads, loop.idx) if n > first]
    if late:
        raise RaiseError(f"{late[0].name} is computed inside of a loop over experts", where=edit.place(late[0]),
                         hint="compute hidden states and scores before the loop")  # fmt: skip
    total = base
    with edit.at(last, after=True) if in_place else edit.at(first):
        emit = ragged.Rows(gm, edit.tensor_value(loop.idx).fake_mode, f"{base.name}_free")
        for branches in groups:
            total = emit.emit_call(operator.add, total, _on_all_tokens(emit, loop, branches))
    if in_place:
        edit.rewrite_uses(base, total, after=total)
    else:
        first.replace_input_with(base, total)
    old, end = (base, total) if in_place else (last, last)
    for expert in (e for branches in groups for e in branches.experts):
        node = loop.adds[expert]
        if not in_place:
            end = node.args[0] if node is end else end
            node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return old, end, [*reads, *([] if additions.is_nothing(base) else [base])]


def _on_all_tokens(emit: ragged.Rows, loop: Loop, branches: Branches) -> Node:
    """What a branch computes, of every token, weighed by the sum of the scores of its experts."""
    mask = None
    for first, last in _runs(branches.experts):
        from_first, to_last = emit.emit_call(operator.ge, loop.idx, first), emit.emit_call(operator.le, loop.idx, last)
        mine = emit.emit_call(operator.and_, from_first, to_last)
        mine.meta[choices.APART] = True  # no loop over experts
        mask = mine if mask is None else emit.emit_call(operator.or_, mask, mine)
    new: dict[Node, Node] = {}
    for node in branches.nodes:
        role = branches.roles.get(node)
        if role is None:
            new[node] = emit.copy(node, new)
        elif isinstance(role, Tokens):
            new[node] = role.x
        elif isinstance(role, Shared):
            new[node] = node
        else:
            new[node] = _summed(emit, emit.emit_call(operator.mul, role.read(emit), mask), loop, role.ones)
    out = new[branches.rows[0]]
    if any(isinstance(role, Scores) for role in branches.roles.values()):
        return out
    tokens = 1 if loop.flat else len(token_axes(loop.idx))
    times = emit.method("to", mask, edit.tensor_value(out).dtype)
    return emit.emit_call(operator.mul, out, _summed(emit, times, loop, edit.tensor_value(out).dim() - tokens))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of the numbers that follow one another."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        each = [number for _, number in group]
        yield each[0], each[-1]


def _summed(emit: ragged.Rows, weights: Node, loop: Loop, ones: int) -> Node:
    """The sum over the choices [.., 1, ..], numbered as the output numbers its tokens."""
    total = emit.method("sum", weights, -1)
    total = emit.method("flatten", total) if loop.flat else total
    return emit.with_ones(total, ones)
