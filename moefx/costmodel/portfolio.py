"""Candidate orders for the heuristic scheduler: total orders, as positions of tasks, in a fixed sequence.

Every candidate is a topological order, so the orders of the resources within it can never wait for one another.

Two ways to make one. *By place*: every task has a place, and of all tasks that may come next the one of least place
does; `places` gives ScheMoE's order (equation 12) and its relatives. *By list*: time runs, and a free resource takes
the waiting task of least rank (non-delay list scheduling), which fills holes but never waits for something better.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import permutations, product
from typing import Any

from moefx.costmodel.tasks import TaskGraph, place_in_order, topological

STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2")
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Variant:
    """A relative of ScheMoE's order.

    c1_lead, a1_lead: how many chunks are compressed before the first block D1 E C2, and sent before the first A2; then
        one more for each block, or each A2. None for all, which is ScheMoE's order.
    d2_lag: blocks between that of a chunk and its D2; None for after all blocks.
    wgrad: when weight gradients run: "now" after their input gradient, "block" after C2 of their chunk, "mid" after
        the last C2 before D2, "end" after everything of the layer.
    chunks: the chunks in the order in which they are taken; empty for 0, 1, 2 ...
    """

    c1_lead: int | None = None
    a1_lead: int | None = None
    d2_lag: int | None = None
    wgrad: str = "now"
    chunks: tuple[int, ...] = ()


def by_place(graph: TaskGraph, variant: Variant) -> list[int]:
    """The candidate order of a variant."""
    return topological(graph.preds, graph.succs, places(graph, variant))


def schemoe(graph: TaskGraph) -> list[int]:
    """ScheMoE's order. Where there is room for so many chunks only, none is compressed, or combined, so that others
    would have to wait for it."""
    ahead, behind = _room(graph, "C1", STAGES[1:]), _room(graph, "A2", STAGES[-1:])
    return by_place(graph, Variant(c1_lead=ahead, d2_lag=behind and behind - 1))


def _room(graph: TaskGraph, kind: str, kinds: Sequence[str]) -> int | None:
    """How many chunks lie between a task and an earlier one of these kinds that it needs, at least."""
    return min(
        (
            task.chunk - other.chunk
            for i, task in enumerate(graph)
            if task.kind == kind
            for other in (graph.tasks[pred] for pred in graph.preds[i])
            if other.layer == task.layer and other.kind in kinds and other.chunk < task.chunk
        ),
        default=None,
    )


def places(graph: TaskGraph, variant: Variant) -> list[Place]:
    """Per task, where it wants to stand: (layer, slot, phase, chunk, stage, side, place in the graph's order).

    Layers come in the order of their first task. A dense task stands just before the first of its successors, so that
    it never holds up a chunk that does not need it; one without such successors (an all-reduce, a weight gradient of a
    dense layer) keeps its place in the graph's order, and so comes after the layer within which that lies.
    """
    position = place_in_order(graph)
    first: dict[int, int] = {}
    counts: dict[int, int] = {}
    for i in graph.order:
        task = graph.tasks[i]
        if task.kind in STAGES:
            first.setdefault(task.layer, position[i])
            counts[task.layer] = max(counts.get(task.layer, 0), task.chunk + 1)
    rank = {chunk: i for i, chunk in enumerate(variant.chunks)}
    base: list[Place | None] = [None] * len(graph)
    side = [0] * len(graph)
    for i, task in enumerate(graph):
        if task.layer in first and (task.kind in STAGES or task.kind == "W"):
            chunk, count = rank.get(task.chunk, task.chunk), counts[task.layer]
            base[i] = (first[task.layer], *_slot(variant, task.kind, chunk, count))
    for i in reversed(graph.order):
        near = [base[s] for s in graph.succs[i] if base[s] is not None]
        if base[i] is None and near:
            base[i], side[i] = min(near), -1
    for i in graph.order:
        if base[i] is None:
            base[i] = max([(position[i], 0, 0, 0, 0), *(base[p] for p in graph.preds[i])])
            side[i] = 1
    return [(*base[i], side[i], position[i]) for i in range(len(graph))]


def _slot(variant: Variant, kind: str, chunk: int, count: int) -> Place:
    """(slot, phase, chunk, stage). Slot i holds block i; within a slot: leading C1, leading A1, block, A2, D2."""
    c1, a1, lag = (count if lead is None else lead for lead in (variant.c1_lead, variant.a1_lead, variant.d2_lag))
    if kind == "C1":
        return max(0, chunk - c1 + 1), 0, chunk, 0
    if kind == "A1":
        return max(0, chunk - a1 + 1), 1, chunk, 0
    if kind == "A2":
        return chunk, 3, chunk, 0
    if kind == "D2":
        return min(chunk + lag, count), 4, chunk, 0
    if kind == "W":
        return {
            "now": (chunk, 2, chunk, 2),
            "block": (chunk, 2, chunk, 4),
            "mid": (count, 3, chunk, 0),
            "end": (count, 5, chunk, 0),
        }[variant.wgrad]
    return chunk, 2, chunk, {"D1": 0, "E": 1, "C2": 3}[kind]


def by_list(graph: TaskGraph, rank: Sequence[Any]) -> list[int]:
    """Non-delay list schedule: tasks in the order of their starts."""
    missing = [len(preds) for preds in graph.preds]
    ready: list[list[tuple[Any, int]]] = [[] for _ in graph.resources]
    for i, count in enumerate(missing):
        if not count:
            heappush(ready[graph.lane[i]], (rank[i], i))
    running: list[tuple[float, int]] = []
    busy = [False] * len(graph.resources)
    result: list[int] = []
    now = 0.0
    while len(result) < len(graph):
        for lane, queue in enumerate(ready):
            if queue and not busy[lane]:
                _, i = heappop(queue)
                result.append(i)
                busy[lane] = True
                heappush(running, (now + graph.durations[i], i))
        now = running[0][0]
        while running and running[0][0] <= now:
            _, i = heappop(running)
            busy[graph.lane[i]] = False
            for succ in graph.succs[i]:
                missing[succ] -= 1
                if not missing[succ]:
                    heappush(ready[graph.lane[succ]], (rank[succ], succ))
    return result


def candidates(graph: TaskGraph) -> Iterator[list[int]]:
    """The fixed part of the portfolio: ScheMoE's order first, then list schedules, then its relatives."""
    chunks = sorted({task.chunk for task in graph if task.kind in STAGES})
    wgrads = ("mid", "now", "block", "end") if any(task.kind == "W" for task in graph) else ("now",)
    orders = _chunk_orders(graph, chunks)
    yield schemoe(graph)
    yield by_list(graph, critical_path_rank(graph))
    for lag in (0, 1, 2):
        rank = by_levels(graph, lag)
        yield topological(graph.preds, graph.succs, rank)
        yield by_list(graph, rank)
    for order in orders:
        rank = places(graph, Variant(chunks=order))
        last = (max(rank, default=(0,))[0] + 1,)  # behind every layer
        yield by_list(graph, [last + key if task.kind == "W" else key for key, task in zip(rank, graph)])
    leads = _leads(len(chunks))
    for wgrad, order, c1, a1, lag in product(wgrads, orders, leads, leads, (0, *leads)):
        if a1 <= c1:  # nothing is sent before it is compressed
            yield by_place(graph, Variant(c1, a1, lag, wgrad, order))


def critical_path_rank(graph: TaskGraph) -> list[float]:
    """For `by_list`: the longest way to the end first."""
    return [-tail - duration for tail, duration in zip(graph.tails, graph.durations)]


def by_levels(graph: TaskGraph, lag: int) -> list[Place]:
    """Per task a place for parts of whole blocks, which run through several layers: (level, side, part, place in the
    graph's order). The parts take turns from exchange to exchange: all that one computes behind an exchange, up to its
    next one, attention of the next layer included, then the same of the next part.

    What no exchange of rows waits for, as weight gradients, comes `lag` levels later, behind the others."""
    exchanges = [task.kind in ("A1", "A2") for task in graph]
    level, source = [0] * len(graph), [0] * len(graph)
    for i in graph.order:
        level[i] = max((level[pred] + exchanges[pred] for pred in graph.preds[i]), default=0)
        own = graph.tasks[i].chunk if exchanges[i] else 0
        source[i] = max([own, *(source[pred] for pred in graph.preds[i])])
    target: list[int | None] = [None] * len(graph)
    for i in reversed(graph.order):
        found = [target[succ] for succ in graph.succs[i] if target[succ] is not None]
        target[i] = min([*found, *([graph.tasks[i].chunk] if exchanges[i] else [])], default=None)
    position = place_in_order(graph)
    return [(level[i] + lag, 1, source[i], position[i]) if target[i] is None else (level[i], 0, target[i], position[i])
            for i in range(len(graph))]  # fmt: skip


def _leads(chunks: int) -> list[int]:
    """Lead windows to try: all for few chunks, else a few up to all."""
    return list(range(1, chunks + 1)) if chunks <= 4 else sorted({1, 2, 3, chunks // 2, chunks})


def _chunk_orders(graph: TaskGraph, chunks: list[int]) -> list[tuple[int, ...]]:
    """Orders of the chunks to try: only the given one, unless their work differs by more than 5 %."""
    work = dict.fromkeys(chunks, 0.0)
    for task in graph:
        if task.chunk in work:
            work[task.chunk] += task.duration
    given = tuple(chunks)
    if len(chunks) < 2 or max(work.values()) <= 1.05 * min(work.values()):
        return [given]
    if len(chunks) <= 3:
        return list(permutations(given))
    up = tuple(sorted(chunks, key=lambda chunk: (work[chunk], chunk)))
    # Both valleys: the largest outside, the smallest inside.
    valleys = (up[::2][::-1] + up[1::2], up[1::2][::-1] + up[::2])
    return list(dict.fromkeys((given, up, up[::-1], *valleys)))


def perturbations(graph: TaskGraph, count: int) -> Iterator[list[int]]:
    """`count` list schedules by critical path with ranks disturbed at random, the same on every call.

    The disturbance grows from list to list, from a tenth of the longest tail to all of it.
    """
    source = random.Random(0)
    rank = critical_path_rank(graph)
    span = -min(rank, default=0.0)
    for number in range(count):
        width = span * (0.1 + 0.9 * number / count)
        yield by_list(graph, [length - width * source.random() for length in rank])


def neighbour(graph: TaskGraph, starts: Sequence[float], makespan: float, number: int) -> list[int]:
    """The order of a schedule's starts, a few of them shifted by up to a fifth of the makespan: as a list schedule, or
    every other time literally, so that a resource may wait for something better. The same for the same number."""
    source = random.Random(number)
    width = makespan * (0.01, 0.03, 0.1, 0.2)[number // 2 % 4]
    moved = [start + width * source.uniform(-1, 1) * (source.random() < 0.1) for start in starts]
    if number % 2:
        return topological(graph.preds, graph.succs, list(zip(moved, place_in_order(graph))))
    return by_list(graph, moved)
