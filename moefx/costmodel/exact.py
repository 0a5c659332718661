"""Exact schedules: a Pareto dynamic programme for a layer, and CP-SAT for what is larger (extra `exact`).

Both work to a fixed amount of work, not to a clock, so that all ranks find the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moefx.costmodel.tasks import TaskGraph, end_times, place_in_order

try:
    from ortools.sat.python import cp_model
except ImportError:
    cp_model = None

HAVE_CP_SAT = cp_model is not None


@dataclass(frozen=True)
class Found:
    """What a search brought.

    sequence: a total order of positions that is better than the given one, or None.
    bound: seconds that no schedule can beat; 0 if nothing was proved.
    """

    sequence: list[int] | None
    bound: float


def chunk_edges(graph: TaskGraph) -> list[tuple[int, int]]:
    """(before, after) pairs that put the tasks of every kind in the order of chunks, where that costs nothing.

    With identical chunks some best schedule has it: sort the starts of every kind and hand them out in the order of
    chunks; the j-th start of a kind still comes after the j-th end of the kind that it needs, or after the (j - s)-th
    where there is room for s chunks. For that the tasks of a kind must agree in duration and resource, and need only
    tasks of their own chunk, or of one so many chunks earlier, or all tasks of a kind. Otherwise the result is empty.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    group_of: dict[int, tuple[object, ...]] = {}
    for i in graph.order:
        task = graph.tasks[i]
        repeat = (task.layer, task.kind, task.resource, task.chunk)
        key = (task.layer, task.kind, task.resource, seen[repeat])
        seen[repeat] += 1
        groups[key].append(i)
        group_of[i] = key
    for members in groups.values():
        members.sort(key=lambda i: graph.tasks[i].chunk)
        if len({graph.durations[i] for i in members}) > 1 or not _alike(graph, members, groups, group_of):
            return []
    return [pair for members in groups.values() for pair in pairwise(members)]


def _alike(
    graph: TaskGraph, members: list[int], groups: dict[tuple[object, ...], list[int]],
    group_of: dict[int, tuple[object, ...]],
) -> bool:
    """Whether the members need the same kinds in the same way: all of a kind, or those that are so many chunks earlier
    (0: of their own chunk), as far as there are such."""
    chunks = [graph.tasks[i].chunk for i in members]
    needed: dict[tuple[object, ...], list[set[int]]] = defaultdict(lambda: [set() for _ in members])
    for place, i in enumerate(members):
        for pred in graph.preds[i]:
            needed[group_of[pred]][place].add(pred)
    for key, found in needed.items():
        if all(preds == set(groups[key]) for preds in found):
            continue
        if [graph.tasks[i].chunk for i in groups[key]] != chunks:
            return False
        lags = [{chunk - graph.tasks[p].chunk for p in preds} for chunk, preds in zip(chunks, found)]
        if any(lag < 0 for each in lags for lag in each):
            return False
        known = set().union(*lags)
        if any(each != {lag for lag in known if lag <= chunk - chunks[0]} for chunk, each in zip(chunks, lags)):
            return False
    return True


