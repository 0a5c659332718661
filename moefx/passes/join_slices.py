"""Write experts that loop over slices of sorted rows as one function of all rows.

Contract
    takes  CAPTURED   canonical
    gives  CAPTURED   rows that every expert computed of its own slice come out of grouped ops on all rows and the
                      user's counts, in which raise-grouped sees grouped matmuls; no size of a slice is left
    never  looks at where the rows come from and go to: that is raise-grouped's

Pseudo-code
    1. facts: which slice of sorted rows is expert e's, by split(counts) or from offset to offset, which may be searched
       for; rows that are cut to the sum of all counts, or filled up to it, stay as they are
    2. find where the slices come together again: cat([y_0, y_1, ..]), or out[start:end] = y_e for every e, or
       index_add(out, 0, t_e, y_e), where t_e is computed from the expert's slice, too
    3. compare the experts' branches node by node; emit the first one on all rows, with stacked parameters
    4. numbers of rows on the host that are still read: refuse

    cat([linear(p, w) for p, w in zip(rows.split(counts.tolist()), ws)])  ->  grouped_linear(rows, stack(ws), counts)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Candidate, Raising
from moefx.analysis.recognition import choices, indexing, slices, totals
from moefx.analysis.recognition.branches import Branches
from moefx.analysis.recognition.facts import Counts, Flat, OfExpert, Split
from moefx.analysis.recognition.host_numbers import readers
from moefx.analysis.recognition.merge import Emitter
from moefx.analysis.recognition.roles import Part
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import CaptureError, RaiseError
from moefx.ir import edit, ragged
from moefx.ir.infer import update
from moefx.ir.names import arg, op_name


@dataclass(frozen=True)
class _Join:
    """rows: of every expert, in order. ends: the nodes that put them together, the last of them last. whole: what has
    all rows then. places: where in `base` every expert's rows are added, if they are."""

    ids: Flat
    rows: tuple[Node, ...]
    ends: tuple[Node, ...]
    whole: Node
    places: tuple[Node, ...] = ()
    base: Node | None = None


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    known = choices.facts(gm)
    known = choices.facts(gm) if slices.spell_searches(gm, known) else known
    found = slices.facts(list(gm.graph.nodes), known)
    counts = {f.ids: n for n, f in reversed(known.items()) if isinstance(f, Counts) and edit.tensor_value(n).dim() == 1}
    if totals.drop_padding(list(gm.graph.nodes), found, counts):
        found = slices.facts(list(gm.graph.nodes), known)
    raising = Raising(gm, ctx, result)
    for join in _find(gm, found):
        if not raising.wants(join.ids.of) or not _is_whole(join, counts):
            continue
        with raising.candidate(join.ids.of) as check:
            _rewrite(gm, found, join, counts[join.ids], ctx, check)
            result.changed(f"{join.whole.name}: the slices of {len(join.rows)} experts are computed as one")
    _drop_idle_numbers(gm)
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
    return sorted([*joins, *_sums(gm, found)], key=lambda join: join.ends[-1])


def _sums(gm: GraphModule, found: dict[Node, Any]) -> Iterator[_Join]:
    """index_add(index_add(out, 0, t_0, y_0), 0, t_1, y_1) .., where t_e and y_e are of expert e's slice."""
    chains: dict[Node, dict[OfExpert, Node]] = {}  # by the last addition
    for node in gm.graph.nodes:
        if op_name(node) not in ("index_add", "index_add_") or arg(node, 1, "dim") != 0 or node.kwargs:
            continue
        out, _, *pair = node.args
        mine = {replace(found[n], source=None) for n in pair if isinstance(found.get(n), OfExpert)}
        if len(mine) != 1 or not all(n in found for n in pair):
            continue
        chain, fact = chains.pop(out, {}) if list(out.users) == [node] else {}, mine.pop()
        if fact not in chain:  # an expert that adds twice is left alone
            chains[node] = {**chain, fact: node}
    for last, chain in chains.items():
        nodes = [node for _, node in sorted(chain.items(), key=lambda item: item[0].expert)]
        if [fact.expert for fact in sorted(chain, key=lambda fact: fact.expert)] == list(range(len(chain))):
            places, rows = zip(*(node.args[2:] for node in nodes))
            ends = tuple(chain.values())
            yield _Join(next(iter(chain)).ids, rows, ends, last, places, ends[0].args[0])


def _is_whole(join: _Join, counts: dict[Flat, Node]) -> bool:
    """Whether all experts that are counted have their slice."""
    of_all = join.ids in counts and edit.tensor_value(counts[join.ids]).shape[0] == len(join.rows)
    return of_all and all(isinstance(n, Node) for n in join.rows)


def _rewrite(gm: GraphModule, found: dict, join: _Join, counts: Node, ctx: PassContext, check: Candidate) -> None:
    """Put all rows in place of the slices."""
    branches = Branches(found, join.rows)
    sources = [role.x for role in branches.roles.values() if isinstance(role, Part)]
    old = edit.tensor_value(join.whole)
    with edit.at(join.ends[-1]):
        region = ragged.Rows(gm, old.fake_mode, join.whole.name)
        region.like = sources[0]
        region.counts = counts if edit.tensor_value(counts).dtype == torch.int64 else region.method("long", counts)
        rows = Emitter(region, branches, ctx.autocast).emit()
        if join.base is not None:
            places = Emitter(region, Branches(found, join.places), ctx.autocast).emit()
            rows = region.method("index_add", join.base, 0, places, rows)
        rows = region.cast(rows, old.dtype)
    edit.rewrite_uses(join.whole, rows, after=join.ends[-1])
    for node in reversed(join.ends):
        gm.graph.erase_node(node)
    update(rows, ctx.autocast)  # what is computed of them has as many rows
    reads = [x for x in sources if edit.tensor_value(x).dtype.is_floating_point]
    check.compare(join.whole, rows, join.ids.of, dict.fromkeys(reads), len(join.rows), by_token=False)
    check.sweep()


def _drop_idle_numbers(gm: GraphModule) -> None:
    """Numbers on the host that only conditions have read, which capture decided: `if counts[e] == 0: continue`."""
    for node in [n for n in gm.graph.nodes if op_name(n) == "tolist"]:
        for each in (*found, node) if (found := readers(node)) is not None else ():
            gm.graph.erase_node(each)


def _refuse_leftovers(gm: GraphModule, found: dict, raising: Raising) -> None:
    for node in gm.graph.nodes:
        fact = found.get(node)
        is_slice = isinstance(fact, Split) or (isinstance(fact, OfExpert) and fact.source is not None)
        if is_slice and node.users and raising.wants(fact.ids.of):
            raising.refuse(fact.ids.of, RaiseError(
                "rows are divided among experts by counts on the host, but what is done then is not recognised",
                where=edit.place(node),
                hint="give every expert its slice of the rows, in order, and concatenate what they make of it",
            ))  # fmt: skip
    for node in gm.graph.nodes:
        if op_name(node) == "tolist" and not (node in found and not raising.wants(found[node].ids.of)):
            raise CaptureError(
                f"the numbers of `{node.name}` are not known before the model runs",
                where=edit.place(node),
                hint="use numbers from .tolist() only to split tokens by the counts of a routing; or loop over all "
                "experts, or sort and use grouped_mm",
            )
