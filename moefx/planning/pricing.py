"""What a MoE region computes, sends and holds, and how many seconds a way to run it takes on a machine.

A region's work comes in ScheMoE's stages (C1 A1 D1 E C2 A2 D2, and W for weight gradients). The time of a way is the
makespan of its stages, cut in chunks and ordered by a scheduler.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefx.analysis.sizes import typical_sizes
from moefx.analysis.tasks import stage_of, tasks_of
from moefx.axes import MeshSpec, split_axes
from moefx.context.decisions import Choice
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.alltoall import Algorithm
from moefx.costmodel.amounts import Amounts, Kind, amounts_of, at
from moefx.costmodel.curves import symbol
from moefx.costmodel.layers import COMM, GATHER, LayerTimes, restoring, schemoe_layer
from moefx.costmodel.machine import Machine
from moefx.costmodel.presets import preset
from moefx.costmodel.restore import Loads
from moefx.costmodel.schedulers import schedule
from moefx.costmodel.simulate import Rates
from moefx.costmodel.tasks import COMPUTE, TaskGraph
from moefx.costmodel.ways import saa_exposed
from moefx.ir import edit
from moefx.ir.op import BACKGROUND, Stage, Volume, argument, expr, lookup, value
from moefx.ir.ops.order import start, unsplit, wait
from moefx.ir.regions import region_of
from moefx.ir.ways import BLOCKS, Way
from moefx.transport.algorithms import DEDUP
from moefx.transport.codecs import codec_named

DIRECT, PIPE = "direct", "pipe"
FORMULAS = (DIRECT, PIPE, "2dh", "1dh")  # all-to-alls that a machine can price, the simplest first
IN_PARTS = (PIPE, "2dh", DEDUP)  # those whose parts, within and between nodes, overlap with those of other chunks
BUDGET_S = 0.05  # of a scheduler, for one candidate
STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2", "W")
# What of a region is none of these: gathers of tokens before it and of results behind it, by every chunk ("G1", "G2")
# or at once ("G"), and the part of its router that works on a share of the tokens.
ROUTER, AT_ONCE, BY_CHUNK = "R", "G", ("G1", "G2")
GATHERED, SCATTERED = "GW", "SW"  # weights of experts, and their gradients, for all chunks together
REPACKS = ("R1", "R2")  # what a node computes of tokens that crossed to it once: between its exchanges, out and back
KINDS = (*STAGES, *BY_CHUNK, AT_ONCE, ROUTER, *REPACKS, GATHERED, SCATTERED)
_GATHERS = {"gather_rows": "G1", "scatter_rows": "G2", "all_rows": AT_ONCE}


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
    that no computation hides. memory: the estimated peak in bytes, see `memory.Footprint`. scheduler: who orders the
    tasks, which of a whole region nobody does unless asked to. loads: seconds for which computation and links are busy.
    layers: its tasks, by pass. rates: how what they run on slows one another down. more: what it holds more than the
    program that was priced.
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
        form, more = self.choice.alltoall if self.choice.alltoall in IN_PARTS else DIRECT, 0.0
        for name, graph in self.layers.items():
            mine = [{queue: s for (where, queue), s in each.items() if where == name} for each in extra]
            changed = restoring(graph, mine, rings, backward=name == "backward", all_to_all=form)
            more += sum(sign * schedule(each, self.choice.scheduler, BUDGET_S, rates=self.rates).timeline.makespan
                        for sign, each in ((1, changed), (-1, graph)))  # fmt: skip
        return more


@dataclass(frozen=True)
class Piece:
    """One node of a stage: its amounts, its op if it is one of the dialect and, of an exchange of rows, the row's
    entries and their bytes. entries: of a row of whatever it gives."""

    amounts: Amounts
    width: int = 0
    itemsize: int = 0
    op: str = ""
    entries: int = 0


@dataclass(frozen=True)
class Stages:
    """The pieces of every stage of a region in one graph and of what is around them; the stages of nodes, by name."""

    pieces: dict[str, list[Piece]]
    kinds: dict[str, str]


def stages_of(nodes: Iterable[Node], ctx: PassContext) -> dict[int, Stages]:
    """By region, of one graph."""
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    found = tasks_of(body, ctx, lambda node: 0.0)
    stages: dict[int, Stages] = {}
    for task in found.graph:
        if task.layer >= 0 and task.kind in STAGES:
            mine = stages.setdefault(task.layer, Stages({kind: [] for kind in KINDS}, {}))
            # Dense work before C1 and behind D2 belongs to their tasks; it is not cut with the region.
            inner = [node for node in found.nodes[task.name]
                     if task.kind not in ("C1", "D2") or region_of(node) == task.layer]
            mine.pieces[task.kind] += [_piece(node) for node in inner]
            mine.kinds.update((node.name, task.kind) for node in inner)
    for node, (number, kind) in around(body, ctx).items():
        if number in stages:
            stages[number].pieces[kind].append(_piece(node))
    return stages


def outside(nodes: Iterable[Node], ctx: PassContext, regions: Container[int]) -> list[Node]:
    """What is no piece of these regions in one graph, and no reduction of gradients, which run beside all else."""
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    inside = {name for number, found in stages_of(body, ctx).items() if number in regions for name in found.kinds}
    inside |= {node.name for node, (number, _) in around(body, ctx).items() if number in regions}
    starts = {node: node.args[0] if node.target is wait else node for node in body}
    return [node for node in body if starts[node].name not in inside and stage_of(starts[node]) not in BACKGROUND]


def seconds_outside(nodes: Iterable[Node], ctx: PassContext, machine: Machine, sizes: Mapping[str, float],
                    regions: Container[int]) -> float:  # fmt: skip
    """What is computed outside of these regions in one graph."""
    alone = [node for node in outside(nodes, ctx, regions) if start not in (node.target, *node.args[:1])]
    times = (machine.phases_of(amounts_of(node), sizes, ctx.mesh.root) for node in alone if node.target is not wait)
    return sum(seconds for phases in times for resource, seconds in phases if resource == COMPUTE)


def _piece(node: Node) -> Piece:
    rows = edit.tensor_value(node.args[1]) if node.target is start else None
    if rows is None or not isinstance(rows.shape[-1], int):
        op, made = lookup(node), edit.tensor_value(node)
        entries = made.shape[-1] if made is not None and made.dim() else 0
        return Piece(amounts_of(node), op="" if op is None else op.name,
                     entries=entries if isinstance(entries, int) else 0)  # fmt: skip
    return Piece(amounts_of(node), rows.shape[-1], rows.element_size())


def around(nodes: Sequence[Node], ctx: PassContext) -> dict[Node, tuple[int, str]]:
    """{node: (region, kind)} of what is around the regions of a graph, see `ROUTER`."""
    found: dict[Node, tuple[int, str]] = {}
    for node in nodes:
        op, _ = unsplit(node)
        kind = _GATHERS.get(op.name) if op is not None and node.target is start else None
        region = None if kind is None else _nearest(node, forward=kind == "G1")
        if region is not None and region in ctx.decisions.regions:
            is_by_blocks = any(hop.kind == BLOCKS for hop in ctx.decisions.regions[region].way.hops)
            found[node] = region, "G2" if kind == AT_ONCE and is_by_blocks else kind
    shares = {symbol: None for node in nodes if (op := lookup(node)) is not None and op.name == "num_own_rows"
              for symbol in expr(value(node)).free_symbols}  # fmt: skip
    sized = {node: _symbols(node) & shares.keys() for node in nodes} if shares else {}
    of = {symbol: region_of(node) for node, symbols in sized.items() for symbol in symbols
          if region_of(node) is not None}  # fmt: skip
    for node, symbols in sized.items():
        region = next((of[symbol] for symbol in symbols if symbol in of), None)
        if region is not None and region_of(node) is None and lookup(node) is None:
            found[node] = region, ROUTER
    return found


def _nearest(node: Node, *, forward: bool) -> int | None:
    """The region of the nearest node that leads here, or is led to."""
    near, seen = [node], {node}
    while near:
        regions = [region_of(each) for each in near[1 if near[0] is node else 0 :]]
        if region := [each for each in regions if each is not None]:
            return region[0]
        near = [each for here in near for each in (here.users if forward else here.all_input_nodes)
                if each not in seen and not seen.add(each)]  # fmt: skip
    return None


def _symbols(node: Node) -> set[sympy.Symbol]:
    """Those of the sizes of what a node gives."""
    found = value(node)
    tensors = found if isinstance(found, (tuple, list)) else [found]
    return {symbol for tensor in tensors if isinstance(tensor, torch.Tensor) for size in tensor.shape
            if isinstance(size, torch.SymInt) for symbol in expr(size).free_symbols}  # fmt: skip


def in_numbers(piece: Piece, sizes: Mapping[str, float]) -> Piece:
    """The piece with all its formulas worked out."""
    a = piece.amounts
    volume = Volume(at(a.volume.flops, sizes), at(a.volume.hbm_bytes, sizes))
    gemm = a.gemm and replace(a.gemm, **{dim: at(getattr(a.gemm, dim), sizes) for dim in ("m", "n", "k", "batch")})
    sent = a.sent and tuple(replace(each, nbytes=at(each.nbytes, sizes)) for each in a.sent)
    return replace(piece, amounts=replace(a, volume=volume, gemm=gemm, sent=sent, payload=at(a.payload, sizes)))


def scaled(amounts: Amounts, share: float, *, kind: str = "E") -> Amounts:
    """The amounts of a chunk that has this share of the rows. A product has fewer rows and all of its weights; a weight
    gradient (stage W) sums over fewer rows."""
    if share == 1:
        return amounts
    if kind in (AT_ONCE, ROUTER, GATHERED, SCATTERED):
        return amounts
    volume = Volume(amounts.volume.flops * share, amounts.volume.hbm_bytes * share)
    rows = "k" if kind == "W" else "m"
    gemm = amounts.gemm and replace(amounts.gemm, **{rows: getattr(amounts.gemm, rows) * share})
    return replace(amounts, volume=volume, gemm=gemm, payload=amounts.payload * share)


class Price:
    """Seconds of the stages of a region whose rows take this way, on a machine; of pieces in numbers, unless a formula
    is wanted. phases: in how many a whole region comes back, each gathered beside the next. weights: the axis over
    which weights are gathered; before: by graph, seconds of work ahead of the region, beside which they are."""

    def __init__(self, ctx: PassContext, machine: Machine, way: Way, phases: int = 1, weights: str = "",
                 before: Mapping[str, float] | None = None) -> None:  # fmt: skip
        self.phases, self.before = phases, before or {}
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
        form = choice.alltoall if choice.alltoall in IN_PARTS else DIRECT
        for name, found in stages.items():
            times = self.seconds_of_stages(found, choice)
            if choice.whole and choice.scheduler != "sequential" and gathers == GATHER and times["G2"]:
                times["G2"] *= float(saa_exposed(self.phases, times["A2"], times["G2"]))
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
            exposed += timeline.makespan - timeline.busy.get(COMPUTE, 0.0) + times[AT_ONCE]
        return Candidate(choice, seconds.get("forward", 0.0), seconds.get("backward", 0.0), max(exposed, 0.0),
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
        parts = (f"{kind}.intra", kind) if algorithm.value in IN_PARTS else (kind, kind)
        times[parts[0]] += sent["intra"]
        times[parts[1]] += sent["inter"]

    def gather_queue(self, choice: Choice) -> str:
        """The link that ranks along `mp` and `esp` gather over; one of its own where it isn't that of the exchanges."""
        groups = [self.machine.group(self.mesh, dims) for dims in self.gathers if dims]
        link = max((group.link for group in groups), default="intra", key=("intra", "inter").index)
        return self._queue(link, choice)

    def _queue(self, link: str, choice: Choice) -> str:
        if choice.alltoall in IN_PARTS:
            return link
        return COMM if link == self.link else GATHER

    def _rates(self, form: str) -> Rates | None:
        """How resources hinder one another. In a direct all-to-all the slowest link stands for all."""
        if form != DIRECT:
            return self.machine.interference or None
        alias = {self.link: "comm", COMPUTE: COMPUTE}
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

    def __call__(self, node: Node) -> float:
        if node.target is wait:
            return self.machine.start_s
        stage = stage_of(node)
        if stage in (Stage.COMPRESS, Stage.DECOMPRESS) and node.target is not start:
            rows = edit.tensor_value(node.args[0] if stage is Stage.COMPRESS else node)
            nbytes, moved = at(4 * expr(rows.numel()), self.sizes), at(amounts_of(node).volume.hbm_bytes, self.sizes)
            return self.machine.coding_seconds(stage, argument(node, "codec"), nbytes, moved)
        return self.machine.time_of(amounts_of(node), self.sizes, self.ctx.mesh.root)
