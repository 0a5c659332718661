"""Choose, for every MoE region, the number of chunks, the all-to-all, the codec and the order, by predicted time.

The program is first compiled with whole regions. Its graphs tell what every stage of a region moves and computes, a
`Machine` what that takes; a candidate's time is the makespan of its tasks, forward and backward, in the simulator
(`moefx.costmodel`). All is a function of the graphs, the machine and the sizes that all ranks traced with: every rank
chooses the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy
from torch.fx import Node

from moefx.analysis.sizes import typical_sizes
from moefx.analysis.tasks import tasks_of
from moefx.costmodel.amounts import Amounts, Kind, amounts_of, at
from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.machine import Machine
from moefx.costmodel.presets import PRESETS, preset
from moefx.costmodel.schedulers import schedule
from moefx.costmodel.tasks import COMPUTE
from moefx.ir import edit
from moefx.ir.ops.order import start
from moefx.options import Options
from moefx.pass_types import Choice, PassContext
from moefx.step_graphs import StepGraphs
from moefx.transport.codecs import IDENTITY, codec_named

DEGREES = (1, 2, 4, 8)
CLOSED_FORM = {"direct": "direct", "2dh": "2dh", "pipe": "pipe"}
SIMPLER = 0.02  # a candidate must be this much faster than a simpler one
STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2", "W")


@dataclass(frozen=True)
class Candidate:
    """One way to run a region. Seconds are predicted, of this region alone: forward, backward, and of communication
    that no computation hides."""

    choice: Choice
    forward_s: float
    backward_s: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class RegionPlan:
    """What was chosen for a region and why. candidates: fastest first. stages: seconds of each stage of the whole
    region, by graph. formulas: the same as formulas of the sizes."""

    region: int
    module: str
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reason: str
    stages: Mapping[str, Mapping[str, float]]
    formulas: Mapping[str, Mapping[str, sympy.Expr]]


@dataclass(frozen=True)
class Decision:
    """The plan of a program: the machine that it was made for, the sizes, and each region's plan."""

    machine: Machine
    sizes: Mapping[str, float]
    regions: tuple[RegionPlan, ...] = field(default=())

    @property
    def is_whole(self) -> bool:
        """Nothing but whole regions and direct exchanges was chosen, in an order that needs no scheduler."""
        return all(choice == Choice(scheduler=choice.scheduler) for choice in self.choices.values())

    @property
    def choices(self) -> dict[int, Choice]:
        return {plan.region: plan.chosen.choice for plan in self.regions}


def decide(graphs: StepGraphs, ctx: PassContext, machine: Machine) -> Decision:
    """Plan the regions of a program that was scheduled with whole regions."""
    sizes = typical_sizes(graphs.graphs.values(), ctx.fake_mode)
    stages = {name: _stages(gm.graph.nodes, ctx) for name, gm in graphs.graphs.items()}
    numbers = sorted({number for found in stages.values() for number in found})
    plans = []
    for number in numbers:
        if ctx.regions[number].axis is None or ctx.mesh.expert_ranks == 1:
            continue  # nothing is exchanged
        mine = {name: found[number] for name, found in stages.items() if number in found}
        plans.append(_plan(number, mine, ctx, machine, sizes))
    return Decision(machine, sizes, tuple(plans))


def machine_of(options: Options) -> Machine | None:
    """The machine that the options name. Raises MoefxError for a file or a name that is none."""
    named = options.machine
    if named is None or isinstance(named, Machine):
        return named
    return preset(str(named)) if str(named) in PRESETS else Machine.load(named)


@dataclass(frozen=True)
class Piece:
    """One node of a stage: its amounts and, of an exchange of rows, the row's entries and their bytes."""

    amounts: Amounts
    width: int = 0
    itemsize: int = 0


def _piece(node: Node) -> Piece:
    rows = edit.tensor_value(node.args[1]) if node.target is start else None
    if rows is None or not isinstance(rows.shape[-1], int):
        return Piece(amounts_of(node))
    return Piece(amounts_of(node), rows.shape[-1], rows.element_size())


