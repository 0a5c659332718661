"""Raise loops over experts: each expert picks its tokens, computes, and adds to the output.

Contract
    takes  CAPTURED   canonical
    gives  MOE        the branches of all experts of one routing became one region of grouped ops on stacked parameters
    never  changes the router; a loop whose branches differ in more than their parameters is refused, not guessed

Pseudo-code
    1. facts: which index vectors and boolean masks are the tokens (t) and choices (k) that a routing gives to expert e
    2. find where branches add to an output: index_add(out, 0, tokens_e, y_e), or out[tokens_e] += y_e
    3. per routing and output: every expert exactly once; compare the branch of each expert with that of expert 0 node
       by node; parameters that differ are stacked, everything else must be the same
    4. emit expert 0's branch once: x[tokens] -> dispatch, w[tokens, k] -> dispatch_choices, linear -> grouped_linear,
       other uses of per-expert parameters -> expert_rows

    for e: out.index_add_(0, t_e, f(x[t_e], W_e) * w[t_e, k_e, None])
        ->  out + combine(f(dispatch(x), stack(W)), weights=w)

    Where several routings add to one output in turns (a loop for every choice), each is raised by itself, at the place
    of its last expert. Where every expert computes all tokens, out = out + f(x, W_e) * w_e with w_e zero where e was
    not chosen, or where(chosen_e, f(x, W_e), 0), the same comes out: tensors of all tokens that the experts share are
    dispatched.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Candidate, Raising
from moefx.analysis.recognition import additions, choices, einsums, loops, routings
from moefx.analysis.recognition.facts import Read
from moefx.analysis.recognition.host_numbers import count_picked, drop_idle
from moefx.analysis.recognition.loops import Loop
from moefx.analysis.recognition.merge import Emitter
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.expert_weights import is_weight
from moefx.ir.names import op_name
from moefx.ir.ops.regions import leave_experts
from moefx.ir.writes import storage


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    raising = Raising(gm, ctx, result)
    facts, found = _find(gm, raising)
    if found:
        einsums.by_pairs(gm, is_weight, result)
        facts, found = _find(gm, raising) if result.changes else (facts, found)
    picked = bool(found)
    found, totals = _without_outer_loops(facts, found, ctx, result), set()
    while found := _chosen(raising, facts, found, totals):
        loop, *found = found
        with raising.candidate(loop.idx) as check:
            total, region = _rewrite(gm, facts, loop, ctx, check, found)
            totals.add(total)
            result.changed(f"region {region}: a loop over {len(loop.adds)} experts ({edit.place(loop.adds[0])})")
        if not raising.wants(loop.idx):  # what the others add to was changed, and put back
            found = [each for each in loops.find(gm, facts) if raising.wants(each.idx)]
    for name in count_picked(gm) if picked else ():
        result.changed(f"{name}: picked tokens are counted by their masks")
    drop_idle(gm)
    return result


def _find(gm: GraphModule, raising: Raising) -> tuple[dict, list[Loop]]:
    facts = choices.facts(gm)
    return facts, [loop for loop in loops.find(gm, facts) if raising.wants(loop.idx)]


def _chosen(raising: Raising, facts: dict, found: list[Loop], totals: set[Node]) -> list[Loop]:
    """The loops that can be raised; what stands between the experts of one may be another one, or its total."""
    while True:
        adds = totals.union(*(each.adds.values() for each in found))
        faults = [(loop, fault) for loop in found if (fault := _fault(loop, adds, found, facts)) is not None]
        for loop, fault in faults:
            raising.refuse(loop.idx, fault)
        if all(raising.wants(loop.idx) for loop in found):
            return found
        found = [loop for loop in found if raising.wants(loop.idx)]


def _without_outer_loops(facts: dict, found: list[Loop], ctx: PassContext, result: PassResult) -> list[Loop]:
    """Leaves out the loops over experts that are mixtures themselves."""
    kept = []
    for loop in found:
        inner = {add for other in found if other is not loop for add in other.adds.values()}
        if any(n in inner or n.target is leave_experts for n in _inside_of_one(facts, loop)):
            ctx.decisions.declined.add(loop.idx.name)
            result.skip(loop.idx, "each of its experts is a mixture itself: the experts of those are spread")
        else:
            kept.append(loop)
    return kept


def _inside_of_one(facts: dict, loop: Loop) -> set[Node]:
    """What computes the rows of one expert, and not those of the next one."""

    def picks(node: Node) -> bool:
        mine = (facts.get(i) for i in node.all_input_nodes)
        mine = (getattr(fact, "mask", fact) for fact in mine if not isinstance(fact, Read))
        return any(getattr(fact, "idx", None) is loop.idx for fact in mine)

    one, *others = loop.rows.values()
    if loop.how.dense:
        return edit.ancestors([one]) - edit.ancestors(others[:1]) if others else set()
    return edit.ancestors([one], stop=picks) - edit.ancestors([loop.idx])  # a layer before is inside of none


def _fault(loop: Loop, adds: set[Node], found: list[Loop], facts: dict) -> RaiseError | None:
    """Not every expert adds once, or what some have added is read by anything but the next addition."""
    if loop.twice is not None:
        return RaiseError(f"expert {loop.twice} adds to the output twice", where=edit.place(loop.adds[loop.twice]))
    missing = sorted(set(range(max(loop.adds) + 1)) - set(loop.adds))
    if missing:
        return _missing(loop, missing, found, facts)
    *_, last = loop.adds.values()
    if last.target is operator.setitem and storage(last.args[0]) in map(storage, last.args[0].all_input_nodes):
        return RaiseError("a loop over experts adds to a part of a tensor", where=edit.place(last),
                          hint="add to a tensor of its own, and stack, or join, these; or route the tokens of all "
                          "samples at once: x.view(-1, D)")  # fmt: skip
    reader = next((user for add in loop.adds.values() for user in add.users if add is not last and user not in adds),
                  None)  # fmt: skip
    return None if reader is None else RaiseError(
        f"{op_name(reader)} reads what some experts of a loop have added, before the others do",
        where=edit.place(reader),
        hint="read the output when all experts have added to it",
    )  # fmt: skip


def _missing(loop: Loop, missing: list[int], found: list[Loop], facts: dict) -> RaiseError:
    """Some experts add nothing, add to another output, or add in a way that is not understood."""
    elsewhere = {expert for other in found if other.idx is loop.idx for expert in other.adds}
    readers = loops.readers(facts, loop.idx)
    odd = next((expert for expert in missing if expert in readers.keys() - elsewhere), None)
    where = next(iter(loop.adds.values())) if odd is None else readers[odd]
    if odd is not None:
        what = f"what expert {odd} computes is not added to the output as that of expert {min(loop.adds)} is"
    elif elsewhere.isdisjoint(missing):
        return RaiseError(f"a loop over experts leaves out experts {missing}", where=edit.place(where),
                          hint="visit every expert of the routing")  # fmt: skip
    else:
        what = f"experts {missing} add to another output than expert {min(loop.adds)}"
    return RaiseError(what, where=edit.place(where), hint="add the rows of all experts to one output in the same way: "
                      "out.index_add_(0, tokens, rows)")  # fmt: skip


def _rewrite(gm: GraphModule, facts: dict, loop: Loop, ctx: PassContext, check: Candidate,
             others: list[Loop]) -> tuple[Node, int]:  # fmt: skip
    """(the output now, the number of the region)"""
    experts, last, start = len(loop.adds), max(loop.adds.values()), loop.base
    _step_aside(loop, last, others)
    branches, base = loops.branches(facts, loop), loop.base
    with edit.at(last):
        k = int(edit.tensor_value(loop.idx).shape[-1])
        region = ragged.Region(gm, loop.idx, experts, k, pairs=loop.how.pairs, inside=loops.inside(loop, branches))
        rows = Emitter(region, branches, ctx.autocast).emit()
        like = branches.rows[0] if base is None else base
        combined = region.combine(rows)
        combined = region.as_given(combined, like, loop.flat)
        total = combined = region.cast(combined, edit.tensor_value(like).dtype)
        if not additions.is_nothing(base):
            total = edit.call(gm.graph, operator.add, base, combined, name=f"r{region.number}_out")
            total.meta["val"] = edit.tensor_value(base)
    assigns = last.target is operator.setitem
    out = base if assigns else last
    edit.rewrite_uses(out, total, after=last if assigns else None)
    for other in others:
        other.replace(out, total)
    for add in loop.adds.values():
        if add.target is operator.setitem:
            gm.graph.erase_node(add)
    check.sweep()
    number = region.finish()
    reads = [*region.inputs, *([] if additions.is_nothing(start) else [start])]
    ids = max(experts, routings.number_of_ids(loop.idx) or 0)  # what is chosen beyond the experts goes nowhere
    check.compare(out, total, loop.idx, reads, ids)
    return total, number


def _step_aside(loop: Loop, last: Node, others: list[Loop]) -> None:
    """Where other routings add to the output between this one's experts, only its last expert keeps its place."""
    node = loop.bases[last]
    while node in loop.bases:
        node = loop.bases[node]
    if node is loop.base or last.target is operator.setitem:
        return
    for add in [n for n in loop.bases if n is not last]:
        before = loop.bases[add]
        add.replace_all_uses_with(before)
        for each in (loop, *others):
            each.replace(add, before)
    loop.base = loop.bases[last]
