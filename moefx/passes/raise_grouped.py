"""Raise experts that sort their tokens and multiply by grouped matmuls.

Contract
    takes  CAPTURED   canonical
    gives  MOE        every grouped matmul over a routing became grouped_linear between dispatch and combine, on one
                      stable sort of the routing; the router, and whatever else reads the routing, stays as it is
    never  changes how scores are computed, or a grouped matmul whose rows are not sorted by a routing

Pseudo-code
    1. facts: who is a sort order, a token index, counts, offsets of which routing
    2. for every routing that a grouped matmul uses: emit route; replace x[token_of] by dispatch, scores[perm] by
       dispatch_choices, grouped_mm by grouped_linear, bias[sorted_ids] by expert_rows, un-permute and sum by combine
    3. delimit the expert side; drop what is no longer used

    ids, perm = sort(idx.flatten()); y = grouped_mm(x[perm // k], w, offs)
        ->  perm, counts = route(idx, E); y = grouped_linear(dispatch(x, perm, k), w, counts)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefx.analysis import choices
from moefx.analysis.choices import arg, op_name
from moefx.analysis.facts import Counts, Flat, Inverse, Offsets, Perm, Sorted, TokenOf
from moefx.analysis.selfcheck import SelfCheck
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.pass_types import PassContext, PassResult

_JOINED = torch.ops.moefx.grouped_linear.default  # of slices that join-slices joined
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    facts = choices.facts(gm)
    by_routing: dict[Flat, list[Node]] = {}
    for node in gm.graph.nodes:
        if (op_name(node) not in _GROUPED and node.target is not _JOINED) or node.name in ctx.left:
            continue
        offsets = facts.get(arg(node, 2, "offs"))
        with ctx.raising(node.name):
            if not isinstance(offsets, Counts if node.target is _JOINED else Offsets):
                raise RaiseError(
                    "a grouped matmul whose offsets are not running counts of a routing",
                    where=edit.place(node),
                    hint="sort the rows by expert id and count them per expert",
                )
        by_routing.setdefault(offsets.ids, []).append(node)
    check = SelfCheck(gm, ctx.autocast) if by_routing else None
    for routing, matmuls in by_routing.items():
        if routing.of.name in ctx.left:
            continue
        with ctx.raising(routing.of.name):
            old = _Old(gm, facts, routing, matmuls)
            region = old.rewrite()
            for name, new in old.results.items():
                check.compare(name, new, old.region.given_idx, old.region.inputs, old.experts)
        result.changed(
            f"region {region}: {old.experts} experts, {len(matmuls)} grouped matmuls ({edit.place(matmuls[0])})"
        )
    return result


class _Old:
    """The nodes of one sorted region, by role, and their replacement."""

    def __init__(self, gm: GraphModule, facts: dict, routing: Flat, matmuls: list[Node]) -> None:
        self.gm, self.facts, self.routing, self.matmuls = gm, facts, routing, matmuls
        self.experts = int(edit.tensor_value(arg(matmuls[0], 1, "weight")).shape[0])
        self.k = int(edit.tensor_value(routing.of).shape[-1])
        self.results: dict[str, Node] = {}  # name of what was combined before -> what is combined now

    def rewrite(self) -> int:
        first = min((n for n, f in self.facts.items() if getattr(f, "ids", f) == self.routing), key=self._position)
        with edit.at(first):
            self.region = ragged.Region(self.gm, self.routing.of, self.experts, self.k)
        old = list(self.gm.graph.nodes)
        for node in old:
            self._replace(node)
        edit.erase_unused([n for n in old if n.op != "placeholder" and self._is_ours(n)])
        return self.region.finish()

    def _position(self, node: Node) -> int:
        if not hasattr(self, "_order"):
            self._order = {n: i for i, n in enumerate(self.gm.graph.nodes)}
        return self._order[node]

    def _is_ours(self, node: Node) -> bool:
        fact = self.facts.get(node)
        return getattr(fact, "ids", fact) == self.routing or node in self.replaced or isinstance(fact, tuple)

    @property
    def replaced(self) -> set[Node]:
        return self.region.replaced

    def _fact(self, node: object, kind: type) -> bool:
        fact = self.facts.get(node) if isinstance(node, Node) else None
        return isinstance(fact, kind) and fact.ids == self.routing

    def _replace(self, node: Node) -> None:
        """Put the dialect op in place of `node` if it has a role."""
        name = op_name(node)
        if node.target is _JOINED:
            self._joined(node)
        elif node in self.matmuls:
            self._matmul(node)
        elif node.target is torch.ops.moefx.expert_rows.default and self._fact(node.args[1], Counts):
            with edit.at(node):
                self.region.substitute(node, self.region.expert_rows(node.args[0]))
        elif node.target is operator.getitem and isinstance(node.args[1], Node):
            self._index(node, node.args[0], node.args[1])
        elif name == "index_select" and arg(node, 1, "dim") == 0:
            self._index(node, node.args[0], arg(node, 2, "index"))
        elif name == "sum":
            self._sum(node)
        elif name in ("index_add", "index_add_") and self._fact(arg(node, 2, "index"), TokenOf):
            base, source = node.args[0], arg(node, 3, "source")
            with edit.at(node):
                combined = self.region.combine(source)
                new = edit.call(self.gm.graph, operator.add, base, combined, name=node.name)
            self.results[node.name] = new
            self.region.substitute(node, new)

    def _index(self, node: Node, source: Node, index: Node) -> None:
        with edit.at(node):
            if self._fact(index, TokenOf):
                new = self.region.dispatch(source)
            elif self._fact(index, Perm) and isinstance(self.facts.get(source), Flat):
                new = self.region.dispatch_choices(self.facts[source].of)
            elif self._fact(index, Sorted):
                new = self.region.expert_rows(source)
            else:
                return
        self.region.substitute(node, new)

    def _matmul(self, node: Node) -> None:
        rows, weight = node.args[0], arg(node, 1, "weight")
        transposed = True
        if op_name(weight) in ("transpose", "mT") and _swaps_last(weight):
            weight, transposed = weight.args[0], False
        with edit.at(node):
            new = self.region.linear(rows, weight, transposed)
            bias = arg(node, 3, "bias")
            if bias is not None:
                new = edit.call(self.gm.graph, operator.add, new, self.region.expert_rows(bias))
        self.region.substitute(node, new)

    def _joined(self, node: Node) -> None:
        rows, weight, _, transposed, *bias = node.args
        if node in self.matmuls:
            with edit.at(node):
                new = self.region.linear(rows, weight, transposed, *bias)
            self.region.substitute(node, new)

    def _sum(self, node: Node) -> None:
        """rows[inverse] seen as [T, K, D] and summed over K."""
        view, dim = node.args[0], arg(node, 1, "dim")
        if op_name(view) not in ("view", "reshape", "unflatten") or dim not in (1, (1,), [1]):
            return
        picked = view.args[0]
        if picked.target is not operator.getitem or not self._fact(picked.args[1], Inverse):
            return
        shape = edit.tensor_value(view).shape
        if len(shape) < 3 or shape[1] != self.k or node.kwargs.get("keepdim"):
            raise RaiseError("the experts' rows are not summed over the choices of a token", where=edit.place(node))
        with edit.at(node):
            new = self.region.combine(picked.args[0])
            if node.kwargs.get("dtype") is not None:
                new = self.gm.graph.call_method("to", (new, node.kwargs["dtype"]))
        self.results[node.name] = new
        self.region.substitute(node, new)
        self.replaced.update((view, picked))


def _swaps_last(node: Node) -> bool:
    return op_name(node) == "mT" or {d % 3 for d in node.args[1:3]} == {1, 2}
