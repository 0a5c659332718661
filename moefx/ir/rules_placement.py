"""Rules of placement: all that a region does with slots goes by its own tables.

A table of another region, or shares of other choices, would send rows to slots where other experts are: of the same
shapes, so nothing else would notice.
"""

from __future__ import annotations

from torch.fx import Node

from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.regions import TABLES, region_of
from moefx.ir.rules import FORWARD, WHOLE, Call, View, rule


@rule(Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def slots_are_those_of_the_region(view: View) -> None:
    """Rows are routed by the table of their region, weights are taken by it, and rows are shared out by its ends, as
    many as the routing has."""
    for call in dict.fromkeys(view.call_of.values()):
        for name in TABLES:
            _check_table(view, call, name)
        quota, table = call.args.get("quota"), call.args.get("table")
        if call.op.tokens is None or call.op.tokens.rule != "routing" or table is None:
            continue
        places = table.meta["val"].shape[1]
        if quota is None and places > 1:
            view.fail(call.node, f"{call.name} has {places} slots for an expert, and no quota of rows for each")
        shares = view.call_of.get(quota) if isinstance(quota, Node) else None
        if shares is not None and shares.op.tokens is not None and shares.args["idx"] is not call.args["idx"]:
            other = shares.args["idx"].name
            view.fail(call.node, f"{call.name} shares out the rows of other choices, those of {other}")


def _check_table(view: View, call: Call, kind: str) -> None:
    """An argument of this name that is a table of inputs is that of the op's region."""
    table = call.args.get(kind)
    source = table.meta.get("moefx") if isinstance(table, Node) and table.op == "placeholder" else None
    if source is None:
        return
    mine = _region(view, call)
    if source.kind != kind:
        view.fail(call.node, f"{call.name} takes {source.kind} for its {kind}")
    if mine is not None and source.key != mine:
        view.fail(call.node, f"{call.name} of region {mine} goes by the {kind} of region {source.key}",
                  "a region, with all its chunks, has tables of its own")  # fmt: skip


def _region(view: View, call: Call) -> int | None:
    """Of which region it is, by its first readers if it does not say: as of weights."""
    near = edit.closure([call.node], lambda node: node.users if region_of(node) is None else ())
    return next((view.facts.uncut.get(region_of(node)) for node in near if region_of(node) is not None), None)
