"""How many seconds a way to run a MoE region takes on a machine.

A region's work comes in ScheMoE's stages (C1 A1 D1 E C2 A2 D2, and W for weight gradients). The time of a way is the
makespan of its stages, cut in chunks and ordered by a scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import sympy
from torch.fx import Node

from moefx import rooms
from moefx.analysis.sizes import typical_sizes
from moefx.analysis.tasks import stage_of
from moefx.axes import MeshSpec, split_axes
from moefx.context.decisions import Choice
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.alltoall import Algorithm
from moefx.costmodel.amounts import Amounts, Kind, amounts_of, at, product_flops
from moefx.costmodel.curves import symbol
from moefx.costmodel.layers import COMM, GATHER, NESTED, LayerTimes, restoring, schemoe_layer
from moefx.costmodel.machine import Machine
from moefx.costmodel.machines import preset
from moefx.costmodel.overlap import overlap
from moefx.costmodel.restore import Loads
from moefx.costmodel.schedulers import schedule
from moefx.costmodel.simulate import Rates
from moefx.costmodel.tasks import COMPUTE, TaskGraph
from moefx.costmodel.ways import exposed_share
from moefx.ir import edit
from moefx.ir.op import Stage, argument, expr
from moefx.ir.ops.order import start, wait
from moefx.ir.ways import Way
from moefx.planning.pieces import AT_ONCE, BY_CHUNK, GATHERED, KINDS, REPACKS, ROUTER, SCATTERED, STAGES, Piece, scaled
from moefx.transport.codecs import codec_named

DIRECT, PIPE = "direct", "pipe"
FORMULAS = (DIRECT, PIPE, "2dh", "1dh")  # all-to-alls that a machine can price, the simplest first
IN_PARTS = (PIPE, "2dh")  # those whose parts, within and between nodes, overlap with those of other chunks
BUDGET_S = 0.05  # of a scheduler, for one candidate


def form_of(alltoall: str) -> str:
    """The form of its tasks, see `costmodel.layers`: "direct" if it does not come in parts."""
    if rooms.nesting(alltoall) is not None:
        return NESTED
    return alltoall if alltoall in IN_PARTS else DIRECT


@dataclass(frozen=True)
class More:
    """weights: bytes of weights that a rank gathers, and of their gradients, while the region runs; held: of tokens
    that it gathers. rows: of the rows that arrive at it in the program that was priced, those that still do. is_split:
    whether ranks along `mp` share out rows."""

    weights: float = 0.0
    rows: float = 1.0
    held: float = 0.0
    is_split: bool = True

    @property
    def transient(self) -> float:
        return self.weights + self.held


@dataclass(frozen=True)
class Candidate:
    """One way to run a region. Seconds are predicted, of this region alone: forward, backward, and of communication
    that no computation hides (`costmodel.overlap`). memory: the estimated peak in bytes, see `memory.Footprint`.
    scheduler: who orders the tasks, which of a whole region nobody does unless asked to. loads: seconds for which
    computation and links are busy. layers: its tasks, by pass. rates: how what they run on slows one another down.
    more: what it holds more than the program that was priced.
    """

    choice: Choice
    forward_s: float
    backward_s: float
    exposed_s: float
    memory: float = 0.0
    scheduler: str | None = None
    loads: Loads = field(default_factory=dict)
    layers: Mapping[str, TaskGraph] = field(default_factory=dict, compare=False, repr=False)
    rates: Rates | None = field(default=None, compare=False, repr=False)
    more: More = field(default_factory=More, compare=False, repr=False)

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def restored(self, extra: Sequence[Mapping[tuple[str, str], float]], rings: int) -> float:
        """Seconds that the simulator finds the region to take longer where chunk i has the loads `extra[i]` besides."""
        form, more = form_of(self.choice.alltoall), 0.0
        for name, graph in self.layers.items():
            mine = [{queue: s for (where, queue), s in each.items() if where == name} for each in extra]
            changed = restoring(graph, mine, rings, backward=name == "backward", all_to_all=form)
            more += sum(sign * schedule(each, self.choice.scheduler, BUDGET_S, rates=self.rates).timeline.makespan
                        for sign, each in ((1, changed), (-1, graph)))  # fmt: skip
        return more


class Price:
    """Seconds of the stages of a region whose rows take this way, on a machine; of pieces in numbers, unless a formula
    is wanted. parts: in how many a whole region comes back, each gathered beside the next. weights: the axis over
    which weights are gathered; before: by graph, seconds of work ahead of the region, beside which they are."""

    def __init__(self, ctx: PassContext, machine: Machine, way: Way, parts: int = 1, weights: str = "",
                 before: Mapping[str, float] | None = None) -> None:  # fmt: skip
        self.parts, self.before = parts, before or {}
        self.machine, self.mesh = machine, ctx.mesh.root
        self.gathers = [ctx.mesh.dims(role) for role in ("mp", "esp")]
        self.groups = [machine.group(self.mesh, split_axes(hop.axis)) for hop in way.hops]
        self.link = max((group.link for group in self.groups), default="intra", key=("intra", "inter").index)
        self.weights = machine.group(self.mesh, split_axes(weights)).link if weights else ""
        self._known: dict[tuple, tuple[Any, dict[str, float]]] = {}

    @property
    def has_nodes(self) -> bool:
        """Whether some hop is within nodes and between them: algorithms differ then."""
        return any(1 < group.local < group.size for group in self.groups)

    def candidate(self, stages: Mapping[str, Mapping[str, list[Piece]]], choice: Choice) -> Candidate:
        seconds, loads, layers, exposed = {}, {}, {}, 0.0
        gathers = self.gather_queue(choice)
        form = form_of(choice.alltoall)
        for name, found in stages.items():
            times = self.seconds_of_stages(found, choice)
            if choice.whole and choice.scheduler != "sequential" and gathers == GATHER and times["G2"]:
                times["G2"] *= float(exposed_share(self.parts, times["A2"], times["G2"]))
            before = self.before.get(name, 0.0) if times[GATHERED] + times[SCATTERED] else 0.0
            layer = LayerTimes(**{kind.lower(): times[kind] for kind in STAGES},
                               a1_intra=times["A1.intra"], a2_intra=times["A2.intra"], before=before,
                               **{kind.lower(): times[kind] for kind in (*BY_CHUNK, *REPACKS, GATHERED, SCATTERED)})
            graph = schemoe_layer(layer, choice.chunks, backward=name == "backward", all_to_all=form, gathers=gathers,
                                  weights=self._queue(self.weights, choice))  # fmt: skip
            layers[name] = graph
            timeline = schedule(graph, choice.scheduler, BUDGET_S, rates=self._rates(form)).timeline
            seconds[name] = timeline.makespan - before + times[AT_ONCE] + times[ROUTER]
            busy = timeline.busy
            loads[name, COMPUTE] = busy.get(COMPUTE, 0.0) - before
            loads[name, COMM] = max((busy[queue] for queue in busy if queue != COMPUTE), default=0.0)
            spans = ((timeline.start[task.name], timeline.end[task.name], task.resource) for task in graph)
            exposed += overlap(spans).exposed_s + times[AT_ONCE]
        return Candidate(choice, seconds.get("forward", 0.0), seconds.get("backward", 0.0), exposed,
                         scheduler=choice.scheduler, loads=loads, layers=layers, rates=self._rates(form))

    def seconds_of_stages(self, stages: Mapping[str, list[Piece]], choice: Choice) -> dict[str, float]:
        """Seconds of every stage of one chunk; the parts of an all-to-all within a node as A1.intra and A2.intra."""
        key = id(stages), choice.chunks, choice.alltoall, choice.codec
        if key not in self._known:
            self._known[key] = stages, self._seconds_of_stages(stages, choice)
        return dict(self._known[key][1])

    def _seconds_of_stages(self, stages: Mapping[str, list[Piece]], choice: Choice) -> dict[str, float]:
        times = dict.fromkeys((*KINDS, "A1.intra", "A2.intra"), 0.0)
        for kind, pieces in stages.items():
            for piece in pieces:
                part = scaled(piece.amounts, 1 / choice.chunks, kind=kind)
                if part.kind is Kind.COLLECTIVE and kind in ("A1", "A2"):
                    self._exchange(times, kind, piece, part, choice)
                else:
                    times[kind] += self.machine.time_of(part, {}, self.mesh)
                    times[kind] += self.machine.start_s if part.kind is Kind.COLLECTIVE else 0.0
        return times

    def _exchange(self, times: dict[str, float], kind: str, piece: Piece, amounts: Amounts, choice: Choice) -> None:
        before, after = ("C1", "D1") if kind == "A1" else ("C2", "D2")
        codec = codec_named(choice.codec) if amounts.collective == "all_to_all" else None
        if codec is not None and piece.width > 1:
            ratio = codec.row_bytes(piece.width) / (piece.width * piece.itemsize)
            for stage, of in ((Stage.COMPRESS, before), (Stage.DECOMPRESS, after)):
                times[of] += self.machine.coding_seconds(stage, choice.codec, 4 * amounts.payload / piece.itemsize,
                                                         amounts.payload * (1 + ratio))  # fmt: skip
            amounts = replace(amounts, payload=amounts.payload * ratio)
        algorithm = Algorithm(choice.alltoall if choice.alltoall in FORMULAS else DIRECT)
        sent, starts = {"intra": 0.0, "inter": 0.0}, 0
        for resource, seconds in self.machine.phases_of(
            amounts, {}, self.mesh, algorithm=algorithm, reverse=kind == "A2"
        ):
            if resource == COMPUTE:
                times[before] += seconds
            else:
                sent[resource] += seconds
                starts += 1
        # An exchange of its own for every step, except in the direct all-to-all.
        times[before] += self.machine.start_s * min(starts, 1 if algorithm is Algorithm.DIRECT else starts)
        # Where rates of the pair are known, the simulator says what of the shorter part is not hidden.
        if algorithm is Algorithm.PIPE and ("intra", "inter") not in self.machine.interference:
            longer, shorter = sorted(sent, key=sent.__getitem__, reverse=True)
            sent[longer] += self.machine.pipe_rho * sent[shorter]
        parts = (kind, kind) if form_of(choice.alltoall) == DIRECT else (f"{kind}.intra", kind)
        times[parts[0]] += sent["intra"]
        times[parts[1]] += sent["inter"]

    def gather_queue(self, choice: Choice) -> str:
        """The link that ranks along `mp` and `esp` gather over; one of its own where it isn't that of the exchanges."""
        groups = [self.machine.group(self.mesh, dims) for dims in self.gathers if dims]
        link = max((group.link for group in groups), default="intra", key=("intra", "inter").index)
        return self._queue(link, choice)

    def _queue(self, link: str, choice: Choice) -> str:
        if form_of(choice.alltoall) != DIRECT:
            return link
        return COMM if link == self.link else GATHER

    def _rates(self, form: str) -> Rates | None:
        """How resources hinder one another. In a direct all-to-all the slowest link stands for all; what is gathered
        over the other one is beside it and beside computation, as well."""
        if form != DIRECT:
            return self.machine.interference or None
        other = "inter" if self.link == "intra" else "intra"
        alias = {self.link: COMM, other: GATHER, COMPUTE: COMPUTE}
        return {(alias[a], alias[b]): rate for (a, b), rate in self.machine.interference.items()
                if a in alias and b in alias} or None

    def formula(self, pieces: Sequence[Piece]) -> sympy.Expr:
        return sympy.Add(*(self.machine.formula(piece.amounts, self.mesh, how=symbol) for piece in pieces))