def _stages(nodes: Iterable[Node], ctx: PassContext) -> dict[int, dict[str, list[Piece]]]:
    """{region: {stage: its nodes}} of one graph."""
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    found = tasks_of(body, ctx, lambda node: 0.0)
    stages: dict[int, dict[str, list[Piece]]] = {}
    for task in found.graph:
        if task.layer >= 0 and task.kind in STAGES:
            mine = stages.setdefault(task.layer, {kind: [] for kind in STAGES})
            mine[task.kind] += [_piece(node) for node in found.nodes[task.name]]
    return stages


def _plan(number: int, stages: Mapping[str, dict[str, list[Piece]]], ctx: PassContext, machine: Machine,
          sizes: Mapping[str, float]) -> RegionPlan:
    price = _Price(ctx, machine, sizes)
    candidates = [
        candidate for choice in _choices(ctx, machine)
        if (candidate := price.candidate(stages, choice)) is not None
    ]
    best = min(candidates, key=lambda c: c.seconds)
    near = [c for c in candidates if c.seconds <= best.seconds * (1 + SIMPLER)]
    chosen = min(near, key=lambda c: _complexity(c.choice))
    ranked = tuple(sorted(candidates, key=lambda c: (c.seconds, _complexity(c.choice))))
    return RegionPlan(
        number, ctx.regions[number].module, chosen, ranked, _reason(chosen, best, candidates),
        {name: price.seconds_of_stages(found, Choice()) for name, found in stages.items()},
        {name: {kind: price.formula(found[kind]) for kind in STAGES if found[kind]} for name, found in stages.items()},
    )  # fmt: skip


def _choices(ctx: PassContext, machine: Machine) -> list[Choice]:
    """Every point of the space that the options leave open."""
    options = ctx.options
    m = machine.ranks_per_node
    several = 1 < m < ctx.mesh.expert_ranks and ctx.mesh.expert_ranks % m == 0
    degrees = DEGREES if options.chunks is None else (options.chunks,)
    algorithms = (tuple(CLOSED_FORM) if several else ("direct",)) if options.alltoall is None else (options.alltoall,)
    codecs = (IDENTITY, "bf16", "int8") if options.lossy else (options.codec,)
    schedulers = ("optsche", "heuristic") if options.scheduler is None else (options.scheduler,)
    points = itertools.product(degrees, algorithms, codecs, schedulers)
    # A whole region has nothing to order; one scheduler stands for all.
    return [Choice(*point) for point in points if point[0] > 1 or point[3] == schedulers[0]]


def _complexity(choice: Choice) -> tuple:
    """Simplest first: whole, direct, exact, the paper's order."""
    return (choice.codec != IDENTITY, choice.alltoall != "direct", choice.chunks, choice.scheduler != "optsche")


def _reason(chosen: Candidate, best: Candidate, candidates: list[Candidate]) -> str:
    if len(candidates) == 1:
        return "the options leave no other choice"
    whole = next((c for c in candidates if c.choice.chunks == 1 and c.choice.alltoall == "direct"), None)
    if chosen.choice.chunks == 1 and whole is chosen:
        return f"no other candidate is predicted to be more than {SIMPLER:.0%} faster"
    gain = "" if whole is None else f", {whole.seconds / chosen.seconds:.2f} times as fast as the whole region"
    if chosen is best:
        return f"the fastest{gain}"
    return f"the simplest within {SIMPLER:.0%} of the fastest{gain}"


