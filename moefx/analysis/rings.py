"""Edges between tasks that bound how many chunks of a region hold values of one kind at the same time.

A kind is what every chunk of a region has once: rows that arrive, inner rows, results, what is sent. With s slots
chunk i may only make its value when all readers of chunk i - s are done. Every scheduler obeys, since these are edges
like others. A value that somebody reads through an exchange is free at its wait, which stands before who needs the slot
(a release).

Values that outlive the graph are in no ring, nor those of which readers need all chunks at once, nor what one
task makes and reads: of these there is never more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from moefx.analysis.tasks import Tasks, stage_of
from moefx.context.decisions import Chunk
from moefx.costmodel.tasks import TaskGraph, topological
from moefx.ir.edit import tensor_value
from moefx.ir.op import Stage
from moefx.ir.ops.order import start, wait
from moefx.ir.regions import region_of
from moefx.ir.rings import RING, Ring, looks, maker, readers

_OF_ROWS = (Stage.OUT, Stage.BACK, Stage.COMPRESS, Stage.DECOMPRESS)  # rows of any dtype: a codec's may be bytes


@dataclass(frozen=True)
class _Kind:
    """members: one value per chunk. makers, users: by position in the task graph, who makes and who reads each."""

    members: list[Node]
    makers: list[int]
    users: list[set[int]]

    def edges(self, slots: int) -> list[tuple[int, int]]:
        return [(user, maker) for users, maker in zip(self.users, self.makers[slots:]) for user in sorted(users)]


def with_rings(tasks: Tasks, slots: int, chunks: Mapping[int, Chunk]) -> tuple[Tasks, list[str]]:
    """The tasks with edges that keep `slots` chunks of every kind alive at most, and the kinds that need more, in
    words. Their nodes are marked as members of a ring."""
    graph, notes = tasks.graph, []
    found: list[tuple[_Kind, int]] = []
    for kind in _kinds(tasks, chunks):
        least = next((d for d in range(1, len(kind.makers)) if not _against(graph, kind.edges(d))), len(kind.makers))
        if least < len(kind.makers):
            found.append((kind, max(slots, least)))
    edges = {edge for kind, held in found for edge in kind.edges(held)}
    if _is_cyclic(graph, edges):
        found, edges = _one_by_one(graph, found)
    for kind, held in found:
        ring = Ring(kind.members[0].name, held)
        if held < len(kind.members):
            for member in kind.members:
                member.meta[RING] = ring
        if held > slots:
            notes.append(f"{held} chunks hold what is like {ring.name}, not {slots}: chunks need one another")
    return _joined(tasks, edges), notes


def _joined(tasks: Tasks, edges: Iterable[tuple[int, int]]) -> Tasks:
    """The same tasks with more edges, by position; what is started is waited for where a task needs it gone."""
    graph = tasks.graph
    after = {task.name: {*task.after} for task in graph}
    releases: dict[str, list[Node]] = {}
    for before, behind in sorted(edges):
        first, name = graph.tasks[before].name, graph.tasks[behind].name
        after[name].add(first)
        node = tasks.nodes[first][0]
        if node.target is start:
            releases.setdefault(name, []).append(node)
    more = (replace(task, after=tuple(sorted(after[task.name]))) for task in graph)
    return replace(tasks, graph=TaskGraph(more), releases=releases)


def _one_by_one(graph: TaskGraph, found: list[tuple[_Kind, int]]) -> tuple[list[tuple[_Kind, int]], set]:
    """As many slots for each kind as it needs beside those before it."""
    edges: set[tuple[int, int]] = set()
    settled = []
    for kind, held in found:
        while _is_cyclic(graph, edges.union(kind.edges(held))):
            held += 1
        edges.update(kind.edges(held))
        settled.append((kind, held))
    return settled, edges


def _against(graph: TaskGraph, edges: Iterable[tuple[int, int]]) -> bool:
    """Whether the task that an edge comes from needs the one that it leads to."""
    return any(before == behind or graph.needed[before] >> behind & 1 for before, behind in edges)


def _is_cyclic(graph: TaskGraph, edges: Iterable[tuple[int, int]]) -> bool:
    preds, succs = [*map(list, graph.preds)], [*map(list, graph.succs)]
    for before, behind in edges:
        preds[behind].append(before)
        succs[before].append(behind)
    return len(topological(preds, succs, range(len(graph)))) < len(graph)


def _kinds(tasks: Tasks, chunks: Mapping[int, Chunk]) -> list[_Kind]:
    """Values of equal structure, of which every chunk has as many: the first of each, the second of each, .."""
    at = {node: tasks.graph.index[name] for name, nodes in tasks.nodes.items() for node in nodes}
    like: dict[object, list[list[Node]]] = {}
    for node in _values(tasks):
        chunk = chunks.get(region_of(node))
        if chunk is not None and _holds_rows(node):
            like.setdefault((chunk.of, *_structure(node)), [[] for _ in range(chunk.n)])[chunk.index].append(node)
    kinds = []
    for lists in like.values():
        for members in zip(*lists) if len({*map(len, lists)}) == 1 else ():
            users = [readers(member) for member in members]
            if not all(user in at for each in users for user in each):
                continue  # it is returned, or a weight gradient that others are added to
            kind = _Kind([*members], [at[maker(node)] for node in members], [{at[u] for u in each} for each in users])
            if any(mine != {made} for mine, made in zip(kind.users, kind.makers)):
                kinds.append(kind)
    return kinds


def _values(tasks: Tasks) -> Iterable[Node]:
    """What tasks make, in order; of an exchange its result."""
    for nodes in tasks.nodes.values():
        for node in nodes:
            yield from node.users if node.target is start else [node]


def _holds_rows(node: Node) -> bool:
    value = tensor_value(node)
    if value is None or value.dim() < 2 or looks(node):
        return False
    return value.is_floating_point() or stage_of(maker(node)) in _OF_ROWS


def _structure(node: Node) -> tuple[object, ...]:
    """What is the same for all chunks: the op, its inputs' ops, and sizes that are numbers."""
    made, value = maker(node), tensor_value(node)
    which = node.args[1] if made is not node and node.target is not wait else 0
    inputs = tuple(_op(each) for each in made.all_input_nodes if isinstance(tensor_value(each), torch.Tensor))
    return _op(made), which, value.dtype, tuple(s for s in value.shape if isinstance(s, int)), inputs


def _op(node: Node) -> object:
    node = node.args[0] if node.target is wait else node
    return node.args[0] if node.target is start else node.target if node.op == "call_function" else node.op
