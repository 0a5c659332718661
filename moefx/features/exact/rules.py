"""Rules of what is planned after the gate: the rows that were counted are those that travel, chunk by chunk.

    choices --exchange_loads--> loads --plan_exact--> moves, plan --planned_table, planned_quota--> table, quota
                                                            plan, counts --planned_traffic--> host
    loads, moves --plan_calibrated--> moves, plan, added

All of it but the host's traffic is of a region, of the number that it had before it was cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from moefx.ir.level import Level
from moefx.ir.regions import region_of
from moefx.ir.rules import FORWARD, WHOLE, Call, Role, View, rule
from moefx.ir.rules_moe import roles


def of_loads(view: View, call: Call) -> Role:
    """What the rows of a region are counted as."""
    number = region_of(call.node)
    return Role("loads", view.facts.uncut.get(number, number))


@rule(Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def rows_go_by_their_plan(view: View) -> None:
    """A plan is of the counts and the homes of its region, and each chunk goes by its part of that plan."""
    plans = [call for name in ("plan_exact", "plan_calibrated") for call in view.calls.get(name, ())]
    if not plans:
        return
    known = roles(view)
    for call in plans:
        _check_plan(view, call, known)
    counted = {known[call.result].route: call.args["choices"] for call in view.calls.get("exchange_loads", ())}
    going: dict[int, tuple[int, int]] = {}  # by routing: the region and the chunk whose plan its rows go by
    for call in dict.fromkeys(view.call_of.values()):
        is_routing = call.op.tokens is not None and call.op.tokens.rule == "routing"
        quota = view.call_of.get(call.args.get("quota")) if is_routing else None
        if quota is not None and quota.name == "planned_quota":
            _check_route(view, call, quota, known, counted)
            number, chunk = known[quota.args["rows"]].route, quota.args["chunk"]
            going |= {known[user].route: (number, chunk) for user in call.result.users if user in known}
    for call in view.calls.get("planned_traffic", ()):
        number, route = known[call.args["rows"]].route, known[call.args["counts"]].route
        is_of_plan = known[call.args["moves"]].route == number
        if not is_of_plan or going.get(route) != (number, call.args["chunk"]):
            view.fail(call.node, f"{call.name}: the rows of this routing do not go by this plan and chunk")


def _check_plan(view: View, call: Call, known: Mapping[Node, Role]) -> None:
    name, what = ("homes", "homes") if "homes" in call.args else ("moves", "copies")
    number = known[call.args["loads"]].route
    if known[call.args[name]].route != number:
        view.fail(call.node, f"{call.name} of region {number} goes by the {what} of another")


def _check_route(view: View, call: Call, quota: Call, known: Mapping[Node, Role],
                 counted: Mapping[int, tuple[Node, ...]]) -> None:  # fmt: skip
    """A routing that goes by a plan is that of the chunk whose choices were counted for it. (That its table is of its
    region says `rules_placement`.)"""
    number, chunk = known[quota.args["rows"]].route, quota.args["chunk"]
    if chunk >= len(counted[number]) or counted[number][chunk] is not call.args["idx"]:
        view.fail(call.node, f"{call.name} goes by what was planned for other choices",
                  f"those of chunk {chunk} were counted")  # fmt: skip
