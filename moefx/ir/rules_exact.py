"""Roles of what is planned after the gate: the rows that were counted are those that travel, chunk by chunk.

    choices --exchange_loads--> loads --plan_exact--> plan --planned_table, planned_quota--> table, quota --> route
                                                      plan, counts --planned_traffic--> host
"""

from __future__ import annotations

from torch.fx import Node

from moefx.ir.rules import Call, Role, View

PLANNED = 1 << 23  # what the number of a plan is raised by for the quotas that it gives


class PlannedRoles:
    """What `rules_moe` says of the ops of `ir.ops.exact`. A plan has the number of its exchange."""

    view: View
    known: dict[Node, Role]
    counted: list[tuple[Node, ...]]  # the choices of every chunk, by plan
    planned: dict[int, tuple[int, int]]  # by route: the plan and the chunk that its rows go by

    def _loads(self, call: Call) -> None:
        self._give(call.result, Role("loads", len(self.counted)))
        self.counted.append(tuple(call.args["choices"]))

    def _planned_quota(self, call: Call) -> None:
        self._give(call.result, Role("quota", self._role(call, "rows", "plan").route + PLANNED, k=call.args["chunk"]))

    def _plan(self, call: Call) -> int:
        found = {self._role(call, name, "plan").route for name in ("rows", "moves")}
        if len(found) > 1:
            self.view.fail(call.node, f"{call.name} reads the rows of one plan and the table of another")
        return found.pop()

    def _goes_by(self, call: Call, route: int) -> None:
        """A routing that goes by a plan is that of the chunk whose choices were counted for it."""
        table, quota = (self.known.get(call.args.get(name)) for name in ("table", "quota"))
        if quota is None or quota.route < PLANNED:
            return
        number, chunk = quota.route - PLANNED, quota.k
        if table != Role("table", number):
            self.view.fail(call.node, f"{call.name}: the rows of one plan, and the table of another")
        if chunk >= len(self.counted[number]) or self.counted[number][chunk] is not call.args["idx"]:
            self.view.fail(call.node, f"{call.name} goes by what was planned for other choices",
                           f"those of chunk {chunk} were counted")  # fmt: skip
        self.planned[route] = number, chunk

    def _planned_traffic(self, call: Call) -> None:
        route = self._role(call, "counts", "counts").route
        if self.planned.get(route) != (self._plan(call), call.args["chunk"]):
            self.view.fail(call.node, f"{call.name}: the rows of this routing do not go by this plan and chunk")
        self._give(call.result, Role("host", route))
