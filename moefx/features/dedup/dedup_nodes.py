"""Let a token that goes to several experts of one node cross to it once.

Contract
    takes  MOE   regions between enter_experts and leave_experts; of experts that are cut, those of the schedule "s3"
    gives  MOE   the same regions on what arrived at nodes: rows cross between enter_node and leave_node
    never  changes numbers by more than the order of sums; it runs only where "dedup" is the all-to-all

Pseudo-code
    route tokens to the nodes of their experts, each node once; they take their ids and weights along
    there, route by these ids: what the region was, of the choices on this node
    add up the rows that came back from the nodes of a token

    y = combine(leave(experts(enter(dispatch(x, perm)))), perm, weights)
        ->  x', ids, weights' = enter_node(dispatch(x, nodes)), ..
            y = combine(leave_node(combine(leave(experts(enter(dispatch(x', route(ids))))), .., weights')), nodes)
Source: DeepSeek-V3, section 3.2.2, sends a token to a node once; here it comes back once, too, as the sum of its rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.region_rows import RegionRows, TokenRows, rows_of
from moefx.context.pass_types import PassContext, PassResult
from moefx.features.dedup.ops import enter_node, leave_node
from moefx.features.dedup.options import DEDUP
from moefx.ir import edit
from moefx.ir.op import argument, lookup
from moefx.ir.ops.regions import enter_experts
from moefx.ir.writes import is_written

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    for number in sorted({enter.args[-1] for enter in enters}):
        is_asked = ctx.choice(number).alltoall == DEDUP
        if not is_asked and not ctx.decisions.whole:
            continue
        rows = rows_of(gm, number)
        reason = _reason(number, rows, ctx)
        if not is_asked:  # the planner wants to know whether they could
            ctx.decisions.nestable.setdefault(DEDUP, set()).update({number} if reason is None else ())
            continue
        parts = ctx.tokens_over(number)
        if reason is None and parts and ctx.split(number) != "s3":
            reason = f"experts are cut over '{parts}', and rows are gathered there by the split 's3'"
        if reason is not None:
            result.skip(rows.enters[0], f"'{DEDUP}' is no better than 'direct': {reason}")
            continue
        n, m = ctx.mesh.nodes_of("ep")
        _Nested(gm, number, rows, n // m, partial(ctx.name_in, number)).rewrite()
        result.changed(f"region {number} sends a token once to each of {n // m} nodes")
    return result


def _reason(number: int, rows: RegionRows, ctx: PassContext) -> str | None:
    """Why a region's tokens could not cross once, by whatever schedule."""
    parts = ctx.tokens_over(number)
    if parts and len(set(ctx.mesh.nodes_of(parts))) > 1:
        return f"the ranks of '{parts}', which have parts of the same experts, are on several nodes"
    to = "ep+esp" if parts == ctx.mesh.axis("esp") != "" else f"ep+{parts}" if parts else "ep"
    reason = ctx.mesh.why_no_nodes(to if ctx.r(number) else "")
    if reason is not None:
        return reason
    if not isinstance(rows, TokenRows):
        return "static blocks have a place for every choice"
    route = rows.enters[0].args[1].args[0]
    if edit.tensor_value(route.args[0]).shape[1] == 1:
        return "a token has one expert"
    if route.args[1] % ctx.mesh.size("ep"):
        return "experts do not divide over the ranks"
    if ctx.options.placement.policy:
        return "experts may be on several nodes"
    reason = rows.find()
    if reason is None and any(node.target is not _ops.combine.default for node in rows.results):
        return "choices leave it one by one"
    return reason


class _Nested:
    """there: {(what stands for every token, whether it weighs choices): what came of it to a node}."""

    def __init__(self, gm: GraphModule, number: int, rows: TokenRows, nodes: int, named: Callable[[str], str]) -> None:
        self.gm, self.number, self.rows, self.nodes, self.named = gm, number, rows, nodes, named
        self.there: dict[tuple[Node, bool], Node] = {}

    def rewrite(self) -> None:
        route = self.rows.route
        idx, slots = route.args[:2]
        self.width = min(edit.tensor_value(idx).shape[1], self.nodes)
        with edit.at(route):
            routed = self._call(_ops.route_nodes.default, idx, slots, self.nodes, name=self.named("nodes"))
            self.perm = self._call(operator.getitem, routed, 0, name=self.named("node_perm"))
            self._call(operator.getitem, routed, 1, name=self.named("node_counts"))
            ids = self._call(_ops.dispatch_ids.default, idx, self.perm, slots, self.nodes, name=self.named("node_ids"))
            self.elsewhere = self._call(operator.lt, ids, 0, name=self.named("elsewhere"))
            self.ids = self._enter(ids)
        for node in self.rows.inner:
            self._read_there(node)
        for node in self.rows.results:
            self._come_back(node)
        edit.erase_unused(self.rows.dead)
        edit.move_in_order(self.gm)

    def _read_there(self, node: Node) -> None:
        """Let a node of the region read what came with the rows."""
        if node is self.rows.route:
            node.args = (self.ids, *node.args[1:])
            return
        for given in self.rows.arguments(node):
            node.replace_input_with(given, self._arrived(node, given, not lookup(node).tokens.moves))

    def _arrived(self, node: Node, given: Node, is_weight: bool) -> Node:
        """What weighs choices is zero for those of other nodes, whose rows are nobody's."""
        if (given, is_weight) not in self.there or is_written(given):
            with edit.at(node) as graph:
                sent = self._call(_ops.dispatch.default, given, self.perm, self.width, name=f"{given.name}_sent")
                if is_weight:
                    masked = sent, self.elsewhere, 0
                    sent = graph.create_node("call_method", "masked_fill", masked, name=f"{given.name}_masked")
                self.there[given, is_weight] = self._enter(sent)
        return self.there[given, is_weight]

    def _come_back(self, combine: Node) -> None:
        if argument(combine, "weights") is None:
            self._drop_rows(combine)
        with edit.at(combine, after=True):
            back = self._call(leave_node, combine, self.perm, self.number, name=f"{combine.name}_back")
            whole = self._call(_ops.combine.default, back, self.perm, self.width, name=f"{combine.name}_all")
        whole.meta["val"] = edit.tensor_value(combine)
        combine.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not back)

    def _drop_rows(self, combine: Node) -> None:
        """Without weights rows of other nodes' experts have to be zero, whatever was computed of nothing."""
        rows, perm = combine.args[:2]
        shape = (-1, *[1] * (edit.tensor_value(rows).dim() - 1))
        with edit.at(combine) as graph:
            elsewhere = self._call(operator.lt, self.ids, 0, name=self.named("dropped"))
            elsewhere = self._call(_ops.dispatch_choices.default, elsewhere, perm, name=self.named("dropped_pairs"))
            dropped = graph.call_method("view", (elsewhere, shape))
            combine.args = (graph.call_method("masked_fill", (rows, dropped, 0)), *combine.args[1:])

    def _enter(self, x: Node) -> Node:
        return self._call(enter_node, x, self.perm, self.number, name=f"{x.name}_there")

    def _call(self, target: Any, *args: Any, name: str) -> Node:
        return edit.call(self.gm.graph, target, *args, name=name)
