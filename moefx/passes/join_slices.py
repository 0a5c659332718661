"""Write experts that loop over slices of sorted rows as one function of all rows.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   rows that every expert computed of its own slice come out of grouped ops on all rows and the
                      user's counts, in which raise-grouped sees grouped matmuls; no size of a slice is left
    never  looks at where the rows come from and go to: that is raise-grouped's

Pseudo-code
    1. rows that are cut to the sum of all counts, or filled up to it, stay as they are; which slice of sorted rows is
       expert e's is asked of numbers (slices.py)
    2. find where the slices come together again: cat([y_0, y_1, ..]), or out[start:end] = y_e for every e
    3. compare the experts' branches node by node; emit the first one on all rows, with stacked parameters

    cat([linear(p, w) for p, w in zip(rows.split(counts.tolist()), ws)])  ->  grouped_linear(rows, stack(ws), counts)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Candidate, Raising
from moefx.analysis.recognition import choices, indexing, slices
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import Counts, Flat, OfExpert
from moefx.analysis.recognition.merge import Emitter
from moefx.analysis.recognition.roles import Part
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.infer import update
from moefx.ir.names import arg, op_name


@dataclass(frozen=True)
class _Join:
    """rows: of every expert, in order. ends: the nodes that put them together, the last of them last. whole: what has
    all rows then."""

    ids: Flat
    rows: tuple[Node, ...]
    ends: tuple[Node, ...]
    whole: Node


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    slices.drop_padding(gm)
    known = choices.facts(gm)
    found = slices.facts(gm, known)
    counts = {f.ids: n for n, f in reversed(known.items()) if isinstance(f, Counts) and edit.tensor_value(n).dim() == 1}
    raising = Raising(gm, ctx, result)
    for join in _find(gm, found):
        counted = edit.tensor_value(counts[join.ids]) if join.ids in counts else None
        experts = len(slices.starts_of(gm, join.ids)[0]) - 1 if counted is None else counted.shape[0]
        if not raising.wants(join.ids.of) or len(join.rows) != experts or not all(map(_is_node, join.rows)):
            continue
        with raising.candidate(join.ids.of) as check:
            _rewrite(gm, found, join, counts.get(join.ids), ctx, check)
            result.changed(f"{join.whole.name}: the slices of {len(join.rows)} experts are computed as one")
    _refuse_leftovers(gm, found, raising)
    return result


def _find(gm: GraphModule, found: dict[Node, Any]) -> list[_Join]:
    joins, assigned = [], {}
    for node in gm.graph.nodes:
        fact = found.get(node)
        if op_name(node) in ("cat", "concat", "concatenate") and arg(node, 1, "dim", 0) == 0:
            rows = tuple(arg(node, 0, "tensors"))
            parts = [found.get(n) for n in rows]
            if parts and all(isinstance(p, OfExpert) for p in parts) and len({p.ids for p in parts}) == 1 and (
                    [p.expert for p in parts] == list(range(len(parts)))):  # fmt: skip
                joins.append(_Join(parts[0].ids, rows, (node,), node))
        elif node.target is operator.setitem and isinstance(fact, OfExpert):
            assigned.setdefault((fact.source, fact.ids), {})[fact.expert] = node
    for (base, ids), nodes in assigned.items():
        ends = sorted(nodes.values())
        readers = set(base.users) - set(ends)
        if op_name(base) in indexing.FRESH and all(reader > ends[-1] for reader in readers):
            joins.append(_Join(ids, tuple(nodes[e].args[2] for e in sorted(nodes)), tuple(ends), base))
    return sorted(joins, key=lambda join: join.ends[-1])


def _is_node(rows: object) -> bool:
    return isinstance(rows, Node)


def _rewrite(
    gm: GraphModule, found: dict, join: _Join, counts: Node | None, ctx: PassContext, check: Candidate
) -> None:
    """Put all rows in place of the slices."""
    branches = Branches(found, join.rows)
    sources = [role.x for role in branches.roles.values() if isinstance(role, Part)]
    old = edit.tensor_value(join.whole)
    with edit.at(join.ends[-1]):
        region = ragged.Rows(gm, old.fake_mode, join.whole.name)
        region.like = sources[0]
        counts = slices.counted(region, join.ids, len(join.rows)) if counts is None else counts
        region.counts = counts if edit.tensor_value(counts).dtype == torch.int64 else region.method("long", counts)
        rows = Emitter(region, branches, ctx.autocast).emit()
        rows = region.cast(rows, old.dtype)
    edit.rewrite_uses(join.whole, rows, after=join.ends[-1])
    for node in reversed(join.ends):
        gm.graph.erase_node(node)
    update(rows, ctx.autocast)  # what is computed of them has as many rows
    reads = [x for x in sources if edit.tensor_value(x).dtype.is_floating_point]
    check.compare(join.whole, rows, join.ids.of, dict.fromkeys(reads), len(join.rows), by_token=False)
    check.sweep()


def _refuse_leftovers(gm: GraphModule, found: dict, raising: Raising) -> None:
    """Slices of rows; those of indices are left to loops."""
    known = choices.facts(gm)
    for node in gm.graph.nodes:
        fact = found.get(node)
        if fact is not None and fact.source is not None and node not in known and node.users and (
                raising.wants(fact.ids.of)):  # fmt: skip
            raising.refuse(fact.ids.of, RaiseError(
                "rows are divided among experts by counts on the host, but what is done then is not recognised",
                where=edit.place(node),
                hint="give every expert its slice of the rows, in order, and concatenate what they make of it",
            ))  # fmt: skip
