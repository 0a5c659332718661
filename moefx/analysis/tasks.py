"""The tasks of a scheduled graph: what may run at a different time, as one task; what must not be told apart, together.

Communication runs from every `start` to its `wait`. Of the other nodes those form one task that come behind the same
exchanges and before the same exchanges: then no exchange can run between them, so nothing is lost by keeping them
together, and the tasks have no cycle. (A path from a task back into it would leave it through a node with the same
exchanges on both sides, which is in it.) Weight gradients of chunks are apart, whichever is added to which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from moefx.analysis.wgrad_sums import base_of, sums_of_wgrads
from moefx.axes import MeshSpec
from moefx.context.pass_types import PassContext
from moefx.costmodel.amounts import is_view
from moefx.costmodel.tasks import COMPUTE, Task, TaskGraph
from moefx.ir.op import BACKGROUND, Stage, lookup
from moefx.ir.ops.order import begun, start, unsplit, wait
from moefx.ir.randomness import draws_before
from moefx.ir.regions import region_of

ROUTE = "route"  # what the host waits for: the way to an exchange of counts
_KINDS = {Stage.OUT: "A1", Stage.BACK: "A2"}


@dataclass(frozen=True)
class Tasks:
    """graph: the tasks. nodes: the nodes of each, in graph order; a task of communication is its start alone. Waits,
    single results of one, and sums of weight gradients belong to no task: they stand where they are read. releases:
    what stands before a task, waits among it, since the task wants the memory of what was read."""

    graph: TaskGraph
    nodes: dict[str, list[Node]]
    releases: Mapping[str, list[Node]] = field(default_factory=dict)


def tasks_of(nodes: list[Node], ctx: PassContext, time_of: Callable[[Node], float]) -> Tasks:
    """The tasks of `nodes` (a scheduled graph without its inputs and output, in order). time_of: seconds of a node; of
    a start: of its whole exchange, of a wait: for which the exchange keeps what computes."""
    starts = [node for node in nodes if node.target is start]
    bit = {node: 1 << i for i, node in enumerate(starts)}
    draws = draws_before(nodes)
    sums = sums_of_wgrads(nodes)
    before, after = _exchanges_before(nodes, bit, draws), _exchanges_after(nodes, bit, draws)
    sides = {node: (before[node], after[node], node if node in bit else None)
             for node in nodes if begun(node) is None and node not in sums}  # fmt: skip
    if ctx.decisions.rings:
        _make_late(sides, draws, ctx)
    members: dict[tuple, list[Node]] = {}
    for node, key in sides.items():
        members.setdefault(key, []).append(node)
    ways = _Ways(starts, bit, ctx)
    names: dict[Node, str] = {}
    found: dict[str, list[Node]] = {}
    for group in members.values():
        name = group[0].name
        found[name] = group
        names.update(dict.fromkeys(group, name))
    tasks, taken = [], set()
    for name, group in found.items():
        needed = {each for node in group for a in _needed(node, draws) for each in _behind(a, sums)}
        needs = {names[each] for each in needed if each in names}
        kind, resource, layer, chunk = ways.label(group, *sides[group[0]][:2])
        seconds = sum(map(time_of, group))
        if resource == COMPUTE:  # it takes what exchanges bring, once
            arrives = {a for node in group for a in node.all_input_nodes if begun(a)} - taken
            taken |= arrives
            seconds += sum(map(time_of, arrives))
        link = _link_of(group[0], ctx.mesh) if resource != COMPUTE else ""
        tasks.append(Task(name, kind, resource, seconds, tuple(sorted(needs - {name})), chunk, layer, link))
    return Tasks(TaskGraph(tasks), found)


def _make_late(sides: dict[Node, tuple], draws: dict[Node, Node], ctx: PassContext) -> None:
    """Where the values of several chunks would be made at once, they are made where they are read, if that is one task.
    Then nothing leads from the task back to them: it would have led back into the task."""
    chunks: dict[tuple, set] = {}
    for node, key in sides.items():
        chunks.setdefault(key, set()).add(ctx.decisions.chunks.get(region_of(node)))
    drawn = {*draws, *draws.values()}
    for node in reversed(sides):
        reading = {sides.get(user) for user in node.users}
        if region_of(node) not in ctx.decisions.chunks or len(chunks[sides[node]] - {None}) < 2 or node in drawn:
            continue
        if len(reading) == 1 and (only := reading.pop()) is not None and only[2] is None:
            sides[node] = only


def _behind(node: Node, sums: Mapping[Node, list[Node]]) -> list[Node]:
    """The nodes of tasks that a node's value comes from."""
    return [started] if (started := begun(node)) else sums.get(node, [node])


