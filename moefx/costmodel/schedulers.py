"""Schedulers by name: from a task graph to one order per resource.

    plan = schedule(graph, "optimal", budget_s=1.0)
    plan.timeline.makespan, plan.gap, plan.schedule.total_order(graph)

A scheduler is a function (graph, budget_s) -> Schedule; `register_scheduler` adds one. What it returns is checked, so
an illegal order is an error that names the broken dependency; whatever it raises is an error that names its line. The
built-in ones are functions of the graph and the budget alone: they count their work instead of reading a clock, so all
ranks get the same order. The budget is seconds on a slow core; the constants below turn it into counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from moefx.costmodel.exact import HAVE_CP_SAT, chunk_edges, cp_sat_search, pareto_search
from moefx.costmodel.portfolio import candidates, neighbour, perturbations, schemoe
from moefx.costmodel.simulate import Rates, Timeline, simulate, times
from moefx.costmodel.tasks import Schedule, TaskGraph, check
from moefx.errors import ScheduleError
from moefx.options import NAMES
from moefx.registered import Registered, check_name

Scheduler = Callable[[TaskGraph, float], Schedule]

PLACEMENTS_PER_SECOND = 300_000  # of tasks, in candidate orders
LABELS_PER_SECOND = 10_000  # of the Pareto search
CP_SAT_PER_SECOND = 0.25  # of CP-SAT's deterministic seconds
PERTURBATIONS = 300
LABELS = 5_000  # of the heuristic
BEAM_TASKS = 250  # of a larger window a beam is too narrow to find anything


@dataclass(frozen=True)
class Plan:
    """A checked schedule and what it costs.

    lower_bound: seconds that no schedule can beat. gap: (makespan - lower_bound) / lower_bound, 0 if proven optimal;
    with interference the makespan includes it and the bound does not.
    """

    scheduler: str
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    gap: float


def sequential(graph: TaskGraph, budget_s: float = 0.0) -> Schedule:
    """No overlap: every task waits for the one before it in the graph's own order, chunk by chunk for a layer."""
    return replace(_as_schedule(graph, graph.order), blocking=True)


def optsche(graph: TaskGraph, budget_s: float = 0.0) -> Schedule:
    """ScheMoE's order (equation 12), literally, for every MoE layer of the graph.

    Compute: C1 of all chunks, then D1 E C2 chunk by chunk, then all D2. Communication: all A1, then all A2. A graph
    may hold more: layers come one after the other in the order of the graph; a dense task runs just before the first
    task that needs it; a weight gradient right after its input gradient, as autograd does; an all-reduce where the
    graph has it, but not within a layer.
    """
    return _as_schedule(graph, schemoe(graph))


def heuristic(graph: TaskGraph, budget_s: float = 1.0) -> Schedule:
    """The best of a portfolio: ScheMoE's order and its relatives (how far C1 and A1 run ahead, how far D2 lags, where
    weight gradients run, order of unequal chunks), list schedules, a beam search of small graphs, disturbed list
    schedules, and the best of these disturbed where that makes it shorter.

    What counts is the simulated time: a gradient's reduction that shares a link with an exchange holds it up, so the
    weight gradient before it may have to wait.

    Stops early at the lower bound. Uses half of the budget at most. The amount of work is fixed; the budget cuts it
    only for graphs so large, or budgets so small, that it would not fit. ScheMoE's order is always tried.
    """
    return _as_schedule(graph, *_heuristic(graph, budget_s))


def optimal(graph: TaskGraph, budget_s: float = 1.0) -> Schedule:
    """The heuristic's answer, improved or proved best by Pareto search and, if that gave up and OR-tools is installed
    (extra `exact`), by CP-SAT.

    Never worse than `heuristic` with the same budget, nor than `optsche`. Where a search ends within the budget the
    bound equals the makespan: for single layers of up to 5 chunks practically always.
    """
    best, bound = _heuristic(graph, budget_s)
    edges = chunk_edges(graph)
    if _is_better(bound, _makespan(graph, best)):
        found = pareto_search(graph, _makespan(graph, best), edges, int(budget_s / 4 * LABELS_PER_SECOND))
        best, bound = _shorter(graph, best, found.sequence), max(bound, found.bound)
    if HAVE_CP_SAT and _is_better(bound, _makespan(graph, best)):
        found = cp_sat_search(graph, best, edges, budget_s / 4 * CP_SAT_PER_SECOND)
        best, bound = _shorter(graph, best, found.sequence), max(bound, found.bound)
    return _as_schedule(graph, best, bound)


