"""Where links are idle: what nobody waits for soon travels there, and holds no exchange up.

Reductions of gradients, and gathers of weights that a layer reads later, share links with exchanges of rows. Without
preemption one that has begun takes of an exchange's bandwidth until it is done. So each of them is held back to the
first place where it fits between two exchanges on its link, as they run without it, and before whoever reads it; a
reduction that fits nowhere comes behind the last exchange. A place where something can begin is the end of a task that
computes, or of the exchange that the compute stream then waits for: there the host is.

Whether that is taken is for the simulator to say: a program may end sooner if an exchange that hides anyway takes
longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moefx.costmodel.schedulers import Plan
from moefx.costmodel.simulate import Rates, Timeline, simulate
from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph
from moefx.errors import ScheduleError

REDUCTION = "AR"
_SAME = 1 + 1e-9


@dataclass(frozen=True)
class Filled:
    """graph: with an edge to each task that is held back, from what it is held back behind, `behind`. fits: how many
    reductions lie beside no exchange of their link, in the plan as it is predicted; of so many."""

    graph: TaskGraph
    plan: Plan
    behind: Mapping[str, str] = field(default_factory=dict)
    fits: int = 0
    of: int = 0


def filled(graph: TaskGraph, plan: Plan, weights: str, rates: Rates | None = None) -> Filled:
    """A plan of the same orders in which fillers are held back, unless that takes longer. weights: the resource of
    gathers of weights."""
    fillers = [task for task in graph if task.link and (task.kind == REDUCTION or task.resource == weights)]
    if not fillers or plan.schedule.blocking:
        return Filled(graph, plan)
    places = _Places(graph, plan, fillers, rates)
    best = Filled(graph, plan)
    for behind in (places.behind, {name: places.behind[name] for name in places.behind if name in places.fitting}):
        try:
            other = TaskGraph(replace(task, after=(*task.after, behind[task.name])) if task.name in behind else task
                              for task in graph)  # fmt: skip
            timeline = simulate(other, plan.schedule, rates)
        except ScheduleError:  # memory that one of them gives free is wanted before
            continue
        limit = best.plan.timeline.makespan * (1 if best.behind else _SAME)
        if behind and timeline.makespan <= limit:
            gap = (timeline.makespan - plan.lower_bound) / plan.lower_bound if plan.lower_bound else 0.0
            best = Filled(other, replace(plan, timeline=timeline, gap=gap), behind)
    reductions = [task for task in fillers if task.kind == REDUCTION]
    beside = _beside(best, {task.name for task in fillers})
    return replace(best, fits=sum(task.name not in beside for task in reductions), of=len(reductions))


class _Places:
    """behind: what each filler that cannot begin when it is ready begins behind. fitting: those of them that fit
    between two exchanges."""

    def __init__(self, graph: TaskGraph, plan: Plan, fillers: Iterable[Task], rates: Rates | None) -> None:
        names = {task.name for task in fillers}
        free = TaskGraph(replace(task, duration=0.0) if _is_last(graph, task, names) else task for task in graph)
        self.graph, self.timeline = graph, simulate(free, plan.schedule, rates)
        self.computing = self._spans(task for task in graph if task.resource == COMPUTE)
        self.links = {link: self._spans(task for task in graph if task.link == link and task.name not in names)
                      for link in {task.link for task in fillers}}  # fmt: skip
        self.behind: dict[str, str] = {}
        self.fitting: set[str] = set()
        ends: dict[str, float] = {}  # of the last filler in its queue
        for task in sorted(fillers, key=lambda task: (self.timeline.start[task.name], graph.index[task.name])):
            ready = max(self.timeline.start[task.name], ends.get(task.resource, 0.0))
            ends[task.resource] = self._place(task, ready) + task.duration

    def _spans(self, tasks: Iterable[Task]) -> list[tuple[float, float, str]]:
        spans = ((self.timeline.start[task.name], self.timeline.end[task.name], task.name) for task in tasks)
        return sorted(span for span in spans if span[0] < span[1])

    def _place(self, task: Task, ready: float) -> float:
        """When it begins."""
        succs = [self.graph.tasks[i].name for i in self.graph.succs[self.graph.index[task.name]]]
        limit = min((self.timeline.start[name] for name in succs), default=float("inf"))
        now, behind, fits = ready, None, True
        for start, end, name in self.links[task.link]:
            if end <= now * _SAME:
                continue
            if start * _SAME >= now + task.duration:
                break
            now, behind = self._next(end, name)
            fits = any(later > end for _, later, _ in self.links[task.link])
        if behind is None or now + task.duration > limit * _SAME:
            return ready
        self.behind[task.name] = behind
        if fits:
            self.fitting.add(task.name)
        return now

    def _next(self, end: float, name: str) -> tuple[float, str]:
        """When the host can begin something behind the end of an exchange, and behind what that is."""
        at = bisect_right(self.computing, (end / _SAME, float("inf"), "")) - 1
        if at >= 0 and self.computing[at][1] > end * _SAME:
            return self.computing[at][1], self.computing[at][2]
        return end, name


def _is_last(graph: TaskGraph, task: Task, fillers: set[str]) -> bool:
    """Whether nobody but other fillers waits for it."""
    succs = (graph.tasks[i] for i in graph.succs[graph.index[task.name]])
    return task.name in fillers and task.kind == REDUCTION and all(other.name in fillers for other in succs)


def _beside(filled: Filled, fillers: set[str]) -> set[str]:
    """The fillers beside which an exchange is on their link."""
    timeline: Timeline = filled.plan.timeline
    spans: dict[str, list[tuple[float, float]]] = {}
    for task in filled.graph:
        if task.link and task.name not in fillers:
            spans.setdefault(task.link, []).append((timeline.start[task.name], timeline.end[task.name]))
    return {task.name for task in filled.graph if task.name in fillers
            and any(start * _SAME < timeline.end[task.name] and timeline.start[task.name] * _SAME < end
                    for start, end in spans.get(task.link, ()))}  # fmt: skip
