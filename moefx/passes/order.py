"""Put the work of a graph in order: that of a scheduler, or as written, with exchanges that start early.

Contract
    takes  SCHEDULED   every collective is a start and a wait
    gives  SCHEDULED   the same nodes in another topological order
    never  changes what is computed, the order in which random numbers are drawn or, without a scheduler, the order of
           starts among each other: it is the same on every rank

Pseudo-code
    where room is bounded (rings, windows), values are made when there is room for them         (analysis/rings.py)

    with a scheduler:
        tasks = exchanges, and the computations between them         (analysis/tasks.py)
        queues = scheduler(tasks)                                    (one order per resource, the same on all ranks)
        for every computation in its order: first start all exchanges that are next in their queue and have their input,
        and compute counts, which the host will wait for; then compute. Waits stand before their first reader; the
        scheduler "sequential" waits right away. A wait that gives memory free stands before the task that needs it gone
        reductions of gradients, and gathers that a later layer reads, fill links that exchanges leave idle: where that
        takes no longer they start behind the task, or the wait, behind which they fit     (costmodel/filling.py)

        start(a0); wait(a0); f0; start(a1); wait(a1); f1   ->   start(a0); start(a1); wait(a0); f0; wait(a1); f1

    as written, for every start that a chain of the program waits for (tokens, counts), in order:
        if what it needs includes a wait: first do everything at hand that does not depend on an outstanding wait
        then do what the start needs, and start. Only what stands behind the last grouped matmul but one may be
        put off for it: a weight gradient frees the saved rows it reads, and memory counts more than an early start
    copies to and from the host start as soon as there is room; gradient reductions where their gradient is ready and
    no exchange is on its way, which they would hold up, and they are waited for at the end

        wait(a); dgrad; wgrad; start(b)   ->   wait(a); dgrad; start(b); wgrad
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import GraphModule, Node

from moefx.analysis.rings import WINDOWS, bounded
from moefx.analysis.tasks import ROUTE, Tasks, stage_of, tasks_of
from moefx.context.pass_types import PassContext, PassResult
from moefx.costmodel.filling import Filled, filled
from moefx.costmodel.schedulers import schedule
from moefx.costmodel.tasks import COMPUTE
from moefx.ir import edit
from moefx.ir.op import BACKGROUND, Stage, lookup
from moefx.ir.ops.order import begun, parts, start, unsplit, wait
from moefx.ir.randomness import draws_before

BUDGET_S = 1.0
WEIGHTS = Stage.WEIGHTS.value


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    before = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    said: list[str] = []
    if ctx.scheduler is not None:
        tasks, said = bounded(tasks_of(before, ctx, ctx.decisions.time_of), ctx.decisions.rings, ctx.decisions.chunks)
        rates = ctx.decisions.rates or None
        plan = filled(tasks.graph, schedule(tasks.graph, ctx.scheduler, BUDGET_S, rates=rates), WEIGHTS, rates)
        ctx.decisions.orders.append(plan.plan)
        after = _Emission(replace(tasks, graph=plan.graph), plan, gm).build()
        said = [f"{len(tasks.graph)} tasks by '{ctx.scheduler}'", *said]
        if plan.of and not plan.plan.schedule.blocking:
            ctx.report.reductions["order"] = (
                f"{plan.fits} of {plan.of} reductions where no exchange is on their link, as predicted")  # fmt: skip
    else:
        windows = {node: queue for node in before if (queue := _queue(node)) in WINDOWS}
        releases = {}
        if windows:
            tasks, said = bounded(tasks_of(before, ctx, ctx.decisions.time_of), 0, {})
            releases = {tasks.nodes[name][0]: nodes for name, nodes in tasks.releases.items()}
        after = _AsWritten(before, windows, releases).build()
        said = [f"{sum(a is not b for a, b in zip(before, after))} nodes moved", *said]
    if after != before:
        anchor = gm.graph.output_node()
        for node in after:
            anchor.prepend(node)
        result.changed("; ".join(said))
    return result


def _queue(node: Node) -> str | None:
    if node.target is not start:
        return None
    op, call = unsplit(node)
    return op.queue_of(call)


class _Emission:
    """Writes the nodes of the tasks down, computation by computation."""

    def __init__(self, tasks: Tasks, plan: Filled, gm: GraphModule) -> None:
        self.tasks, self.plan, self.behind = tasks, plan.plan, plan.behind
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
        late = [name for queue in queues for name in queue if self._brought(name)]
        queues = [deque(name for name in queue if name not in late) for queue in queues] + [deque([n]) for n in late]
        for name in sequence:
            if blocking:
                self._task(name, wait_now=True)
            elif graph[name].resource == COMPUTE or self._waits(name):
                self._issue(queues)
                if self._arrive(name):
                    self._issue(queues)
                self._task(name)
        self._issue(queues)
        for name in sequence:  # what waits for gradients of copies
            self._task(name)
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
        is_there = self.done.issuperset(self._brought(name))
        return name in self.emitted or (
            self.emitted.issuperset(self.tasks.graph[name].after) and is_there and not self._waits(name)
            and self.done.issuperset(self._ahead(name)))  # fmt: skip

    def _ahead(self, name: str) -> list[Node]:
        """The wait for the exchange that a task is held back behind."""
        return [user for node in self.tasks.nodes.get(self.behind.get(name), ()) if node.target is start
                for user in node.users]  # fmt: skip

    def _arrive(self, name: str) -> bool:
        """Wait for what a task reads, where something is held back behind it, and for what holds back what the task
        needs; whether there is anything."""
        read = {sent for node in self.tasks.nodes[name] for a in node.all_input_nodes if (sent := begun(a))}
        found = [user for sent in sorted(read) if sent.name in self.behind.values() for user in sent.users]
        for needed in self.tasks.graph[name].after:
            if needed in self.behind and needed not in self.emitted:
                queue = self.plan.schedule.orders[self.tasks.graph[needed].resource]
                for other in queue[: queue.index(needed) + 1]:
                    found += [] if other in self.emitted else self._ahead(other)
        for waited in found:
            if waited.args[0] in self.done:
                self._emit(waited)
        return bool(found)

    def _brought(self, name: str) -> list[Node]:
        """The waits for gradients of copies that a task reads: nobody waits for these before the memory is wanted."""
        found = (each for node in self.tasks.nodes[name] for each in node.all_input_nodes)
        return [each for each in found if (sent := begun(each)) and stage_of(sent) is Stage.COPIES]

    def _waits(self, name: str) -> bool:
        """Whether something that a task needs gone is still on its way."""
        return not self.done.issuperset(self.tasks.releases.get(name, ()))

    def _task(self, name: str, *, wait_now: bool = False) -> None:
        if name in self.emitted:
            return
        self.emitted.add(name)
        for waited in (*self.tasks.releases.get(name, ()), *self._ahead(name)):
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
            for part in parts(node):
                self._emit(part)


class _AsWritten:
    """Moves nodes no further than it takes to start early. windows: the starts whose queue is bounded, and their
    queues; releases: what each of them comes behind."""

    def __init__(self, nodes: list[Node], windows: dict[Node, str], releases: dict[Node, list[Node]]) -> None:
        self.nodes = nodes
        self.index = {n: i for i, n in enumerate(nodes)}
        self.done: set[Node] = set()
        self.out: list[Node] = []
        self.behind = {later: [earlier] for later, earlier in draws_before(nodes).items()} | releases
        self.queues = [deque(n for n in windows if windows[n] == queue) for queue in dict.fromkeys(windows.values())]
        self.bounded = windows
        self.urgent_waits = {n for n in nodes if n.target is wait and _is_urgent(n.args[0])}
        self.waited = {n.args[0] for n in self.urgent_waits if unsplit(n.args[0])[0].is_collective}
        self.under_way: set[Node] = set()  # exchanges of these
        self.yielding: dict[Node, None] = {}  # reductions that let them pass

    def build(self) -> list[Node]:
        self._open()
        for node in self.nodes:
            if node.target is start and _is_urgent(node) and node not in self.done and node not in self.bounded:
                self._reach(node)
        self._fill(len(self.nodes))
        late = edit.descendants(n for n in self.nodes if n.target is wait and not _is_urgent(n.args[0]))
        for node in [n for n in self.nodes if n not in late]:
            if not self._yields(node):
                self._emit_needed(node)
        for node in self.nodes:
            self._emit_needed(node)
        return self.out

    def _reach(self, target: Node) -> None:
        needed = self._needed(target)
        if any(n in self.urgent_waits for n in needed):
            self._fill(self.index[target])
        inner = self._last_inner_matmul(needed)
        if inner is not None:
            for node in needed:
                if self.index[node] < inner:
                    self._emit_before(node)
        for node in needed:
            self._emit(node)

    def _needed(self, target: Node) -> list[Node]:
        """In order: the node, what it depends on, what draws random numbers before any of these, and what must be gone
        before."""
        found = self._ancestors([target])
        while earlier := {each for n in found for each in self.behind.get(n, ())} - found - self.done:
            found |= self._ancestors(earlier)
        return self._sorted(n for n in found if n in self.index and n not in self.done)

    def _ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """The nodes and what they depend on, as far as it is not done."""
        return edit.ancestors(nodes, stop=self.done.__contains__)

    def _sorted(self, nodes: Iterable[Node]) -> list[Node]:
        """In the order written, but behind what must be gone before."""
        found = sorted(nodes, key=self.index.__getitem__)
        if not self.bounded:
            return found
        inside, result = {*found}, {}

        def add(node: Node) -> None:
            for needed in (*node.all_input_nodes, *self.behind.get(node, ())):
                if needed in inside and needed not in result:
                    add(needed)
            result[node] = None

        for node in found:
            if node not in result:
                add(node)
        return [*result]

    def _last_inner_matmul(self, needed: list[Node]) -> int | None:
        """Place of the last grouped matmul that another grouped matmul of `needed` depends on."""
        matmuls = list(filter(_multiplies_rows, needed))
        inner = [n for n in matmuls if any(n in self._ancestors([m]) for m in matmuls if m is not n)]
        return self.index[inner[-1]] + 1 if inner else None

    def _emit_before(self, node: Node) -> None:
        """Emit `node`, and before it everything at hand that stands before it."""
        self._fill(self.index[node])
        self._emit_needed(node)

    def _emit_needed(self, node: Node) -> None:
        """Emit `node`, and before it what stands behind it and must be gone before."""
        for needed in self._needed(node) if self.bounded and node not in self.done else [node]:
            self._emit(needed)

    def _fill(self, limit: int) -> None:
        """Everything that stands before `limit` and does not depend on an outstanding wait."""
        blocked: set[Node] = set()
        for node in self.nodes[:limit]:
            if node in self.done:
                continue
            needed = [*node.all_input_nodes, *self.behind.get(node, ())]
            if (node in self.urgent_waits or any(a in blocked for a in needed) or self._is_late(node)
                    or self._yields(node)):  # fmt: skip
                blocked.add(node)
            else:
                self._emit(node)

    def _is_late(self, node: Node) -> bool:
        """Waits for background work are for the end, or for the one who needs the result; the bounded start by
        themselves."""
        return node in self.bounded or (node.target is wait and node not in self.urgent_waits)

    def _emit(self, node: Node) -> None:
        if node not in self.done:
            missing = [a.name for a in node.all_input_nodes if a in self.index and a not in self.done]
            assert not missing, f"{edit.place(node)}: {node.name} is due before {missing}"
            self.done.add(node)
            self.out.append(node)
            for part in parts(node):
                self._emit(part)
            if node.target is start and node in self.waited:
                self.under_way.add(node)
            elif node.target is wait:
                self.under_way.discard(node.args[0])
            self._open()
            for begun in [*self.yielding] if not self.under_way else ():
                if self.yielding.pop(begun, 0) is None:
                    self._emit(begun)

    def _yields(self, node: Node) -> bool:
        """Whether it is the start of a reduction while an exchange is on its way, which it would hold up: it begins
        behind that."""
        found = bool(self.under_way) and node.target is start and not _is_urgent(node) and node not in self.bounded
        if found and node not in self.done:
            self.yielding[node] = None
        return found

    def _open(self) -> None:
        """Start what heads a bounded queue, if it has its input and there is room, or will be when what is on its way
        in the same queue has left."""
        for queue in self.queues:
            while queue and (queue[0] in self.done or self._has_room(queue[0])):
                begun = queue.popleft()
                if begun not in self.done:
                    for waited in self.behind.get(begun, ()):
                        self._emit(waited)
                    self._emit(begun)

    def _has_room(self, begun: Node) -> bool:
        if any(a in self.index and a not in self.done for a in begun.all_input_nodes):
            return False
        return all(n in self.done or (n.target is wait and n.args[0] in self.done and self.bounded.get(n.args[0]) ==
                                      self.bounded[begun]) for n in self.behind.get(begun, ()))  # fmt: skip


def _multiplies_rows(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.gemm is not None and op.tokens is not None and op.tokens.gives != ""


def _is_urgent(handle: Node) -> bool:
    op, call = unsplit(handle)
    return op.stage_of(call) not in BACKGROUND