_schedulers: dict[str, Scheduler] = {
    "sequential": sequential, "optsche": optsche, "heuristic": heuristic, "optimal": optimal,
}
NAMES["scheduler"] = "scheduler", lambda: tuple(_schedulers)


def register_scheduler(name: str, fn: Scheduler) -> None:
    """Adds a scheduler: fn(graph, budget_s) -> Schedule. It must give the same on every rank: no clock, no chance.

    Raises ExtensionError if it is not a function, ScheduleError if the name is taken by another function.
    """
    check_name("scheduler", name)
    scheduler = Registered(f"the scheduler '{name}'", fn, (Schedule,))
    if _schedulers.get(name, fn) not in (fn, scheduler):
        raise ScheduleError(f"there is a scheduler {name!r} already", hint="choose another name")
    _schedulers.setdefault(name, scheduler)


def scheduler_names() -> tuple[str, ...]:
    """All names that `schedule` takes."""
    return tuple(_schedulers)


def schedule(graph: TaskGraph, name: str = "optsche", budget_s: float = 1.0, *, rates: Rates | None = None) -> Plan:
    """Runs a scheduler, checks its answer and simulates it (with interference, given `rates`).

    Raises ScheduleError for an unknown name and for an illegal order, naming what it breaks; ExtensionError where a
    scheduler of the user's raises, or returns something else.
    """
    if name not in _schedulers:
        raise ScheduleError(f"unknown scheduler {name!r}", hint=f"one of {', '.join(_schedulers)}")
    made = _schedulers[name](graph, budget_s)
    try:
        check(graph, made)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=f"the order of scheduler {name!r}", hint=error.hint) from error
    timeline = simulate(graph, made, rates)
    bound = min(max(graph.lower_bound(), made.proven_bound), timeline.makespan)
    return Plan(name, made, timeline, bound, (timeline.makespan - bound) / bound if bound else 0.0)


def _as_schedule(graph: TaskGraph, sequence: Iterable[int], proven_bound: float = 0.0) -> Schedule:
    return Schedule.from_sequence(graph, [graph.tasks[i].name for i in sequence], proven_bound=proven_bound)


def _makespan(graph: TaskGraph, sequence: list[int]) -> float:
    return max(times(graph, sequence)[1], default=0.0)


def _shorter(graph: TaskGraph, one: list[int], other: list[int] | None) -> list[int]:
    """A search that knows of no shared links may have found what takes longer with them."""
    return one if other is None or _makespan(graph, one) <= _makespan(graph, other) else other


def _is_better(one: float, other: float) -> bool:
    """Less by more than rounding errors."""
    return one < other * (1 - 1e-9)


def _heuristic(graph: TaskGraph, budget_s: float) -> tuple[list[int], float]:
    """The order that the portfolio and the beam search find, and the bound they prove."""
    bound = graph.lower_bound()
    affordable = int(budget_s / 8 * PLACEMENTS_PER_SECOND / max(1, len(graph)))
    labels = min(LABELS, int(budget_s / 4 * LABELS_PER_SECOND))
    best = _best(graph, schemoe(graph), islice(candidates(graph), affordable), bound)
    if len(graph) <= BEAM_TASKS and _is_better(bound, _makespan(graph, best)):
        found = pareto_search(graph, _makespan(graph, best), chunk_edges(graph), labels)
        best, bound = _shorter(graph, best, found.sequence), max(bound, found.bound)
    count = min(PERTURBATIONS, affordable) // 2
    best = _best(graph, best, perturbations(graph, count), bound)
    return _climbed(graph, best, count, bound), bound


def _climbed(graph: TaskGraph, best: list[int], count: int, bound: float) -> list[int]:
    """The best of `count` steps from an order to a slightly other one, each of which takes no longer."""
    starts, ends = times(graph, best)
    least = max(ends, default=0.0)
    for number in range(count):
        if not _is_better(bound, least):
            break
        sequence = neighbour(graph, starts, least, number)
        found, ends = times(graph, sequence)
        if max(ends) <= least:
            best, starts, least = sequence, found, max(ends)
    return best


def _best(graph: TaskGraph, best: list[int], others: Iterable[list[int]], bound: float) -> list[int]:
    """The first of least makespan; looks no further once the bound is reached."""
    least = _makespan(graph, best)
    if not _is_better(bound, least):
        return best
    for sequence in others:
        length = _makespan(graph, sequence)
        if length < least:
            best, least = sequence, length
            if not _is_better(bound, least):
                break
    return best
