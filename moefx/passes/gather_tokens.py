"""Gather the tokens of ranks that have parts of the same experts: Parm's baseline. A part of the step place-experts.

Contract
    takes  MOE   regions between enter_experts and leave_experts
    gives        the same regions on the rows of all ranks along `esp`, of which each keeps the results of its own
    never  runs unless the schedule "baseline" is asked for: by default rows are dumped (see `place_regions`)

Pseudo-code
    exchange how many tokens every rank has, or how large its capacities are
    gather what the region reads of tokens; behind it keep this rank's
    ranks along `esp` that read the same data gather copies of its tokens, as the paper's do (N_MP = N_ESP)

    y = combine(leave(experts(enter(dispatch(x, perm)))), perm)
        ->  y = keep_rows(combine(leave(experts(enter(dispatch(gather_rows(x), perm)))), perm))
Source: Parm, Eq. 1. The gate runs before the gather, on a rank's own tokens: so choices and capacities are the eager
model's, and ids and weights travel beside the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.region_rows import RegionRows, refuse_draws, rows_of
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit, regions
from moefx.ir.describe import module_path
from moefx.ir.op import expr
from moefx.ir.ops.regions import enter_experts
from moefx.ir.randomness import first_draw
from moefx.ir.writes import is_written

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if not ctx.can_gather_tokens:
        return result
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    for number in sorted({enter.args[-1] for enter in enters}):
        if not (ctx.gathers_tokens(number) or ctx.decisions.whole):
            continue
        rows = rows_of(gm, number)
        reason = rows.find()
        copies = ctx.copies(number, ctx.mesh.axis("esp"))
        if not ctx.gathers_tokens(number):  # the planner wants to know whether it could
            could = reason is None and first_draw(rows.inner if ctx.mesh.axis("esp", but="data") else ()) is None
            ctx.decisions.gatherable |= {number} if could else set()
            continue
        if ctx.weights_over(number):
            raise UnsupportedUse(f"the split 'baseline' gathers the tokens of all ranks along 'esp', and with "
                                 f"r={ctx.r(number)} rows go to some of them", where=module_path(rows.enters[0]),
                                 hint="r=None, or another schedule")  # fmt: skip
        if reason is not None:
            raise UnsupportedUse(f"the split 'baseline' cannot be: {reason}", where=module_path(rows.enters[0]),
                                 hint="split=None sends every rank's rows by themselves")  # fmt: skip
        refuse_draws(rows.inner, copies, module_path(rows.enters[0]))
        _Gather(gm, number, rows, ctx).rewrite()
        result.changed(f"region {number} gets the tokens of {ctx.mesh.size('esp')} ranks")
    return result


class _Gather:
    """sizes: {rows of a rank: (their number, those of all ranks, the sum)}. copies: how many ranks have the same rows,
    and along which axis."""

    def __init__(self, gm: GraphModule, number: int, rows: RegionRows, ctx: PassContext) -> None:
        self.gm, self.number, self.rows = gm, number, rows
        self.n, self.axis = ctx.mesh.size("esp"), ctx.mesh.axis("esp")
        copies = ctx.copies(number, self.axis)
        self.copies = ctx.mesh.size(copies), copies
        self.sizes: dict[object, tuple[object, Node, Node]] = {}
        self.gathered: dict[tuple[Node, int], Node] = {}

    def rewrite(self) -> None:
        for node in self.rows.inner:
            for argument, dim in self.rows.arguments(node).items():
                node.replace_input_with(argument, self._all(node, argument, dim))
        for node, dim in self.rows.results.items():
            self._keep(node, dim)
        edit.erase_unused(self.rows.dead)
        edit.move_in_order(self.gm)

    def _all(self, node: Node, own: Node, dim: int) -> Node:
        dim %= edit.tensor_value(own).dim()
        if (own, dim) not in self.gathered or is_written(own):
            with edit.at(node):
                _, sizes, total = self._exchanged(own, dim)
                self.gathered[own, dim] = edit.call(self.gm.graph, _ops.gather_rows.default,
                                                    self._copy(_ops.own_copy, own), sizes, total, dim, self.n,
                                                    self.axis, name=f"{own.name}_gathered")  # fmt: skip
        return self.gathered[own, dim]

    def _copy(self, op: Any, x: Node) -> Node:
        """What ranks have in common becomes a copy, or the other way round; choices have no gradient to share."""
        if not self.copies[1] or not edit.tensor_value(x).is_floating_point():
            return x
        new = edit.call(self.gm.graph, op.default, x, *self.copies, name=f"{x.name}_copy")
        new.meta["val"] = edit.tensor_value(x)
        return new

    def _exchanged(self, own: Node, dim: int) -> tuple[object, Node, Node]:
        graph, wanted = self.gm.graph, edit.tensor_value(own).shape[dim]
        if expr(wanted) not in self.sizes:
            size = graph.call_method("size", (own, dim)) if isinstance(wanted, torch.SymInt) else wanted
            sizes = edit.call(graph, _ops.exchange_sizes.default, size, self.n, self.axis, name="sizes")
            regions.tag([sizes], self.number)
            total = edit.call(graph, _ops.total_size.default, sizes, name="rows_of_all")
            self.sizes[expr(wanted)] = size, sizes, total
        return self.sizes[expr(wanted)]

    def _keep(self, node: Node, dim: int) -> None:
        dim %= edit.tensor_value(node).dim()
        size, sizes, _ = self.sizes[expr(edit.tensor_value(node).shape[dim])]
        with edit.at(node, after=True):
            own = edit.call(self.gm.graph, _ops.keep_rows.default, node, sizes, size, dim, self.n, self.axis,
                            name=f"{node.name}_own")  # fmt: skip
            own.meta["val"] = edit.tensor_value(node)
            common = self._copy(_ops.common_copy, own)
        node.replace_all_uses_with(common, delete_user_cb=lambda user: user is not own)
