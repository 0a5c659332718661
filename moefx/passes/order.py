"""Put the work of a graph in the order that a scheduler found.

Contract
    takes  SCHEDULED   every collective is a start and a wait
    gives  SCHEDULED   the same nodes in another topological order
    never  does anything unless a scheduler was chosen (then `early_starts` does nothing), changes what is computed, or
           the order in which random numbers are drawn

Pseudo-code
    tasks = exchanges, and the computations between them         (analysis/tasks.py)
    where rings were asked for, edges keep so many chunks alive at most  (analysis/rings.py)
    queues = scheduler(tasks)                                    (one order per resource, the same on all ranks)
    for every computation in its order: first start all exchanges that are next in their queue and have their input, and
    compute counts, which the host will wait for; then compute. Waits stand before their first reader; the scheduler
    "sequential" waits right away. A wait that gives memory free stands before the task that needs it gone.

    start(a0); wait(a0); f0; start(a1); wait(a1); f1   ->   start(a0); start(a1); wait(a0); f0; wait(a1); f1
"""

from __future__ import annotations

from collections import deque

from torch.fx import GraphModule, Node

from moefx.analysis.rings import with_rings
from moefx.analysis.tasks import ROUTE, Tasks, tasks_of
from moefx.context.pass_types import PassContext, PassResult
from moefx.costmodel.schedulers import Plan, schedule
from moefx.costmodel.tasks import COMPUTE
from moefx.ir import edit
from moefx.ir.ops.order import start

BUDGET_S = 1.0


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    name = ctx.scheduler
    if name is None:
        return result
    before = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    tasks = tasks_of(before, ctx, ctx.decisions.time_of)
    notes: list[str] = []
    if ctx.decisions.rings:
        tasks, notes = with_rings(tasks, ctx.decisions.rings, ctx.decisions.chunks)
    plan = schedule(tasks.graph, name, BUDGET_S, rates=ctx.decisions.rates or None)
    ctx.decisions.orders.append(plan)
    after = _Emission(tasks, plan, gm).build()
    anchor = gm.graph.output_node()
    for node in after:
        anchor.prepend(node)
    if after != before:
        result.changed("; ".join([f"{len(tasks.graph)} tasks by '{name}'", *notes]))
    return result


class _Emission:
    """Writes the nodes of the tasks down, computation by computation."""

    def __init__(self, tasks: Tasks, plan: Plan, gm: GraphModule) -> None:
        self.tasks, self.plan = tasks, plan
        self.done: set[Node] = set(gm.graph.find_nodes(op="placeholder"))
        self.out: list[Node] = []
        self.emitted: set[str] = set()
        self.end = gm.graph.output_node()
        self.between = {*gm.graph.nodes} - self.done - {node for nodes in tasks.nodes.values() for node in nodes}

    def build(self) -> list[Node]:
        """What is sent starts as early as it may; where it waits for another exchange to give memory free, as early as
        it would in the simulator."""
        graph, blocking = self.tasks.graph, self.plan.schedule.blocking
        orders = self.plan.schedule.orders
        sequence = self.plan.schedule.total_order(graph)
        queues = [deque(order) for resource, order in orders.items() if resource != COMPUTE]
        # A queue of one each: those that are ready need not stand in line.
        queues += [deque([name]) for name in orders.get(COMPUTE, ()) if graph[name].kind == ROUTE]
        for name in sequence:
            if blocking:
                self._task(name, wait_now=True)
            elif graph[name].resource == COMPUTE or self._waits(name):
                self._issue(queues)
                self._task(name)
        self._issue(queues)
        for node in self.end.all_input_nodes:
            self._reach(node)
        return self.out

    def _issue(self, queues: list[deque[str]]) -> None:
        """Whatever heads its queue, has its input, and need not wait for memory."""
        moved = True
        while moved:
            moved = False
            for queue in queues:
                while queue and self._is_ready(queue[0]):
                    self._task(queue.popleft())
                    moved = True

    def _is_ready(self, name: str) -> bool:
        return name in self.emitted or (self.emitted.issuperset(self.tasks.graph[name].after) and not self._waits(name))

    def _waits(self, name: str) -> bool:
        """Whether something that a task needs gone is still on its way."""
        return not all(self.done.issuperset(begun.users) for begun in self.tasks.releases.get(name, ()))

    def _task(self, name: str, *, wait_now: bool = False) -> None:
        if name in self.emitted:
            return
        self.emitted.add(name)
        for begun in self.tasks.releases.get(name, ()):
            for waited in begun.users:
                self._emit(waited)
        for node in self.tasks.nodes[name]:
            self._reach(node)
            if wait_now and node.target is start:
                for user in node.users:
                    self._emit(user)

    def _reach(self, node: Node) -> None:
        """Emit `node`, after what it needs that belongs to no task: waits, and sums of weight gradients."""
        for argument in node.all_input_nodes:
            if argument in self.between and argument not in self.done:
                self._reach(argument)
        self._emit(node)

    def _emit(self, node: Node) -> None:
        if node not in self.done:
            missing = [a.name for a in node.all_input_nodes if a not in self.done]
            assert not missing, f"{edit.place(node)}: {node.name} is due before {missing}"
            self.done.add(node)
            self.out.append(node)
