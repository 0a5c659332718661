"""Rules of placement: all that a region does with slots goes by its own tables. A part of `tokens_are_conserved`.

A table of another region, shares of other choices, or the experts of another region would have the same shapes, so
nothing else would notice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from torch.fx import Node

from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import Stage
from moefx.ir.regions import TABLES, region_of
from moefx.ir.rules import Call, Role, View


def check_tables(view: View, known: Mapping[Node, Role]) -> None:
    """Rows are routed by the table of their region, and shared out by its ends, as many as there are; weights, and
    their gradients, go by its table, and to its products. known: the roles of nodes."""
    for call in dict.fromkeys(view.call_of.values()):
        for kind in (*TABLES, "added"):
            table = call.args.get(kind)
            if table in known if isinstance(table, Node) else False:
                _check_table(view, call, kind, known[table])
        if "added" in call.args:
            _check_added(view, call)
        if call.op.tokens is not None and call.op.tokens.rule == "routing" and call.args.get("table") is not None:
            _check_quota(view, call)
        if call.op.stage is Stage.WEIGHTS:
            _check_weights(view, call)


def _check_table(view: View, call: Call, kind: str, role: Role) -> None:
    mine = _region(view, call)
    if role.kind != kind:
        view.fail(call.node, f"{call.name} takes {role.kind} for its {kind}")
    if mine is not None and role.route != mine:
        view.fail(call.node, f"{call.name} of region {mine} goes by the {kind} of region {role.route}",
                  "a region, with all its chunks, has tables of its own")  # fmt: skip


def _check_added(view: View, call: Call) -> None:
    """Copies come to those that their plan was made on, and gradients go home by the table of the same plan."""
    plan = _made_by(view, call.args["added"])
    if plan is None:  # it was saved
        return
    for slots in call.args["slots"]:
        first = _made_by(view, slots)
        if first is None or first.args.get("moves") is not plan.args["moves"]:
            view.fail(call.node, f"{call.name} adds copies to {slots.name}, on whose copies they were not planned")
    if _made_by(view, call.args["moves"]) is not plan:
        view.fail(call.node, f"{call.name} adds copies of one plan, and gradients go home by another's table")


def _made_by(view: View, value: Node) -> Call | None:
    while value.target is operator.getitem or op_name(value) == "detach":
        value = value.args[0]
    return view.call_of.get(value)


def _check_quota(view: View, call: Call) -> None:
    quota, places = call.args.get("quota"), call.args["table"].meta["val"].shape[1]
    if quota is None and places > 1:
        view.fail(call.node, f"{call.name} has {places} slots for an expert, and no quota of rows for each")
    shares = view.call_of.get(quota)
    if shares is not None and shares.args.get("idx", call.args["idx"]) is not call.args["idx"]:
        other = shares.args["idx"].name
        view.fail(call.node, f"{call.name} shares out the rows of other choices, those of {other}")


def _check_weights(view: View, call: Call) -> None:
    """Where weights meet rows, these are of their region."""
    mine = view.facts.uncut.get(region_of(call.node))
    meetings = {node: found for node, found in view.call_of.items() if found.op.tokens is not None}
    for node in edit.closure([call.node], lambda n: () if n in meetings else n.users):
        other = view.facts.uncut.get(region_of(node)) if node in meetings else None
        if None not in (mine, other) and mine != other:
            view.fail(node, f"{meetings[node].name} of region {other} works with the experts of region {mine}")


def _region(view: View, call: Call) -> int | None:
    """Of which region it is, by its first readers if it does not say: as of weights."""
    near: Iterable[Node] = edit.closure([call.node], lambda node: node.users if region_of(node) is None else ())
    return next((view.facts.uncut.get(region_of(node)) for node in near if region_of(node) is not None), None)
