"""Tasks on resources, and orders of tasks: what the schedulers order and the simulator runs.

A task occupies one resource (the compute stream, a link, a copy engine) for its duration; a resource runs one task at
a time, without preemption. A schedule is one order of tasks per resource: each resource is a queue (a CUDA stream, a
process group), and a task starts when it heads its queue and all that it needs has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import networkx as nx

from moefx.errors import ScheduleError

COMPUTE = "compute"
COPY = "copy"
INSIDE = frozenset({COMPUTE, COPY, "host", "d2h", "h2d"})  # resources of one rank; on others it exchanges with ranks


@dataclass(frozen=True)
class Task:
    """One piece of work.

    kind: role in an MoE layer by ScheMoE's names, C1 A1 D1 E C2 A2 D2 (compress, all-to-all, decompress, experts, and
        back), W for a weight gradient, AR for a gradient's reduction; any other text is a dense task.
    resource: where it runs. All but those of one rank (`INSIDE`) count as communication.
    duration: seconds.
    link: what it shares with tasks of other resources: the link between ranks that it sends over, "intra" or "inter",
        or the engine that copies, "d2h" or "h2d". Tasks that run at once on a link take so many times as long.
    after: names of the tasks that must have ended before.
    chunk, layer: which micro-batch; which MoE region (the backward of a layer is a region of its own).
    """

    name: str
    kind: str
    resource: str
    duration: float
    after: tuple[str, ...] = ()
    chunk: int = 0
    layer: int = 0
    link: str = ""

    @property
    def busies(self) -> str:
        """What is busy while it runs."""
        return self.link or self.resource


class TaskGraph:
    """Tasks with known, acyclic dependencies.

    Besides `tasks`, everything is by position in `tasks`: `preds`, `succs`, `durations`, `lane` (position in
    `resources`), and `order`, a topological order that is the given one wherever that is legal.

    Raises ScheduleError for a duration that is no number >= 0, a name used twice, an unknown dependency, a
    cycle.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        self.index = {task.name: i for i, task in enumerate(self.tasks)}
        self._refuse_bad_tasks()
        self.preds = tuple(tuple(sorted({self.index[name] for name in task.after})) for task in self.tasks)
        succs: list[list[int]] = [[] for _ in self.tasks]
        for i, preds in enumerate(self.preds):
            for pred in preds:
                succs[pred].append(i)
        self.succs = tuple(map(tuple, succs))
        self.resources = tuple(dict.fromkeys(task.resource for task in self.tasks))
        lane = {resource: i for i, resource in enumerate(self.resources)}
        self.lane = tuple(lane[task.resource] for task in self.tasks)
        self.durations = tuple(float(task.duration) for task in self.tasks)
        self.order = tuple(topological(self.preds, self.succs, range(len(self.tasks))))
        if len(self.order) < len(self.tasks):
            edges = [(task.name, name) for task in self.tasks for name in task.after]
            cycle = [edge[0] for edge in nx.find_cycle(nx.DiGraph(edges))]
            raise ScheduleError(f"tasks need one another in a cycle: {' needs '.join([*cycle, cycle[0]])}",
                                hint="remove one of these dependencies")

    def _refuse_bad_tasks(self) -> None:
        seen: set[str] = set()
        for task in self.tasks:
            if not (task.duration >= 0 and math.isfinite(task.duration)):
                raise ScheduleError(f"task {task.name} has duration {task.duration}", hint="give a finite number >= 0")
            if task.name in seen:
                raise ScheduleError(f"two tasks have the name {task.name}", hint="names must be unique")
            seen.add(task.name)
            for name in task.after:
                if name not in self.index:
                    raise ScheduleError(f"task {task.name} needs {name}, which is not a task of this graph",
                                        hint=f"it has {len(self.tasks)} tasks: {', '.join(list(self.index)[:8])} ...")

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, name: str) -> Task:
        return self.tasks[self.index[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.index

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """Per task, as bits, all that must have ended before it."""
        needed = [0] * len(self)
        for i in self.order:
            for pred in self.preds[i]:
                needed[i] |= needed[pred] | 1 << pred
        return tuple(needed)

    @cached_property
    def shares_links(self) -> bool:
        """Whether several resources send over one link."""
        users = {(task.link, task.resource) for task in self.tasks if task.link}
        return len({link for link, _ in users}) < len(users)

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """Per task, seconds before which it cannot start, whatever the order."""
        heads = [0.0] * len(self)
        for i in self.order:
            heads[i] = max((heads[p] + self.durations[p] for p in self.preds[i]), default=0.0)
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """Per task, seconds that must pass after its end, whatever the order."""
        tails = [0.0] * len(self)
        for i in reversed(self.order):
            tails[i] = max((self.durations[s] + tails[s] for s in self.succs[i]), default=0.0)
        return tuple(tails)

    def lower_bound(self) -> float:
        """Seconds that no schedule can beat: the critical path, and for every resource head + work + tail.

        Of the latter it takes the largest over all subsets of a resource's tasks (least head + work + least tail),
        which is the makespan of Jackson's preemptive schedule (Carlier and Pinson, Management Science 35(2), 1989).
        """
        bounds = [self.heads[i] + self.durations[i] + self.tails[i] for i in range(len(self))]
        for lane in range(len(self.resources)):
            bounds.append(preemptive_bound([(self.heads[i], self.durations[i], self.tails[i])
                                            for i in range(len(self)) if self.lane[i] == lane]))
        return max(bounds, default=0.0)


def preemptive_bound(jobs: list[tuple[float, float, float]]) -> float:
    """Least makespan of preemptible jobs (head, duration, tail) on one resource: the longest tail always runs."""
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []  # (-tail, seconds left)
    now = bound = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, duration, tail = waiting.pop()
            heappush(ready, (-tail, duration))
        tail, left = heappop(ready)
        if waiting and now + left > waiting[-1][0]:
            heappush(ready, (tail, left - (waiting[-1][0] - now)))
            now = waiting[-1][0]
        else:
            now += left
            bound = max(bound, now - tail)
    return bound


def topological(preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]], key: Sequence[Any]) -> list[int]:
    """Of all that may come next, always the one of least key (then of least position); cut short by a cycle."""
    missing = [len(p) for p in preds]
    ready = [(key[i], i) for i, count in enumerate(missing) if not count]
    heapify(ready)
    result = []
    while ready:
        _, i = heappop(ready)
        result.append(i)
        for succ in succs[i]:
            missing[succ] -= 1
            if not missing[succ]:
                heappush(ready, (key[succ], succ))
    return result


