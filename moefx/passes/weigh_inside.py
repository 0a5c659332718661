"""Apply the scores before the experts' last product, so that the router's gradient does not need the rows that return.

Contract
    takes  MOE   dropless regions between enter_experts and leave_experts
    gives  MOE   the same numbers up to rounding: w (W h + b) = W (w h) + w b
    never  does anything unless the strategy says "inside" for the rows that return (role R), or where anything but a
           bias stands behind the last product, or somebody else reads what leaves; static blocks stay as they are.
           For the planner it notes in which regions it could (`Decisions.weighable`)

Pseudo-code
    of every combine with weights, whose rows leave right behind a product with a weight of each expert:
        the scores go along, a number for each row; the product takes rows times scores, as does its bias
    the gradient of a score is then a dot product where the experts are, and its transpose brings it back

    y = combine(leave(linear(h, W)), perm, w)   ->   y = combine(leave(linear(h * enter(w[perm]), W)), perm)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.restorables import Class
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import argument, value
from moefx.ir.ops.regions import enter_experts, leave_experts

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for combine in gm.graph.find_nodes(op="call_function", target=_ops.combine.default):
        leave, weights = combine.args[0], argument(combine, "weights")
        if weights is None or leave.target is not leave_experts:
            continue
        number, found = leave.args[-1], _product(leave)
        if not isinstance(found, str) and value(weights).dtype != value(found[0]).dtype:
            found = f"scores are {value(weights).dtype}, rows {value(found[0]).dtype}"
        if ctx.way_of(Class(f"{number}.R", number, "R", 0, "")) != "inside":
            if ctx.decisions.whole and not isinstance(found, str):  # the planner wants to know where they could be
                ctx.decisions.weighable.add(number)
            continue
        if isinstance(found, str):
            result.skip(combine, f"scores stay outside of the experts: {found}")
            continue
        _rewrite(combine, *found)
        result.changed(f"scores of region {number} inside")
    if result.changes:
        edit.move_in_order(gm)  # scores may be computed late
    return result


def _product(leave: Node) -> tuple[Node, Node | None] | str:
    """(the last product, the bias of its rows) of what leaves, or why it is something else."""
    rows, bias = leave.args[0], None
    if op_name(rows) in ("add", "iadd") and len(rows.all_input_nodes) == len(rows.args) == 2:
        found = [a for a in rows.args if a.target is _ops.expert_rows.default]
        rows, bias = (next(a for a in rows.args if a is not found[0]), found[0]) if found else (rows, None)
    if rows.target is not _ops.grouped_linear.default:
        return "what leaves is no product with a weight of each expert"
    if any(len(each.users) != 1 for each in (rows, leave.args[0], leave)):
        return "somebody else reads what leaves"
    return rows, bias


def _rewrite(combine: Node, product: Node, bias: Node | None) -> None:
    graph, leave, (hidden, weight, counts, transposed, *own) = combine.graph, combine.args[0], product.args
    old = leave.args[0]
    with edit.at(old, after=True):
        choices = edit.call(graph, _ops.dispatch_choices.default, argument(combine, "weights"), combine.args[1],
                            name="scores")  # fmt: skip
        inside = edit.call(graph, enter_experts, choices, *leave.args[1:], name="scores_inside")
        column = graph.call_method("reshape", (inside, -1, *[1] * (value(hidden).dim() - 1)))
        weighed = edit.call(graph, operator.mul, hidden, column, name=f"{hidden.name}_weighed")
        rows = edit.call(graph, _ops.grouped_linear.default, weighed, weight, counts, transposed, name=product.name)
        if any(own):
            size = graph.call_method("size", (hidden, 0))
            bias = edit.call(graph, _ops.expert_rows.default, *own, counts, size, name="bias")
        if bias is not None:
            scaled = edit.call(graph, operator.mul, bias, column, name="bias_weighed")
            rows = edit.call(graph, operator.add, rows, scaled, name="biased")
    leave.replace_input_with(old, rows)
    combine.args, combine.kwargs = combine.args[:3], {}
    edit.erase_unused([old, product])