def on_mesh(machine: Machine, mesh: MeshSpec) -> Machine:
    """The machine with as many ranks per node as the mesh has."""
    if mesh.ranks_per_node in (None, machine.ranks_per_node):
        return machine
    return replace(machine, ranks_per_node=mesh.ranks_per_node)


class Prices:
    """Seconds of any node of a program's graphs, for the passes that order them. Without a machine by the preset that
    is nearest to the device: orders need only ratios."""

    def __init__(self, graphs: StepGraphs, ctx: PassContext) -> None:
        self.graphs, self.ctx = graphs, ctx

    @cached_property
    def machine(self) -> Machine:
        if self.ctx.machine is not None:
            return on_mesh(self.ctx.machine, self.ctx.mesh)
        inputs = (edit.tensor_value(node) for node in self.graphs.forward.graph.find_nodes(op="placeholder"))
        on_gpu = any(tensor is not None and tensor.device.type == "cuda" for tensor in inputs)
        nearest = preset("h100-8x400g" if on_gpu else "emulated-200mbit")
        mesh = self.ctx.mesh
        groups = [dims for count in range(1, len(mesh.root) + 1) for dims in combinations(mesh.root, count)]
        if mesh.ranks_per_node is None or any(mesh.nodes_of(dims)[1] is None for dims in groups):
            return replace(nearest, ranks_per_node=mesh.size(mesh.everyone))  # of uneven nodes, too: one of all
        return replace(nearest, ranks_per_node=mesh.ranks_per_node)

    @property
    def rates(self) -> Rates:
        """How computation and links slow one another down."""
        return self.machine.interference

    @cached_property
    def sizes(self) -> dict[str, float]:
        return typical_sizes(self.graphs.graphs.values(), self.ctx)

    def peak_seconds(self) -> float:
        """Of all matrix products, each at the machine's peak; zero where no machine was named."""
        if self.ctx.machine is None:
            return 0.0
        return sum(flops / self.machine.gemm_model(amounts_of(node).dtype).peak_flops_per_s
                   for gm in self.graphs.graphs.values() for node in gm.graph.nodes
                   if (flops := product_flops(node, self.sizes)))  # fmt: skip

    def __call__(self, node: Node) -> float:
        if node.target is wait:
            return self.machine.start_s
        stage = stage_of(node)
        if stage in (Stage.COMPRESS, Stage.DECOMPRESS) and node.target is not start:
            rows = edit.tensor_value(node.args[0] if stage is Stage.COMPRESS else node)
            nbytes, moved = at(4 * expr(rows.numel()), self.sizes), at(amounts_of(node).volume.hbm_bytes, self.sizes)
            return self.machine.coding_seconds(stage, argument(node, "codec"), nbytes, moved)
        # Of more parts than rows each has one, the last less than none.
        return max(0.0, self.machine.time_of(amounts_of(node), self.sizes, self.ctx.mesh.root))
