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
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from moefx.costmodel.schedulers import Plan
from moefx.costmodel.simulate import Rates, simulate
from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph
from moefx.errors import ScheduleError

REDUCTION = "AR"
TRIES = 16
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
    """A plan of the same orders in which fillers are held back, unless that takes longer: all of them, those that fit
    between exchanges, or some. weights: the resource of gathers of weights."""
    fillers = [task for task in graph if task.link and (task.kind == REDUCTION or task.resource == weights)]
    if not fillers or plan.schedule.blocking:
        return Filled(graph, plan)
    names, links = {task.name for task in fillers}, {task.link for task in fillers}
    exchanges = [task.name for task in graph if task.link in links and task.name not in names]
    places, best = _Places(graph, plan, fillers, rates), Filled(graph, plan)
    fitting = {name: other for name, other in places.behind.items() if name in places.fitting}
    for behind in (places.behind, fitting):
        best = _better(best, behind, graph, exchanges, rates)
    left = [name for name in places.behind if name not in best.behind]
    several = max(1, -(-len(left) // TRIES))
    for at in range(0, len(left), several):
        more = {name: places.behind[name] for name in left[at : at + several]}
        best = _better(best, {**best.behind, **more}, graph, exchanges, rates)
    reductions = {task.name for task in fillers if task.kind == REDUCTION}
    return replace(best, fits=len(reductions - beside(best.graph, best.plan, names)), of=len(reductions))


def _better(best: Filled, behind: Mapping[str, str], graph: TaskGraph, exchanges: Collection[str],
            rates: Rates | None) -> Filled:  # fmt: skip
    """What holds these back, if the program takes no longer, and exchanges take less; else the best so far."""
    try:
        other = TaskGraph(replace(task, after=(*task.after, behind[task.name])) if task.name in behind else task
                          for task in graph)  # fmt: skip
        timeline = simulate(other, best.plan.schedule, rates)
    except ScheduleError:  # memory that one of them gives free is wanted before
        return best
    old, new = ((each.makespan, sum(each.end[name] - each.start[name] for name in exchanges))
                for each in (best.plan.timeline, timeline))  # fmt: skip
    is_shorter = new[0] * _SAME < old[0]
    if not (is_shorter or (new[0] <= old[0] * _SAME and new[1] * _SAME < old[1])):
        return best
    bound = min(best.plan.lower_bound, new[0])
    gap = (new[0] - bound) / bound if bound else 0.0
    return Filled(other, replace(best.plan, timeline=timeline, lower_bound=bound, gap=gap), behind)


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


def _is_last(graph: TaskGraph, task: Task, fillers: Set[str]) -> bool:
    """Whether nobody but other fillers waits for it."""
    succs = (graph.tasks[i] for i in graph.succs[graph.index[task.name]])
    return task.name in fillers and task.kind == REDUCTION and all(other.name in fillers for other in succs)


def beside(graph: TaskGraph, plan: Plan, fillers: Set[str]) -> set[str]:
    """The fillers beside which an exchange is on their link, as it is predicted."""
    timeline = plan.timeline
    spans: dict[str, list[tuple[float, float]]] = {}
    for task in graph:
        if task.link and task.name not in fillers:
            spans.setdefault(task.link, []).append((timeline.start[task.name], timeline.end[task.name]))
    return {task.name for task in graph if task.name in fillers
            and any(start * _SAME < timeline.end[task.name] and timeline.start[task.name] * _SAME < end
                    for start, end in spans.get(task.link, ()))}  # fmt: skip
