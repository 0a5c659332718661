"""What a schedule costs: start and end of every task, and the makespan.

Resources take their tasks in order and without preemption, and start each one as soon as what it needs has ended.
Tasks on one link share it: an all-reduce beside an all-to-all takes of it what this one lacks. Links and resources slow
one another down while they are busy together (`Rates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moefx.costmodel.tasks import Schedule, TaskGraph, end_times
from moefx.errors import ScheduleError

Rates = Mapping[tuple[str, str], float]
"""(a, b) -> speed of a while b is busy, in (0, 1], of links and of resources that have none; what is not named is 1,
and where several are busy the speeds multiply. {("compute", "inter"): 0.93} is a compute stream that loses 7 % to a
busy link."""


@dataclass(frozen=True)
class Timeline:
    """What a simulation saw, in seconds. busy: during which each resource ran something."""

    start: Mapping[str, float]
    end: Mapping[str, float]
    makespan: float
    busy: Mapping[str, float]


def simulate(graph: TaskGraph, schedule: Schedule, rates: Rates | None = None) -> Timeline:
    """Runs the schedule on its resources. Raises ScheduleError for an illegal schedule or a rate outside (0, 1]."""
    sequence = [graph.index[name] for name in schedule.total_order(graph)]
    if len(sequence) < len(graph):
        raise ScheduleError("the schedule does not run every task", hint="costmodel.tasks.check says why")
    if schedule.blocking:
        ends = _one_at_a_time(graph, sequence)
        starts = [end - duration for end, duration in zip(ends, graph.durations)]
    else:
        starts, ends = times(graph, sequence, rates)
    spans = list(zip(starts, ends))
    names = [task.name for task in graph]
    return Timeline(
        start=dict(zip(names, starts)), end=dict(zip(names, ends)), makespan=max(ends, default=0.0),
        busy={resource: math.fsum(end - start for (start, end), other in zip(spans, graph.lane) if other == lane)
              for lane, resource in enumerate(graph.resources)},
    )


def times(graph: TaskGraph, sequence: Sequence[int], rates: Rates | None = None) -> tuple[list[float], list[float]]:
    """Starts and ends, by position, where every resource takes its tasks in the order of `sequence`, a total order."""
    if rates or graph.shares_links:
        return _with_interference(graph, sequence, rates or {})
    ends = end_times(graph, sequence)
    return [end - duration for end, duration in zip(ends, graph.durations)], ends


def _one_at_a_time(graph: TaskGraph, sequence: Sequence[int]) -> list[float]:
    ends, now = [0.0] * len(graph), 0.0
    for i in sequence:
        ends[i] = now = now + graph.durations[i]
    return ends


def _with_interference(graph: TaskGraph, sequence: Sequence[int], rates: Rates) -> tuple[list[float], list[float]]:
    """Event by event: between two events every running task advances at its share of its link times its pairwise rates.

    This is the exact solution of what an iteration over inflated durations only approaches.
    """
    for pair, rate in rates.items():
        if not 0 < rate <= 1:
            raise ScheduleError(f"the rate of {pair} is {rate}", hint="a rate is a speed in (0, 1]")
    queues: list[list[int]] = [[] for _ in graph.resources]
    for i in reversed(sequence):
        queues[graph.lane[i]].append(i)
    missing = [len(preds) for preds in graph.preds]
    left: dict[int, float] = {}  # running tasks -> seconds of undisturbed work to go
    starts, ends, now = [0.0] * len(graph), [0.0] * len(graph), 0.0
    while True:
        running = {graph.lane[i] for i in left}
        for lane, queue in enumerate(queues):
            if queue and lane not in running and not missing[queue[-1]]:
                task = queue.pop()
                starts[task], left[task] = now, graph.durations[task]
        if not left:
            return starts, ends
        speed = {i: _speed(graph, i, left, rates) for i in left}
        done = min(left, key=lambda i: (left[i] / speed[i], i))
        step = left[done] / speed[done]
        now += step
        for i in left:
            left[i] = max(0.0, left[i] - step * speed[i])
        del left[done]
        ends[done] = now
        for succ in graph.succs[done]:
            missing[succ] -= 1


def _speed(graph: TaskGraph, task: int, running: Iterable[int], rates: Rates) -> float:
    """A task that takes no time disturbs nobody."""
    mine = graph.tasks[task].busies
    others = [graph.tasks[i].busies for i in running if i != task and graph.durations[i]]
    slowed = (rates.get((mine, other), 1.0) for other in dict.fromkeys(others) if other != mine)
    return math.prod(slowed) / (1 + others.count(mine))