def pareto_search(graph: TaskGraph, upper: float, edges: Sequence[tuple[int, int]], max_labels: int) -> Found:
    """A schedule of less than `upper` seconds with the least makespan, or the proof that there is none.

    Dynamic programme over sets of scheduled tasks (Gromicho et al., Computers and Operations Research 39(12), 2012).
    A label of a set holds when each resource is free and when the results still waited for are there; a label that is
    nowhere earlier than another of its set is dropped. A label branches as in Giffler and Thompson's active schedules:
    of the task that could end first, and of those that could start on its resource before that end. Labels whose
    remaining work cannot end before `upper` are dropped as well.

    Where more than `max_labels` would be needed it becomes a beam search: each level (number of scheduled tasks) keeps
    the labels of least bound, as many as its share of what is left. Then nothing is proved.
    """
    search = _Pareto(graph, upper, edges)
    level: dict[int, list[_Label]] = {0: [_Label((0.0,) * len(graph.resources), {}, None, (0.0, 0.0))]}
    proved = True
    for step in range(len(graph)):
        following: dict[int, list[_Label]] = {}
        for done, labels in level.items():
            for label in labels:
                for task, start in search.branches(done, label):
                    new = search.extend(done, label, task, start)
                    if new.bound[0] < search.upper:
                        search.add(following.setdefault(done | 1 << task, []), new)
        width = max(1, max_labels // (len(graph) - step))
        count = sum(map(len, following.values()))
        if count > width:
            following, count, proved = _least(following, width), width, False
        max_labels -= count
        level = following
    best = min((label for labels in level.values() for label in labels), key=lambda label: label.bound, default=None)
    if best is None:
        return Found(None, upper if proved else 0.0)
    sequence = best.sequence()
    return Found(sequence, max(end_times(graph, sequence)) if proved else 0.0)


def _least(level: dict[int, list[_Label]], width: int) -> dict[int, list[_Label]]:
    """The `width` labels of least bound."""
    labels = sorted(((label, done) for done, labels in level.items() for label in labels), key=lambda at: at[0].bound)
    kept: dict[int, list[_Label]] = {}
    for label, done in labels[:width]:
        kept.setdefault(done, []).append(label)
    return kept


class _Label:
    """One way to run a set of tasks.

    free: when each resource is free. open: position -> end, of tasks with successors yet to be scheduled. bound: what
    no completion beats, and the sum of what no resource beats (a tie goes to the one with less idle time).
    """

    __slots__ = ("bound", "free", "open", "path")

    def __init__(
        self, free: tuple[float, ...], open_ends: dict[int, float], path: tuple[int, Any] | None,
        bound: tuple[float, float],
    ) -> None:
        self.free, self.open, self.path, self.bound = free, open_ends, path, bound

    def sequence(self) -> list[int]:
        result, path = [], self.path
        while path is not None:
            result.append(path[0])
            path = path[1]
        return result[::-1]


class _Pareto:
    """The parts of `pareto_search` that know the graph."""

    def __init__(self, graph: TaskGraph, upper: float, edges: Sequence[tuple[int, int]]) -> None:
        self.graph, self.upper = graph, upper * (1 - 1e-9)
        self.needed = [sum(1 << p for p in preds) for preds in graph.preds]
        for before, after in edges:
            self.needed[after] |= 1 << before
        self.users = [sum(1 << s for s in succs) for succs in graph.succs]
        self.rests: dict[int, list[tuple[float, float]]] = {}
        self.allowed: dict[int, list[int]] = {}

    def may_start(self, done: int) -> list[int]:
        if done not in self.allowed:
            self.allowed[done] = [i for i, needed in enumerate(self.needed)
                                  if not done >> i & 1 and needed & done == needed]
        return self.allowed[done]

    def rest(self, done: int) -> list[tuple[float, float]]:
        """Per resource: work to do and least tail after it."""
        if done not in self.rests:
            graph = self.graph
            left = [[i for i in range(len(graph)) if graph.lane[i] == lane and not done >> i & 1]
                    for lane in range(len(graph.resources))]
            self.rests[done] = [(sum(graph.durations[i] for i in tasks),
                                 min((graph.tails[i] for i in tasks), default=0.0)) for tasks in left]
        return self.rests[done]

    def branches(self, done: int, label: _Label) -> list[tuple[int, float]]:
        """(task, start) pairs that may come next; none where the label cannot get below the upper bound."""
        graph, free, open_ends = self.graph, label.free, label.open
        starts = []
        for i in self.may_start(done):
            start = free[graph.lane[i]]
            for pred in graph.preds[i]:
                end = open_ends.get(pred, 0.0)
                if end > start:
                    start = end
            end = start + graph.durations[i]
            if end + graph.tails[i] >= self.upper:
                return []
            starts.append((end, start, i))
        first, _, chosen = min(starts)
        lane = graph.lane[chosen]
        return [(i, start) for _, start, i in starts if i == chosen or (graph.lane[i] == lane and start < first)]

    def extend(self, done: int, label: _Label, task: int, start: float) -> _Label:
        graph = self.graph
        done |= 1 << task
        end = start + graph.durations[task]
        lane = graph.lane[task]
        free = (*label.free[:lane], end, *label.free[lane + 1 :])
        open_ends = {i: at for i, at in label.open.items() if self.users[i] & ~done}
        if self.users[task] & ~done:
            open_ends[task] = end
        lanes = [now + work + tail for now, (work, tail) in zip(free, self.rest(done))]
        return _Label(free, open_ends, (task, label.path), (max(lanes), sum(lanes)))

    def add(self, labels: list[_Label], new: _Label) -> None:
        """Keeps only labels that are somewhere earlier than every other one of their set."""
        for old in labels:
            if self.before(old, new):
                return
        labels[:] = [old for old in labels if not self.before(new, old)]
        labels.append(new)

    def before(self, one: _Label, other: _Label) -> bool:
        """Whether `one` is nowhere later than `other`. A result matters only once its users' resource is free."""
        for mine, theirs in zip(one.free, other.free):
            if mine > theirs:
                return False
        for i, end in one.open.items():
            if end > other.open[i] and any(end > other.free[self.graph.lane[s]] for s in self.graph.succs[i]):
                return False
        return True


def cp_sat_search(graph: TaskGraph, incumbent: Sequence[int], edges: Sequence[tuple[int, int]], effort: float) -> Found:
    """The best schedule that OR-tools' CP-SAT finds from `incumbent` within `effort` of its deterministic seconds.

    Durations are rounded down to integers, so that its bound holds for the true ones; coarsely at first, since CP-SAT
    crawls over wide domains. One worker and a fixed seed: the same answer everywhere.
    """
    best, found, bound = max(end_times(graph, incumbent)), list(incumbent), 0.0
    for scale in _scales(graph):
        sequence, proved = _cp_sat(graph, found, edges, scale, effort / 2)
        bound = max(bound, proved)
        length = max(end_times(graph, sequence))
        if length < best:
            best, found = length, sequence
        if best <= bound * (1 + 1e-9):
            break
    return Found(None if found == list(incumbent) else found, bound)


def _scales(graph: TaskGraph) -> list[float]:
    """Ticks per second to try: 1 if that is exact, else ten thousand and a million in all the work."""
    total = math.fsum(graph.durations)
    if total <= 1e5 and all(duration.is_integer() for duration in graph.durations):
        return [1.0]
    return [1e4 / total, 1e6 / total]


def _cp_sat(
    graph: TaskGraph, incumbent: list[int], edges: Sequence[tuple[int, int]], scale: float, effort: float
) -> tuple[list[int], float]:
    """The best order found (the incumbent if none) and the bound in seconds, with durations of whole ticks."""
    durations = [math.floor(duration * scale) for duration in graph.durations]
    ends = _integer_ends(graph, durations, incumbent)
    horizon = max(ends)
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, horizon, "") for _ in graph]
    makespan = model.new_int_var(0, horizon, "")
    for i, preds in enumerate(graph.preds):
        model.add(starts[i] + durations[i] <= makespan)
        for pred in preds:
            model.add(starts[i] >= starts[pred] + durations[pred])
    for before, after in edges:
        model.add(starts[after] >= starts[before])
    for lane in range(len(graph.resources)):
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[i], durations[i], "")
                              for i in range(len(graph)) if graph.lane[i] == lane])
    model.minimize(makespan)
    for i, end in enumerate(ends):
        model.add_hint(starts[i], end - durations[i])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return incumbent, 0.0
    place = place_in_order(graph)
    at = [solver.value(start) for start in starts]
    # Tasks of no ticks come first, and among themselves as they need one another.
    sequence = sorted(range(len(graph)), key=lambda i: (at[i], durations[i] > 0, place[i]))
    return sequence, solver.best_objective_bound / scale


def _integer_ends(graph: TaskGraph, durations: Sequence[int], sequence: Sequence[int]) -> list[int]:
    free = [0] * len(graph.resources)
    ends = [0] * len(graph)
    for i in sequence:
        start = max([free[graph.lane[i]], *(ends[pred] for pred in graph.preds[i])])
        ends[i] = free[graph.lane[i]] = start + durations[i]
    return ends
