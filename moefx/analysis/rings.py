"""Edges between tasks that bound how much memory is held for later: rings and windows.

A ring bounds how many chunks of a region hold values of one kind. A kind is what every chunk of a region has once: rows
that arrive, inner rows, results, what is sent. With s slots chunk i may only make its value when all readers of chunk
i - s are done. What travels has the slots that were asked for, so that one chunk is computed while another one is on
its way; what is made and read here has one (MPipeMoE, section III-C: T_DI and T_DO have two, T_M one). Values that
outlive the graph are in no ring, nor those of which readers need all chunks at once, nor what one task makes and reads:
of these there is never more than one.

A window bounds how far a queue runs ahead: what it brings for the backward, or takes away for it, is started when the
unit so many places before has been read, or has left.

Every scheduler obeys, since these are edges like others. A value that somebody reads through an exchange is free at its
wait, which stands before who needs the room (a release).
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
from moefx.ir.rings import RING, Ring, done, looks, maker, readers

_OF_ROWS = (Stage.OUT, Stage.BACK, Stage.COMPRESS, Stage.DECOMPRESS)  # rows of any dtype: a codec's may be bytes


WINDOWS = {"d2h": 2, "h2d": 2, Stage.WEIGHTS.value: 2, Stage.COPIES.value: 2, Stage.SHARDS.value: 1}
_AWAY = ("d2h", Stage.COPIES.value, Stage.SHARDS.value)  # what they take with them is free at the wait


@dataclass(frozen=True)
class _Kind:
    """members: values that do not all fit at once, in order. makers, users: by position in the task graph, who makes
    and who reads each; readers: the nodes. held: how many are alive at once, at most."""

    name: str
    members: list[Node]
    makers: list[int]
    users: list[set[int]]
    readers: list[list[Node]]
    held: int

    @property
    def edges(self) -> list[tuple[int, int]]:
        return [(user, maker) for users, maker in zip(self.users, self.makers[self.held :]) for user in sorted(users)]


def bounded(tasks: Tasks, slots: int, chunks: Mapping[int, Chunk],
            windows: Mapping[str, int] = WINDOWS) -> tuple[Tasks, list[str]]:  # fmt: skip
    """The tasks with edges that keep `slots` chunks of what travels, and one of other kinds, at most (0: all), and
    queues within their windows; and what needs more room, in words. Their nodes are marked as members of a ring."""
    graph, rings = tasks.graph, _rings(tasks, slots, chunks)
    found = [fit for kind in rings if (fit := _alone(graph, kind)).held < len(kind.members)]
    ringed = {node for kind in found for node in kind.members}
    found += [_alone(graph, kind) for queue in windows for kind in _window(tasks, queue, windows[queue], ringed)]
    wanted = {kind.name: kind.held for kind in rings} | dict(windows)
    if _is_cyclic(graph, [edge for kind in found for edge in kind.edges]):
        found = _one_by_one(graph, found)
    for kind in found:
        ring = Ring(kind.name, kind.held)
        for member, reading in zip(kind.members, kind.readers) if kind.held < len(kind.members) else ():
            if reading == readers(member):
                member.meta[RING] = ring
    notes = [f"{kind.held} values like {kind.name} are alive at once, not {wanted[kind.name]}: they need one another"
             for kind in found if kind.held > wanted[kind.name]]  # fmt: skip
    return _joined(tasks, found), notes


def _joined(tasks: Tasks, found: Iterable[_Kind]) -> Tasks:
    """The same tasks with the edges of these kinds, and what must be done before each."""
    graph = tasks.graph
    after = {task.name: {*task.after} for task in graph}
    releases: dict[str, list[Node]] = {}
    for kind in found:
        for before, behind in kind.edges:
            after[graph.tasks[behind].name].add(graph.tasks[before].name)
        for reading, behind in zip(kind.readers, kind.makers[kind.held :]):
            releases.setdefault(graph.tasks[behind].name, []).extend(map(done, reading))
    more = (replace(task, after=tuple(sorted(after[task.name]))) for task in graph)
    return replace(tasks, graph=TaskGraph(more), releases=releases)


def _alone(graph: TaskGraph, kind: _Kind) -> _Kind:
    """With as many slots as it needs by itself."""
    while _against(graph, kind.edges):
        kind = replace(kind, held=kind.held + 1)
    return kind


def _one_by_one(graph: TaskGraph, found: list[_Kind]) -> list[_Kind]:
    """Each with as many slots as it needs beside those before it."""
    edges: list[tuple[int, int]] = []
    settled = []
    for kind in found:
        while _is_cyclic(graph, edges + kind.edges):
            kind = replace(kind, held=kind.held + 1)
        edges += kind.edges
        settled.append(kind)
    return settled


def _against(graph: TaskGraph, edges: Iterable[tuple[int, int]]) -> bool:
    """Whether the task that an edge comes from needs the one that it leads to."""
    return any(before == behind or graph.needed[before] >> behind & 1 for before, behind in edges)


def _is_cyclic(graph: TaskGraph, edges: Iterable[tuple[int, int]]) -> bool:
    preds, succs = [*map(list, graph.preds)], [*map(list, graph.succs)]
    for before, behind in edges:
        preds[behind].append(before)
        succs[before].append(behind)
    return len(topological(preds, succs, range(len(graph)))) < len(graph)


def _window(tasks: Tasks, queue: str, distance: int, ringed: set[Node]) -> list[_Kind]:
    """What a queue brings or takes away, apart from what is in rings, as one kind. What outlives the graph takes memory
    here until it has left. What is still read when more than a window has come behind it (weights that an embedding and
    a head share) is no part of it."""
    at = _places(tasks)
    begun = [tasks.nodes[task.name][0] for task in tasks.graph if task.resource == queue]
    units = [(node, value) for node in begun for value in node.users if value not in ringed]
    reading = [[node] if queue in _AWAY or any(user not in at for user in readers(value)) else readers(value)
               for node, value in units]  # fmt: skip
    needed = tasks.graph.needed
    later = [at[node] for node, _ in units[distance:]] if queue == Stage.WEIGHTS.value else []
    stays = {i for i, (each, place) in enumerate(zip(reading, later))
             if any(needed[at[reader]] >> place & 1 for reader in each)}  # fmt: skip
    units, reading = ([each for i, each in enumerate(some) if i not in stays] for some in (units, reading))
    if len(units) <= distance:
        return []
    users = [{at[reader] for reader in each} for each in reading]
    return [_Kind(queue, [value for _, value in units], [at[node] for node, _ in units], users, reading, distance)]


def _rings(tasks: Tasks, slots: int, chunks: Mapping[int, Chunk]) -> list[_Kind]:
    """Values of equal structure, of which every chunk has as many: the first of each, the second of each, .."""
    at = _places(tasks)
    like: dict[object, list[list[Node]]] = {}
    for node in _values(tasks) if slots else ():
        chunk = chunks.get(region_of(node))
        if chunk is not None and _holds_rows(node):
            like.setdefault((chunk.of, *_structure(node)), [[] for _ in range(chunk.n)])[chunk.index].append(node)
    kinds = []
    for lists in like.values():
        for members in zip(*lists) if len({*map(len, lists)}) == 1 else ():
            reading = [readers(member) for member in members]
            if not all(user in at for each in reading for user in each):
                continue  # it is returned, or a weight gradient that others are added to
            makers, users = [at[maker(node)] for node in members], [{at[user] for user in each} for each in reading]
            if any(mine != {made} for mine, made in zip(users, makers)):
                held = slots if any(map(_travels, members)) else 1
                kinds.append(_Kind(members[0].name, [*members], makers, users, reading, held))
    return kinds


def _travels(node: Node) -> bool:
    """Whether a value is on its way for a part of its life."""
    return maker(node).target is start or any(reader.target is start for reader in readers(node))


def _places(tasks: Tasks) -> dict[Node, int]:
    """Per node, its task's position in the graph."""
    return {node: tasks.graph.index[name] for name, nodes in tasks.nodes.items() for node in nodes}


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
