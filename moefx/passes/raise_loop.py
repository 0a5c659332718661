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

    Where every expert computes all tokens, out = out + f(x, W_e) * w_e with w_e zero where e was not chosen, the same
    comes out: tensors of all tokens that the experts share are dispatched.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from moefx.analysis import choices
from moefx.analysis.branches import Branches
from moefx.analysis.choices import arg, op_name
from moefx.analysis.facts import Mask, Weighed, tokens_of
from moefx.analysis.merge import Emitter
from moefx.analysis.selfcheck import SelfCheck
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.pass_types import PassContext, PassResult


@dataclass
class _Loop:
    """The additions of all experts of one routing to one output, in graph order."""

    idx: Node
    base: Node | None  # the output before; None: nothing
    dense: bool = False  # rows of all tokens, times zero where the expert was not chosen
    twice: int | None = None  # an expert that adds more than once
    adds: dict[int, Node] = field(default_factory=dict)  # expert -> node that adds
    rows: dict[int, Node] = field(default_factory=dict)  # expert -> the rows added


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    facts = choices.facts(gm)
    loops = [loop for loop in _find(gm, facts) if loop.idx.name not in ctx.left]
    check = SelfCheck(gm, ctx.autocast) if loops else None
    for loop in loops:
        with ctx.raising(loop.idx.name):
            experts = _check_complete(loop)
            region = _rewrite(gm, facts, loop, experts, ctx, check)
        result.changed(f"region {region}: a loop over {experts} experts ({edit.place(loop.adds[0])})")
    return result


def _find(gm: GraphModule, facts: dict) -> list[_Loop]:
    """Chains of additions: index_add feeds the next one; `out[t] += y` writes to one node again and again."""
    loops: dict[tuple, _Loop] = {}
    head: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        added, dense = _addition(node, facts), False
        if added is None:
            added, dense = _dense_addition(node, facts, head), True
        if added is None:
            continue
        base, *terms = added
        root = head.get(base, base or node)
        head[node] = root
        for mask, rows in terms:
            loop = loops.setdefault((root, mask.idx), _Loop(mask.idx, base, dense))
            if mask.expert in loop.adds:
                loop.twice = mask.expert
            loop.adds[mask.expert], loop.rows[mask.expert] = node, rows
    return list(loops.values())


def _dense_addition(node: Node, facts: dict, head: dict[Node, Node]) -> tuple | None:
    """(output or None, (mask, rows), ..) if `node` adds what an expert computed of all tokens, times its weights."""
    if op_name(node) not in ("add", "add_", "iadd") or len(node.args) != 2 or node.kwargs:
        return None
    terms = [(_dense_mask(a, facts), a) for a in node.args]
    found = [(mask, rows) for mask, rows in terms if mask is not None]
    others = [a for mask, a in terms if mask is None]
    if not found or (others and not isinstance(others[0], Node) and others[0] != 0):
        return None
    base = others[0] if others and isinstance(others[0], Node) else None
    return base, *found


def _dense_mask(rows: object, facts: dict) -> Mask | None:
    """Of which expert these rows [T, ..] are: a product with its weights, which are zero where it was not chosen."""
    while isinstance(rows, Node) and op_name(rows) in ("to", "type_as", "float"):
        rows = rows.args[0]
    if not isinstance(rows, Node) or op_name(rows) != "mul":
        return None
    for factor in rows.args[:2]:
        fact = facts.get(factor)
        if isinstance(fact, Weighed) and fact.dims == ("t",):
            return fact.mask
    return None


def _addition(node: Node, facts: dict) -> tuple[Node, tuple[Mask, Node]] | None:
    """(output, (mask of the expert's tokens, rows)) if `node` adds an expert's rows to an output."""
    name = op_name(node)
    if name in ("index_copy", "index_copy_") and arg(node, 1, "dim") == 0:
        mask = tokens_of(facts.get(arg(node, 2, "index")))
        return (node.args[0], (mask, arg(node, 3, "source"))) if _may_assign(node.args[0], mask) else None
    if name in ("index_put", "index_put_"):
        return _put(node, facts)
    if name in ("index_add", "index_add_") and arg(node, 1, "dim") == 0 and node.kwargs.get("alpha", 1) == 1:
        mask = tokens_of(facts.get(arg(node, 2, "index")))
        return None if mask is None else (node.args[0], (mask, arg(node, 3, "source")))
    if node.target is operator.setitem and isinstance(node.args[1], Node):
        out, tokens, total = node.args
        mask = tokens_of(facts.get(tokens))
        if mask is None or not isinstance(total, Node):
            return None
        for old, rows in (total.args[:2], total.args[1::-1]) if op_name(total) in ("add", "iadd") else ():
            if isinstance(old, Node) and old.target is operator.getitem and old.args == (out, tokens):
                return out, (mask, rows)
        return (out, (mask, total)) if _may_assign(out, mask) else None
    return None