@dataclass(frozen=True)
class Schedule:
    """One order of task names per resource.

    blocking: no overlap at all; every task waits for the one before it in `total_order`.
    proven_bound: seconds that the scheduler proved no schedule can beat; 0 if it proved nothing.
    Raises ScheduleError if the orders are not a mapping from resources to task names, or the bound is not a number.
    """

    orders: Mapping[str, tuple[str, ...]]
    blocking: bool = False
    proven_bound: float = 0.0

    def __post_init__(self) -> None:
        try:
            orders = {resource: tuple(names) for resource, names in self.orders.items()}  # iterators are read once
            names_only = all(isinstance(name, str) for order in orders.values() for name in order)
        except (AttributeError, TypeError):
            names_only = False
        if not names_only:
            raise ScheduleError("the orders of a schedule are not task names by resource",
                                hint="Schedule({'compute': ('a', 'b')}), or Schedule.from_sequence(graph, ['a', 'b'])")
        if not isinstance(self.proven_bound, (int, float)) or math.isnan(self.proven_bound):
            raise ScheduleError(f"the proven bound of a schedule is {self.proven_bound!r}", hint="give seconds, or 0")
        object.__setattr__(self, "orders", orders)

    @classmethod
    def from_sequence(
        cls, graph: TaskGraph, names: Iterable[str], *, blocking: bool = False, proven_bound: float = 0.0
    ) -> Schedule:
        """The orders within one total order of all tasks.

        Raises ScheduleError where a task comes before one that it needs, is missing, unknown, or there twice.
        """
        sequence = list(names)
        orders: dict[str, list[str]] = {resource: [] for resource in graph.resources}
        place = {name: i for i, name in reversed([*enumerate(sequence)])}  # the first place of each
        for name in sequence:
            if name not in graph:
                raise _unknown(graph, name)
            orders[graph[name].resource].append(name)
            for needed in graph[name].after:
                if place.get(needed, -1) > place[name]:
                    raise ScheduleError(f"{name} runs before {needed}, which it needs")
        schedule = cls({resource: tuple(order) for resource, order in orders.items()}, blocking, proven_bound)
        _check_complete(graph, schedule)
        return schedule

    def total_order(self, graph: TaskGraph) -> list[str]:
        """One order of all tasks that keeps every dependency and every resource's order; the same on every rank.

        Tasks are issued as they start in the simulation, communication before computation that starts with it. A
        blocking schedule keeps the order of the graph instead.
        """
        preds, succs = queue_edges(graph, self)
        sequence = topological(preds, succs, place_in_order(graph))
        if not self.blocking:
            ends = end_times(graph, sequence)
            key = [(end - graph.durations[i], graph.tasks[i].resource == COMPUTE) for i, end in enumerate(ends)]
            sequence = topological(preds, succs, key)
        return [graph.tasks[i].name for i in sequence]


