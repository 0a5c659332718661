"""Roles of what is planned after the gate: the rows that were counted are those that travel, chunk by chunk.

    choices --exchange_loads--> loads --plan_exact--> moves, plan --planned_table, planned_quota--> table, quota
                                                            plan, counts --planned_traffic--> host
    loads, moves --plan_calibrated--> moves, plan, added

All of it but the host's traffic is of a region, of the number that it had before it was cut.
"""

from __future__ import annotations

from torch.fx import Node

from moefx.ir.regions import region_of
from moefx.ir.rules import Call, Role, View

PLANNED = 1 << 23  # what the number of a region is raised by for quotas of its plan


class PlannedRoles:
    """What `rules_moe` says of the ops of `ir.ops.exact`."""

    view: View
    known: dict[Node, Role]
    counted: dict[int, tuple[Node, ...]]  # the choices of every chunk, by region
    planned: dict[int, tuple[int, int]]  # by route: the region and the chunk whose plan its rows go by

    def _loads(self, call: Call) -> None:
        number = region_of(call.node)
        number = self.view.facts.uncut.get(number, number)
        self.counted[number] = tuple(call.args["choices"])
        self._give(call.result, Role("loads", number))

    def _plan(self, call: Call) -> None:
        number = self._role(call, "loads", "loads").route
        if self._role(call, "homes", "moves").route != number:
            self.view.fail(call.node, f"{call.name} of region {number} goes by the homes of another")
        self._give_each(call.node, [Role("moves", number), Role("plan", number)])

    def _calibrated(self, call: Call) -> None:
        number = self._role(call, "loads", "loads").route
        if self._role(call, "moves", "moves").route != number:
            self.view.fail(call.node, f"{call.name} of region {number} goes by the copies of another")
        self._give_each(call.node, [Role("moves", number), Role("plan", number), Role("added", number)])

    def _planned_quota(self, call: Call) -> None:
        self._give(call.result, Role("quota", self._role(call, "rows", "plan").route + PLANNED, k=call.args["chunk"]))

    def _goes_by(self, call: Call, route: int) -> None:
        """A routing that goes by a plan is that of the chunk whose choices were counted for it."""
        quota = self.known.get(call.args.get("quota"))
        if quota is None or quota.route < PLANNED:
            return
        number, chunk = quota.route - PLANNED, quota.k
        if self.known.get(call.args["table"]) != Role("table", number):
            self.view.fail(call.node, f"{call.name}: the rows of one plan, and the table of another")
        if chunk >= len(self.counted[number]) or self.counted[number][chunk] is not call.args["idx"]:
            self.view.fail(call.node, f"{call.name} goes by what was planned for other choices",
                           f"those of chunk {chunk} were counted")  # fmt: skip
        self.planned[route] = number, chunk

    def _planned_traffic(self, call: Call) -> None:
        route, number = self._role(call, "counts", "counts").route, self._role(call, "rows", "plan").route
        is_of_plan = self._role(call, "moves", "moves").route == number
        if not is_of_plan or self.planned.get(route) != (number, call.args["chunk"]):
            self.view.fail(call.node, f"{call.name}: the rows of this routing do not go by this plan and chunk")
        self._give(call.result, Role("host", route))
