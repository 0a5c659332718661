"""When the tasks of a whole step run, as predicted: what a scheduler found, or the order in which they are written."""

from __future__ import annotations

from functools import cached_property

from moefx.analysis.tasks import tasks_of
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.simulate import Timeline, simulate
from moefx.costmodel.tasks import Schedule, TaskGraph
from moefx.planning.pricing import Prices


class Foreseen:
    """tasks, timelines: of each graph of a program behind all passes, which is not linked yet. Times in seconds."""

    def __init__(self, graphs: StepGraphs, ctx: PassContext) -> None:
        self.prices = Prices(graphs, ctx)
        self.tasks: dict[str, TaskGraph] = {}
        self.timelines: dict[str, Timeline] = {}
        plans = {frozenset(plan.timeline.start): plan.timeline for plan in ctx.decisions.orders}
        for name, gm in graphs.graphs.items():
            nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
            self.tasks[name] = tasks = tasks_of(nodes, ctx, self.prices).graph
            # Where no scheduler was asked, tasks run in the order written, as far as nothing waits for another.
            self.timelines[name] = plans.get(frozenset(tasks.index)) or simulate(
                tasks, Schedule.from_sequence(tasks, [tasks.tasks[i].name for i in tasks.order]),
                self.prices.rates or None)  # fmt: skip

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return sum(each.makespan for each in self.timelines.values())

    @cached_property
    def floor(self) -> float:
        """No order of the same work takes less: the busiest of the links and the device."""
        return sum(max(each.busy.values(), default=0.0) for each in self.timelines.values())