def place_in_order(graph: TaskGraph) -> list[int]:
    """Per task, its place in the graph's own topological order."""
    place = [0] * len(graph)
    for position, i in enumerate(graph.order):
        place[i] = position
    return place


def end_times(graph: TaskGraph, sequence: Sequence[int]) -> list[float]:
    """Ends, by position, when every task starts as soon as it may and resources take their tasks in this order."""
    free = [0.0] * len(graph.resources)
    ends = [0.0] * len(graph.tasks)
    preds, lanes, durations = graph.preds, graph.lane, graph.durations
    for i in sequence:
        lane = lanes[i]
        start = free[lane]
        for pred in preds[i]:
            if ends[pred] > start:
                start = ends[pred]
        ends[i] = free[lane] = start + durations[i]
    return ends


def queue_edges(graph: TaskGraph, schedule: Schedule) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Predecessors and successors by position: the dependencies, and each resource's next task after the one before."""
    preds, succs = list(graph.preds), list(graph.succs)
    for order in schedule.orders.values():
        queue = [graph.index[name] for name in order]
        for before, after in pairwise(queue):
            preds[after] = (*preds[after], before)
            succs[before] = (*succs[before], after)
    return preds, succs


def check(graph: TaskGraph, schedule: Schedule) -> None:
    """Raises ScheduleError, naming the culprit, unless every task can run exactly once in these orders.

    Refused are an unknown, missing or repeated task, a task in another resource's order, a task before one of the same
    resource that it needs (perhaps through others), and orders that wait for one another in a cycle.
    """
    _check_complete(graph, schedule)
    _check_dependencies(graph, schedule)
    preds, succs = queue_edges(graph, schedule)
    done = topological(preds, succs, range(len(graph)))
    if len(done) < len(graph):
        edges = nx.DiGraph([(i, p) for i in range(len(graph)) for p in preds[i]])
        cycle = [edge[0] for edge in nx.find_cycle(edges.subgraph(set(range(len(graph))) - set(done)))]
        steps = []
        for i, blocker in zip(cycle, [*cycle[1:], cycle[0]]):
            task, other = graph.tasks[i], graph.tasks[blocker]
            why = "needs" if other.name in task.after else f"comes on {task.resource} after"
            steps.append(f"{task.name} {why} {other.name}")
        raise ScheduleError(f"the orders of the resources wait for one another: {', '.join(steps)}",
                            hint="take the orders of all resources from one total order (Schedule.from_sequence)")


def _unknown(graph: TaskGraph, name: str) -> ScheduleError:
    return ScheduleError(f"the order has {name}, which is not a task of this graph",
                         hint=f"it has {len(graph)} tasks: {', '.join(list(graph.index)[:8])} ...")


def _check_complete(graph: TaskGraph, schedule: Schedule) -> None:
    seen: set[str] = set()
    for resource, order in schedule.orders.items():
        for name in order:
            if name not in graph:
                raise _unknown(graph, name)
            if graph[name].resource != resource:
                raise ScheduleError(f"{name} is in the order of {resource}, but it runs on {graph[name].resource}")
            if name in seen:
                raise ScheduleError(f"{name} is twice in the order of {resource}")
            seen.add(name)
    missing = [task.name for task in graph if task.name not in seen]
    if missing:
        raise ScheduleError(f"the order lacks {', '.join(missing[:8])}", hint="every task must run exactly once")


def _check_dependencies(graph: TaskGraph, schedule: Schedule) -> None:
    """Within each resource: nothing before what it needs. Sets of tasks are bit masks."""
    for order in schedule.orders.values():
        queue = [graph.index[name] for name in order]
        later = sum(1 << i for i in queue)
        for i in queue:
            later &= ~(1 << i)
            broken = graph.needed[i] & later
            if broken:
                direct = [p for p in graph.preds[i] if broken >> p & 1]
                culprit = direct[0] if direct else next(j for j in queue if broken >> j & 1)
                through = "" if direct else " through other tasks"
                raise ScheduleError(
                    f"{graph.tasks[i].name} runs before {graph.tasks[culprit].name}, which it needs{through}"
                )