class _Price:
    """Seconds of a region's stages on a machine."""

    def __init__(self, ctx: PassContext, machine: Machine, sizes: Mapping[str, float]) -> None:
        self.ctx, self.machine, self.sizes = ctx, machine, sizes
        self.mesh = ctx.mesh.axes

    def candidate(self, stages: Mapping[str, dict[str, list[Piece]]], choice: Choice) -> Candidate | None:
        seconds, exposed = {}, 0.0
        for name, found in stages.items():
            times = self.seconds_of_stages(found, choice)
            layer = LayerTimes(**{kind.lower(): times[kind] for kind in STAGES if kind != "W"}, w=times["W"],
                               a1_intra=times["A1.intra"], a2_intra=times["A2.intra"])
            form = CLOSED_FORM.get(choice.alltoall, "direct")
            graph = schemoe_layer(layer, choice.chunks, backward=name == "backward", all_to_all=form)
            plan = schedule(graph, choice.scheduler, 0.05)
            seconds[name] = plan.timeline.makespan
            exposed += plan.timeline.makespan - sum(t.duration for t in graph if t.resource == COMPUTE)
        return Candidate(choice, seconds.get("forward", 0.0), seconds.get("backward", 0.0), max(exposed, 0.0))

    def seconds_of_stages(self, stages: Mapping[str, list[Piece]], choice: Choice) -> dict[str, float]:
        """Seconds of every stage of one chunk; the parts of an all-to-all within a node as A1.intra and A2.intra."""
        times = dict.fromkeys((*STAGES, "A1.intra", "A2.intra"), 0.0)
        share = sympy.Rational(1, choice.chunks)
        for kind, pieces in stages.items():
            for piece in pieces:
                part = scaled(piece.amounts, share)
                if part.kind is Kind.COLLECTIVE:
                    self._exchange(times, kind, piece, part, choice)
                else:
                    times[kind] += self.machine.time_of(part, self.sizes, self.mesh)
        return times

    def _exchange(self, times: dict[str, float], kind: str, piece: Piece, amounts: Amounts, choice: Choice) -> None:
        if choice.codec != IDENTITY and piece.width > 1:
            nbytes = at(amounts.payload, self.sizes)
            ratio = sympy.Rational(codec_named(choice.codec).row_bytes(piece.width), piece.width * piece.itemsize)
            amounts = replace(amounts, payload=amounts.payload * ratio)
            copy = self.machine.launch_s + nbytes * float(1 + ratio) / self.machine.memory_bytes_per_s
            times["C1" if kind == "A1" else "C2"] += copy
            times["D1" if kind == "A1" else "D2"] += copy
        form = CLOSED_FORM.get(choice.alltoall, "direct")
        for resource, seconds in self.machine.phases_of(
            amounts, self.sizes, self.mesh, algorithm=form, reverse=kind == "A2"
        ):
            if resource == COMPUTE:
                times["C1" if kind == "A1" else "C2"] += seconds
            elif resource == "intra" and form != "direct":
                times[f"{kind}.intra"] += seconds
            else:
                times[kind] += seconds

    def formula(self, pieces: list[Piece]) -> sympy.Expr:
        return sympy.Add(*(self.machine.formula(piece.amounts, self.mesh) for piece in pieces))


def scaled(amounts: Amounts, share: sympy.Expr) -> Amounts:
    """The amounts of a chunk that has this share of the rows. A product has fewer rows and all of its weights."""
    if share == 1:
        return amounts
    volume = amounts.volume
    volume = replace(volume, flops=volume.flops * share, hbm_bytes=volume.hbm_bytes * share)
    gemm = amounts.gemm and replace(amounts.gemm, m=amounts.gemm.m * share)
    return replace(amounts, volume=volume, gemm=gemm, payload=amounts.payload * share)


class Prices:
    """Seconds of any node of a program's graphs, for the passes that order them. Without a machine by the preset that
    is nearest to the device: orders need only ratios."""

    def __init__(self, graphs: StepGraphs, ctx: PassContext) -> None:
        self.graphs, self.ctx = graphs, ctx

    @cached_property
    def machine(self) -> Machine:
        if self.ctx.machine is not None:
            return self.ctx.machine
        inputs = (edit.tensor_value(node) for node in self.graphs.forward.graph.find_nodes(op="placeholder"))
        on_gpu = any(tensor is not None and tensor.device.type == "cuda" for tensor in inputs)
        return preset("h100-8x400g" if on_gpu else "emulated-200mbit")

    @cached_property
    def sizes(self) -> dict[str, float]:
        return typical_sizes(self.graphs.graphs.values(), self.ctx.fake_mode)

    def __call__(self, node: Node) -> float:
        return self.machine.time_of(amounts_of(node), self.sizes, self.ctx.mesh.axes)
