"""Raise experts that sort their tokens and multiply by grouped matmuls.

Contract
    takes  CAPTURED   canonical
    gives  MOE        every grouped matmul over a routing became grouped_linear between dispatch and combine, on one
                      stable sort of the routing; the router, and whatever else reads the routing, stays as it is
    never  changes how scores are computed, or a grouped matmul whose rows are not sorted by a routing

Pseudo-code
    1. facts: who is a sort order, a token index, counts, offsets of which routing
    2. per routing, the grouped matmuls whose sorted rows meet: one region
    3. emit route; replace x[token_of] by dispatch, scores[perm] by dispatch_choices, grouped_mm by grouped_linear,
       bias[sorted_ids] by expert_rows, un-permute and sum over the choices by combine. Where user code has a value for
       every pair of a token and a choice, and does more with it than to sum it, the pairs are the region's tokens
    4. delimit the expert side; drop what is no longer used

    ids, perm = sort(idx.flatten()); y = grouped_mm(x[perm // k], w, offs)
        ->  perm, counts = route(idx, E); y = grouped_linear(dispatch(x, perm, k), w, counts)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Candidate, Raising
from moefx.analysis.recognition import choices, indexing
from moefx.analysis.recognition.facts import Counts, Flat, Inverse, Offsets, Perm, Sorted, TokenOf
from moefx.analysis.recognition.pairs import Pairs
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value

_JOINED = torch.ops.moefx.grouped_linear.default  # of slices that join-slices joined
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    raising, facts = Raising(gm, ctx, result), choices.facts(gm)
    by_routing: dict[Flat, list[Node]] = {}
    for node in gm.graph.nodes:
        if not _is_matmul(node):
            continue
        offsets = facts.get(arg(node, 2, "offs"))
        if isinstance(offsets, Counts if node.target is _JOINED else Offsets):
            by_routing.setdefault(offsets.ids, []).append(node)
        else:
            raising.refuse(node, RaiseError(
                "a grouped matmul whose offsets are not running counts of a routing",
                where=edit.place(node),
                hint="sort the rows by expert id and count them per expert",
            ))  # fmt: skip
    for routing, matmuls in by_routing.items():
        if not raising.wants(routing.of):
            continue
        changes = []
        with raising.candidate(routing.of) as check:
            for together in _regions(facts, routing, matmuls):
                old = _Old(gm, facts, routing, together)
                region = old.rewrite(check)
                for was, new in old.results.items():
                    check.compare(was, new, old.region.given_idx, old.inputs, old.experts)
                changes.append(f"region {region}: {old.experts} experts, {len(old.matmuls)} grouped matmuls "
                               f"({edit.place(old.matmuls[0])})")  # fmt: skip
            result.changes += changes
    return result


def _is_matmul(node: Node) -> bool:
    return op_name(node) in _GROUPED or node.target is _JOINED


def _regions(facts: dict, routing: Flat, matmuls: list[Node]) -> list[set[Node]]:
    """Sorted rows and what they are taken from and put to, by what reaches one another in this order."""
    rows = expr(edit.tensor_value(matmuls[0].args[0]).shape[0])
    found: list[set[Node]] = []
    for matmul in matmuls:
        if any(matmul in region for region in found):
            continue
        region, stack = set(), [matmul]
        while stack:
            node = stack.pop()
            if node not in region:
                region.add(node)
                stack.extend(n for n in _neighbours(node, facts, routing) if _has_rows(n, rows))
        found.append(region)
    return found


def _neighbours(node: Node, facts: dict, routing: Flat) -> list[Node]:
    """Inputs and users that stand in sorted order, if this node does or leads there or away."""
    taken, placed = indexing.taken(node), indexing.placed(node)
    if taken is not None and getattr(facts.get(taken[1]), "ids", None) == routing:
        return [taken[0]] if isinstance(facts[taken[1]], Inverse) else list(node.users)
    if placed is not None and getattr(facts.get(placed.index), "ids", None) == routing:
        return [placed.rows]
    return [*node.all_input_nodes, *node.users]


def _has_rows(node: Node, rows: object) -> bool:
    found = value(node)
    if indexing.placed(node) is not None:
        return True
    found = found[0] if isinstance(found, (tuple, list)) and found else found  # as of a chunk
    is_tensor = node.op.startswith("call") and isinstance(found, torch.Tensor) and found.dim() > 0
    return is_tensor and expr(found.shape[0]) == rows


class _Old:
    """The nodes of one sorted region, by role, and their replacement."""

    def __init__(self, gm: GraphModule, facts: dict, routing: Flat, nodes: set[Node]) -> None:
        self.gm, self.facts, self.routing = gm, facts, routing
        self.nodes = nodes
        self.matmuls = [n for n in gm.graph.nodes if n in nodes and _is_matmul(n)]
        self.experts = int(edit.tensor_value(arg(self.matmuls[0], 1, "weight")).shape[0])
        self.k = int(edit.tensor_value(routing.of).shape[-1])
        self.pairs = Pairs(routing.of)
        self.results: dict[Node, Node] = {}  # what was combined before -> what is combined now
        self.inputs: list[Node] = []  # what is dispatched
        self.shaped: dict[Node, Node] = {}  # the same by pair
        self.unsorted = self._find_unsorted()
        self.sums = {n: s for n in gm.graph.nodes if (s := indexing.summed(n, self.k)) and s.pairs in self.unsorted}
        self.by_pair = not all(self._is_summed(n) for n in self.unsorted) or any(map(self._takes_pairs, self.nodes))

    def _find_unsorted(self) -> dict[Node, Node]:
        """{a value per pair, in the order of the pairs: the node that put it there}"""
        found = {}
        for node in self.nodes:
            taken, placed = indexing.taken(node), indexing.placed(node)
            if taken is not None and self._fact(taken[1], Inverse):
                found[node] = node
            elif placed is not None and self._fact(placed.index, Perm) and op_name(placed.base) in indexing.FRESH:
                found[placed.whole] = node
        return found

    def _is_summed(self, node: Node) -> bool:
        """Whether nothing is done with an unsorted value but to sum it over the choices."""
        while node not in self.sums:
            users = [u for u in node.users if u is not self.unsorted.get(node)]
            if len(users) != 1:
                return False
            node = users[0]
        return True

    def _takes_pairs(self, node: Node) -> bool:
        """Whether sorted values are taken of a value per pair that is more than one number, or a token's repeated."""
        taken = indexing.taken(node)
        if taken is None or not self._fact(taken[1], Perm):
            return False
        return not isinstance(self.facts.get(taken[0]), Flat) and self._of_tokens(taken[0]) is None

    def _of_tokens(self, source: Node) -> Node | None:
        """What has every row of these once, if they are those of every token, as often as it has choices."""
        front = self.pairs.front(source)
        return None if front is None else self.pairs.tokens_of(source, front)

    def rewrite(self, check: Candidate) -> int:
        self._set_apart_returned()
        with edit.at(min(n for n, f in self.facts.items() if getattr(f, "ids", f) == self.routing)):
            self.region = ragged.Region(self.gm, self.routing.of, self.experts, 1 if self.by_pair else self.k)
        for node in list(self.gm.graph.nodes):
            if node in self.sums and not self.by_pair:
                self._sum(node, self.sums[node])
            elif node in self.nodes:
                self._replace(node)
        check.sweep()
        return self.region.finish()

    def _set_apart_returned(self) -> None:
        """What the model returns of sorted rows before any product stays as user code computes it."""
        output, copies = self.gm.graph.output_node(), {}
        apart = self.nodes - edit.descendants(self.matmuls)
        with edit.at(output) as graph:
            for node in sorted(apart & edit.ancestors([n for n in output.all_input_nodes if n in apart])):
                copies[node] = edit.valued(graph.node_copy(node, lambda each: copies.get(each, each)))
        for node, copied in copies.items():
            output.replace_input_with(node, copied)

    def _fact(self, node: object, kind: type) -> bool:
        fact = self.facts.get(node) if isinstance(node, Node) else None
        return isinstance(fact, kind) and fact.ids == self.routing

    def _replace(self, node: Node) -> None:
        """Put the dialect op in place of `node` if it has a role."""
        taken, placed = indexing.taken(node), indexing.placed(node)
        if node.target is _JOINED:
            self._joined(node)
        elif node in self.matmuls:
            self._matmul(node)
        elif node.target is torch.ops.moefx.expert_rows.default and self._fact(node.args[1], Counts):
            with edit.at(node):
                self.region.substitute(node, self.region.expert_rows(node.args[0]))
        elif taken is not None:
            self._take(node, *taken)
        elif placed is not None and self._fact(placed.index, TokenOf) and placed.adds:
            with edit.at(node):
                combined = self._by_token(self.region.combine(placed.rows))
                new = edit.call(self.gm.graph, operator.add, placed.base, combined, name=node.name)
            self._result(node, new)
        if self.by_pair and node in self.unsorted.values():
            self._unsort(node)

    def _take(self, node: Node, source: Node, index: Node) -> None:
        with edit.at(node):
            if self._fact(index, TokenOf):
                new = self.region.dispatch(self._by_pair(source, "repeat_interleave", self.k, 0))
            elif self._fact(index, Perm) and isinstance(self.facts.get(source), Flat):
                new = self.region.dispatch_choices(self._by_pair(self.facts[source].of, "reshape", -1, 1))
            elif self._fact(index, Perm):
                new = self.region.dispatch(self._by_pair(source if self.by_pair else self._of_tokens(source)))
            elif self._fact(index, Sorted):
                new = self.region.expert_rows(source)
            else:
                return
        self.region.substitute(node, new)

    def _by_pair(self, source: Node, method: str | None = None, *args: int) -> Node:
        """What is dispatched of `source`: itself, or what makes a value per pair of it where the pairs are tokens."""
        self.inputs.append(source)
        if not self.by_pair or method is None or (method == "repeat_interleave" and self.k == 1):
            return source
        if source not in self.shaped:
            self.shaped[source] = self.region.method(method, source, *args)
        return self.shaped[source]

    def _by_token(self, rows: Node) -> Node:
        """What was combined, summed over the choices if it was not yet."""
        if not self.by_pair or self.k == 1:
            return rows
        shape = edit.tensor_value(rows).shape[1:]
        return self.region.method("sum", self.region.method("view", rows, -1, self.k, *map(int, shape)), 1)

    def _unsort(self, node: Node) -> None:
        whole = next(whole for whole, put in self.unsorted.items() if put is node)
        with edit.at(node):
            new = self.region.combine(_sorted_rows(node))
        if whole is node:
            self._result(node, new)
        else:
            edit.rewrite_uses(whole, new, after=node)
            self.results[whole] = new

    def _result(self, node: Node, new: Node) -> None:
        self.results[node] = new
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
        with edit.at(node):
            new = self.region.linear(rows, weight, transposed, *bias)
        self.region.substitute(node, new)

    def _sum(self, node: Node, found: indexing.Summed) -> None:
        """Values per pair that are summed over the choices."""
        rows = _sorted_rows(self.unsorted[found.pairs])
        with edit.at(node):
            if found.weights is not None:
                self.inputs.append(found.weights)
            new = self.region.combine(self.region.cast(rows, found.dtype), found.weights)
            new = self.region.cast(new, edit.tensor_value(node).dtype)
        self._result(node, new)


def _sorted_rows(put: Node) -> Node:
    """The rows that a node brings back to the order of the pairs."""
    taken = indexing.taken(put)
    return taken[0] if taken is not None else indexing.placed(put).rows


def _swaps_last(node: Node) -> bool:
    return op_name(node) == "mT" or {d % 3 for d in node.args[1:3]} == {1, 2}