def _needed(node: Node, draws: dict[Node, Node]) -> list[Node]:
    """What comes before a node: its inputs, and of random numbers those that are drawn before."""
    return [*node.all_input_nodes, draws[node]] if node in draws else node.all_input_nodes


def _exchanges_before(nodes: list[Node], bit: dict[Node, int], draws: dict[Node, Node]) -> dict[Node, int]:
    """Per node the set, as bits, of exchanges that it needs; an exchange does not need itself."""
    before: dict[Node, int] = {}
    for node in nodes:
        found, base = 0, base_of(node)
        for argument in _needed(node, draws):
            if argument is not base:
                found |= before.get(argument, 0) | bit.get(argument, 0)
        before[node] = found
    return before


def _exchanges_after(nodes: list[Node], bit: dict[Node, int], draws: dict[Node, Node]) -> dict[Node, int]:
    after: dict[Node, int] = {}
    drawn_next = {first: second for second, first in draws.items()}
    for node in reversed(nodes):
        found = 0
        for user in [*node.users, drawn_next[node]] if node in drawn_next else node.users:
            found |= after.get(user, 0) | bit.get(user, 0)
        after[node] = found
    return after


class _Ways:
    """The exchanges of rows of every region: out to the experts and back. They say which stage of an MoE layer a task
    is, in ScheMoE's names: C1 A1 D1 E C2 A2 D2, and W for weight gradients."""

    def __init__(self, starts: list[Node], bit: dict[Node, int], ctx: PassContext) -> None:
        self.ctx = ctx
        self.counts: dict[int | None, int] = {}
        self.out: dict[int, int] = {}
        self.back: dict[int, int] = {}
        for node in starts:
            region, stage = region_of(node), _side(node)
            way = {Stage.COUNTS: self.counts, Stage.OUT: self.out, Stage.BACK: self.back}.get(stage)
            if way is self.counts or (way is not None and region is not None):
                way[region] = way.get(region, 0) | bit[node]

    def label(self, group: list[Node], before: int, after: int) -> tuple[str, str, int, int]:
        """(kind, resource, layer, chunk) of a task."""
        first = group[0]
        if first.target is start:
            region, (op, call), side = region_of(first), unsplit(first), _side(first)
            is_of_rows = side in _KINDS and region is not None
            kind = "AR" if side in BACKGROUND else _KINDS[side] if is_of_rows else op.name
            return kind, op.queue_of(call), *(self._place(region) if is_of_rows else (-1, 0))
        region = next((r for r in map(region_of, group) if r in self.out or r in self.back), None)
        if region is None:
            return "dense", COMPUTE, -1, 0
        counts = self.counts.get(region, 0)
        if after & counts and not before & counts:
            return ROUTE, COMPUTE, -1, 0
        return self._stage(group, region, before, after), COMPUTE, *self._place(region)

    def _stage(self, group: list[Node], region: int, before: int, after: int) -> str:
        out, back = self.out.get(region, 0), self.back.get(region, 0)
        if after & out:
            return "repack" if before & out else "C1"
        if before & back:
            return "repack" if after & back else "D2"
        if before & out:
            codec = {stage_of(node) for node in group} & {Stage.COMPRESS, Stage.DECOMPRESS}
            if codec:
                return "C2" if Stage.COMPRESS in codec else "D1"
            return "E" if after & back else "W"
        return "C1"

    def _place(self, region: int) -> tuple[int, int]:
        chunk = self.ctx.decisions.chunks.get(region)
        return (region, 0) if chunk is None else (chunk.of, chunk.index)


def _link_of(started: Node, mesh: MeshSpec) -> str:
    """What an exchange shares with others that are on their way: the slowest link between its ranks, or the engine."""
    op, call = unsplit(started)
    if not op.is_collective:
        return op.copies or "d2h"
    size, local = mesh.nodes_of(op.axes_of(call))
    named = op.link(call)
    if size == 1 or named in ("intra", "inter"):
        return named if size > 1 else ""
    return "intra" if local == size else "inter"


def _side(node: Node) -> Stage:
    """The stage of an exchange. A sum over parts of experts belongs to the way back of rows, and to the way out of
    gradients: then nothing lies between it and the exchange before it that computes."""
    stage, (op, _) = stage_of(node), unsplit(node)
    if stage is not Stage.BACK or op.collective != "all_reduce":
        return stage
    before = node.args[1]
    while before.target is not wait:
        known = lookup(before)
        if (known is None and not is_view(before.target)) or (known is not None and known.gemm is not None):
            return stage
        before = before.args[0]
    return Stage.OUT


def stage_of(node: Node) -> Stage:
    """The stage of the op that a node calls, or starts; dense work if it is none of the dialect."""
    op, call = unsplit(node)
    return Stage.DENSE if op is None else op.stage_of(call)