def _may_assign(out: Node, mask: Mask | None) -> bool:
    """Whether rows may be assigned where they are otherwise added: every token has one expert, and nothing stands there
    yet. `out` may be what earlier experts were assigned to."""
    while isinstance(out, Node) and op_name(out) in ("index_copy", "index_copy_", "index_put", "index_put_"):
        out = out.args[0]
    return mask is not None and choices.has_single_choice(mask.idx) and op_name(out) in (*_ZEROS, *_EMPTY)


def _put(node: Node, facts: dict) -> tuple[Node, tuple[Mask, Node]] | None:
    """index_put(out, (tokens,), rows, accumulate)."""
    out, indices, rows = node.args[0], arg(node, 1, "indices"), arg(node, 2, "values")
    mask = tokens_of(facts.get(indices[0])) if isinstance(indices, (tuple, list)) and len(indices) == 1 else None
    adds = arg(node, 3, "accumulate", False) is True
    return (out, (mask, rows)) if mask is not None and (adds or _may_assign(out, mask)) else None


def _check_complete(loop: _Loop) -> int:
    if loop.twice is not None:
        raise RaiseError(f"expert {loop.twice} adds to the output twice", where=edit.place(loop.adds[loop.twice]))
    experts = max(loop.adds) + 1
    missing = sorted(set(range(experts)) - set(loop.adds))
    if missing:
        raise RaiseError(
            f"a loop over experts leaves out experts {missing}",
            where=edit.place(next(iter(loop.adds.values()))),
            hint="visit every expert of the routing",
        )
    return experts


def _rewrite(gm: GraphModule, facts: dict, loop: _Loop, experts: int, ctx: PassContext, check: SelfCheck) -> int:
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    last = max(loop.adds.values(), key=order.__getitem__)
    old = list(gm.graph.nodes)
    branches = Branches(facts, [loop.rows[e] for e in range(experts)], dense=loop.dense)
    base = loop.base
    with edit.at(last):
        region = ragged.Region(gm, loop.idx, experts, int(edit.tensor_value(loop.idx).shape[-1]))
        rows = Emitter(region, branches, ctx.autocast).emit()
        combined = region.combine(rows)
        dtype = edit.tensor_value(branches.rows[0] if base is None else base).dtype
        if edit.tensor_value(combined).dtype != dtype:
            combined = gm.graph.call_method("to", (combined, dtype))
        total = combined
        if not _is_nothing(base):
            total = edit.call(gm.graph, operator.add, base, combined, name=f"r{region.number}_out")
            total.meta["val"] = edit.tensor_value(base)
    name = base.name if last.target is operator.setitem else last.name
    _replace_output(loop, base, last, total, order)
    _erase(old, loop, branches, facts, base)
    number = region.finish()
    check.compare(name, total, region.given_idx, [*region.inputs, *([] if _is_nothing(base) else [base])], experts)
    return number


def _is_nothing(base: Node | None) -> bool:
    return base is None or op_name(base) in (*_ZEROS, *_EMPTY)


def _replace_output(loop: _Loop, base: Node, last: Node, total: Node, order: dict[Node, int]) -> None:
    if last.target is operator.setitem:
        edit.rewrite_uses(base, total, after=last)
    else:
        last.replace_all_uses_with(total)


def _erase(old: list[Node], loop: _Loop, branches: Branches, facts: dict, base: Node | None) -> None:
    """Drop the additions, then the branches and the index vectors that only they used."""
    adds = set(loop.adds.values())
    for node in reversed(old):
        if node in adds:
            node.graph.erase_node(node)
    mine = set(branches.members)
    mine.update(n for n, f in facts.items() if getattr(getattr(f, "mask", f), "idx", None) is loop.idx)
    for node in old:
        if node in adds or node.op in ("placeholder", "output"):
            continue
        inputs = node.all_input_nodes
        derived = bool(inputs) and all(i in mine for i in inputs)  # sizes of index vectors and checks on them
        read_back = node.target is operator.getitem and len(inputs) == 2 and inputs[1] in mine  # out[t]
        total = op_name(node) in ("add", "iadd") and any(i in mine for i in inputs) and not node.users
        if derived or read_back or total:
            mine.add(node)
    for node in reversed(old):
        if node in mine and op_name(node) in _CHECKS:
            node.graph.erase_node(node)
            mine.discard(node)
    if base is not None and _is_nothing(base):
        mine.add(base)
    edit.erase_unused(n for n in mine if n.op != "placeholder" and n not in adds)


_ZEROS, _EMPTY = ("zeros_like", "zeros", "new_zeros"), ("empty_like", "empty", "new_empty")
_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range_for_size", "sym_constrain_range")
