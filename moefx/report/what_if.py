"""`moefx.plan`: what a model would take on a cluster that nobody has: seconds of a step, memory of a rank, choices.

    found = moefx.plan("Qwen3MoeConfig", machine="h100-8x400g", ranks=2048, ep=64, seq=4096)
    print(found); found.draw("plan.svg"); found.to_json()

Programs are compiled as rank 0 of so many, without the others and without weights. Of a large model those with one
layer of each kind, and with one more: the difference is what a layer takes, and the rest is extrapolated. A program is
not run and not even linked; times and bytes are those by which `moefx.compile` chooses, see docs/cost-model.md.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moefx.costmodel.machine import Machine
from moefx.costmodel.presets import PRESETS, preset
from moefx.errors import MeshError
from moefx.options import Options
from moefx.planning.folding import folds, layer_of
from moefx.planning.planner import Decision, RegionPlan, decide
from moefx.planning.schedules import Sizes
from moefx.report import what_if_views as views
from moefx.report.described import Described, described
from moefx.report.layers import Layers, cut, layers_of
from moefx.report.one_look import PHASES, Look, Numbers, linear, look, nobody, with_batch
from moefx.report.reports import Printed
from moefx.report.within import Counts, Within, within

MOMENTS = 2  # of AdamW, in the parameters' dtype
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class LayerPlan:
    """Layers that are alike. seconds: of one of them, forward and backward, reductions that are hidden left out.
    bytes_kept: of one of them, for the backward; None where only one was compiled, so that it cannot be told from the
    rest. regions: the plans of its mixtures of experts; empty: it has none. curves: {batch: {way to run the first of
    them: seconds}}, and chosen: {batch: way}."""

    name: str
    count: int
    seconds: float | None
    bytes_parameters: float | None
    bytes_kept: float | None
    regions: tuple[RegionPlan, ...] = ()
    curves: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    chosen: Mapping[int, str] = field(default_factory=dict)

    @property
    def crossovers(self) -> tuple[tuple[int, str, str], ...]:
        """(batch, what is chosen below it, what from it on)."""
        pairs = itertools.pairwise(self.chosen.items())
        return tuple((batch, one, other) for (_, one), (batch, other) in pairs if one != other)


@dataclass(frozen=True)
class Plan(Printed):
    """What a step takes, predicted. seconds: forward, backward, what of reductions and gathers nothing hides, and
    AdamW's step, which memory bounds; `step_s` is their sum. memory: bytes on a rank: parameters, gradients, optimizer
    (AdamW), kept for the backward, and the peak of a step with all of them. layers: by kind. mesh: sizes; ep, esp: how
    experts are spread. programs: (layers, seconds) of what was compiled. within: what is not kept to stay in the limit.
    """

    model: str
    machine: Machine
    mesh: Mapping[str, int]
    ep: int
    esp: int
    batch: tuple[int, ...]
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    layers: tuple[LayerPlan, ...]
    programs: tuple[tuple[int, float], ...]
    notes: tuple[str, ...] = ()
    limit: float | None = None
    within: Within | None = None
    ranks_curve: Mapping[int, tuple[int, int, float]] = field(default_factory=dict)
    note: str | None = None

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def __rich__(self) -> Any:
        return views.text(self)

    def draw(self, path: str | Path) -> Path:
        """Write an SVG picture of the crossovers: seconds of a layer over the batch by how it runs, and over the ranks
        that its experts are spread over."""
        return views.draw(self, path)

    def to_dict(self) -> dict[str, Any]:
        return views.to_dict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def plan(model: Any, machine: str | Path | Machine, ranks: int, *, batch: int = 1, seq: int = 4096,
         dp: int | None = None, mp: int = 1, ep: int | None = None, esp: int | None = None,
         memory_limit: float | None = None, layers: int | None = None, dtype: str = "bfloat16",
         options: Options | None = None, whole: bool = False, curves: bool = True) -> Plan:  # fmt: skip
    """Plan for a cluster that need not be there; `python -m moefx plan` is this.

    model: a module, (module, example inputs), a function that gives one of these, a config of transformers, or a name:
        of a config class ("Qwen3MoeConfig"), of a config.json, or "module:function".
    machine: a preset, a file of `python -m moefx calibrate`, or a Machine. ranks: in all.
    batch, seq: of the token ids of one rank, where the model brings no example inputs.
    dp, mp, ep, esp: of the mesh. Experts are folded into `dp` and `mp`, where the ranks are their product; all four
        name a mesh of four dims where that is theirs. ep, esp None: the planner spreads the experts.
    memory_limit: bytes of a rank for all in `Plan.memory`: what is kept for the backward is chosen by it.
    layers: in place of the config's number. whole: compile all of them, and extrapolate nothing.
    options: what else to compile with. curves: also price other batches, for `Plan.draw`.
    Raises MoefxError: unknown names, with the nearest; MeshError: sizes that do not divide; too little memory, with
    what would fit; UnsupportedUse where torch.distributed is in use. Nothing of torch.distributed is left behind.
    """
    found = _machine(machine)
    sizes, ep, esp = _mesh(ranks, found, dp=dp, mp=mp, ep=ep, esp=esp)
    what = described(model, batch, seq, layers=layers, dtype=dtype)
    options = replace(options or Options(), machine=found, ep=ep, esp=esp, ranks_per_node=found.ranks_per_node,
                      memory_limit=None, verify=0)  # fmt: skip
    with nobody(ranks):
        return _Planning(what, sizes, options, found, memory_limit).plan(ranks, whole=whole, curves=curves)


def _machine(machine: str | Path | Machine) -> Machine:
    if isinstance(machine, Machine):
        return machine
    is_file = Path(machine).suffix == ".json" or Path(machine).is_file()
    return Machine.load(machine) if is_file and str(machine) not in PRESETS else preset(str(machine))


def _mesh(ranks: int, machine: Machine, *, dp: int | None, mp: int, ep: int | None, esp: int | None,
          ) -> tuple[dict[str, int], int | None, int | None]:  # fmt: skip
    """(sizes by name, ep and esp that are folded into them)."""
    given = {"ranks": ranks, "dp": dp, "mp": mp, "ep": ep, "esp": esp}
    for name, number in given.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise MeshError(f"{name} is {number!r}", where="plan", hint="1, 2, ..")
    if ranks % machine.ranks_per_node and ranks > machine.ranks_per_node:
        near = ranks // machine.ranks_per_node * machine.ranks_per_node
        raise MeshError(f"{ranks} ranks do not fill nodes of {machine.ranks_per_node} ({machine.name})", where="plan",
                        hint=f"{near} or {near + machine.ranks_per_node}")  # fmt: skip
    if ranks % mp:
        raise MeshError(f"{ranks} ranks do not divide by mp={mp}", where="plan", hint=_nearest(mp, ranks, "mp"))
    if dp is not None and dp * mp != ranks:
        if dp * mp * (ep or 1) * (esp or 1) != ranks:
            raise MeshError(f"dp={dp}, mp={mp}, ep={ep or 1}, esp={esp or 1} are {dp * mp * (ep or 1) * (esp or 1)} "
                            f"ranks, and dp x mp {dp * mp}; there are {ranks}", where="plan",
                            hint=f"leave dp out: experts are folded into dp={ranks // mp}, mp={mp}")  # fmt: skip
        named = {"dp": dp, "mp": mp, "ep": ep or 1, "esp": esp or 1}
        return {name: size for name, size in named.items() if size > 1 or name == "ep"}, None, None
    for name, number in (("ep", ep), ("esp", esp), ("ep x esp", (ep or 1) * (esp or 1))):
        if number is not None and ranks % number:
            raise MeshError(f"{ranks} ranks do not divide by {name}={number}", where="plan",
                            hint=_nearest(number, ranks, name))  # fmt: skip
    return {"dp": ranks // mp} | ({"mp": mp} if mp > 1 else {}), ep, esp


def _nearest(number: int, ranks: int, name: str) -> str:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return f"{name}={min(divisors, key=lambda n: abs(math.log(n / number)))}"


class _Planning:
    def __init__(self, what: Described, sizes: Mapping[str, int], options: Options, machine: Machine,
                 limit: float | None) -> None:  # fmt: skip
        self.what, self.sizes, self.options, self.machine, self.limit = what, sizes, options, machine, limit
        self.programs: list[tuple[int, float]] = []

    def plan(self, ranks: int, *, whole: bool, curves: bool) -> Plan:
        layers = layers_of(self.what.module)
        if layers is None or whole or layers.count <= len(layers.kinds) + 1:
            base, more = self._look(None, ()), {}
        else:
            ones = layers.one_of_each
            base = self._look(layers, ones)
            more = {number: self._look(layers, sorted((*ones, kind.places[1]))).numbers
                    for number, kind in enumerate(layers.kinds) if len(kind) > 1}  # fmt: skip
        numbers = linear(base.numbers, more, {number: len(layers.kinds[number]) - 1 for number in more})
        counts = Counts(layers, is_cut=bool(more))
        kept = within(base, numbers, counts, self.limit, MOMENTS) if self.limit is not None else None
        decision = base.decision if kept is None else kept.decision
        plans = self._layers(counts, base, decision, more)
        notes = [*self.what.notes, *base.decision.notes]
        if curves:
            plans = self._with_curves(plans, base)
        mesh = base.attempt.ctx.mesh
        return Plan(
            self.what.title, self.machine, self.sizes, mesh.size("ep"), mesh.size("esp"), self._shape(),
            self._seconds(numbers, kept), self._memory(numbers, kept), plans, tuple(self.programs),
            tuple(notes), self.limit, kept, self._over_ranks(base, ranks) if curves else {},
        )  # fmt: skip

    def _look(self, layers: Layers | None, places: Sequence[int]) -> Look:
        """Of the model with these layers; the first one says how experts are spread."""
        began = time.perf_counter()
        found = look(cut(self.what.module, layers, places), self.sizes, self.options, self.what.args, self.what.kwargs)
        self.programs.append((len(places), time.perf_counter() - began))
        mesh = found.attempt.ctx.mesh
        if mesh.is_folded:
            self.options = replace(self.options, ep=mesh.size("ep"), esp=mesh.size("esp"))
        return found

    def _shape(self) -> tuple[int, ...]:
        given = (*self.what.args, *self.what.kwargs.values())
        return next((tuple(each.shape) for each in given if isinstance(each, torch.Tensor)), ())

    def _seconds(self, numbers: Numbers, kept: Within | None) -> dict[str, float]:
        found, exposed = {}, 0.0
        for name in PHASES:
            found[name] = busy = numbers.get(f"seconds.{name}", 0.0) + (kept.seconds[name] if kept else 0.0)
            exposed += max(0.0, numbers.get(f"beside.{name}", 0.0) - max(0.0, busy - numbers.get(f"links.{name}", 0.0)))
        moved = 2 * numbers["bytes.parameters"] + (1 + 2 * MOMENTS) * numbers["bytes.gradients"]
        return found | {"exposed": exposed, "optimizer": moved / self.machine.memory_bytes_per_s}

    def _memory(self, numbers: Numbers, kept: Within | None) -> dict[str, float]:
        optimizer = MOMENTS * numbers["bytes.gradients"]
        peak = optimizer + max(numbers.get(f"peak.{name}", 0.0) for name in ("forward", "turn", "end"))
        return {"parameters": numbers["bytes.parameters"], "gradients": numbers["bytes.gradients"],
                "optimizer": optimizer, "kept": numbers["bytes.kept"] - (kept.saved if kept else 0.0),
                "peak": peak if kept is None else kept.bytes}  # fmt: skip

    def _layers(self, counts: Counts, base: Look, decision: Decision, more: Mapping[int, Numbers],
                ) -> tuple[LayerPlan, ...]:  # fmt: skip
        found = []
        for number, (name, count) in enumerate(counts.kinds):
            regions = tuple(plan for plan in decision.regions if counts.kind_of(plan.module) == number)
            each = {key: more[number][key] - base.numbers[key] for key in base.numbers} if number in more else {}
            seconds = each["seconds.forward"] + each.get("seconds.backward", 0.0) if each else None
            found.append(LayerPlan(name, count, seconds, each.get("bytes.parameters"), each.get("bytes.kept"), regions))
        return tuple(found)

    def _with_curves(self, plans: tuple[LayerPlan, ...], base: Look) -> tuple[LayerPlan, ...]:
        """Priced again for other batches, by the same program."""
        batches, ctx = {}, base.attempt.ctx
        if any(plan.regions for plan in plans):
            for batch in BATCHES:
                changed = with_batch(ctx, base.attempt, batch)
                if changed is None:
                    break
                batches[batch] = {each.region: each for each in decide(base.attempt.graphs, changed,
                                                                       self.machine).regions}  # fmt: skip
        found = []
        for plan in plans:
            region, curves, chosen = plan.regions[0].region if plan.regions else None, {}, {}
            for batch, regions in batches.items() if region is not None else ():
                by_way: dict[str, float] = {}
                for each in regions[region].candidates:
                    way = views.way_of(each.choice, with_chunks=False)
                    by_way[way] = min(by_way.get(way, math.inf), each.seconds)
                curves[batch], chosen[batch] = by_way, views.way_of(regions[region].chosen.choice)
            found.append(replace(plan, curves=curves, chosen=chosen))
        return tuple(found)

    def _over_ranks(self, base: Look, ranks: int) -> dict[int, tuple[int, int, float]]:
        """{ranks: (ep, esp, seconds)} of the fastest way to spread the experts of the first region by tokens."""
        attempt, layer = base.attempt, None
        sizes, mesh = Sizes.of(attempt.graphs, attempt.ctx), attempt.ctx.mesh
        for number, facts in sorted(attempt.ctx.decisions.regions.items()):
            layer = layer or layer_of(attempt.graphs.forward.graph.nodes, number, facts.experts, sizes.whole)
        if layer is None:
            return {}
        layer = replace(layer, weight_bytes=layer.weight_bytes * mesh.size("ep+esp"))
        found, mp, n = {}, self.sizes.get("mp", 1), self.machine.ranks_per_node
        while n <= 4 * ranks:
            if n % mp == 0 and (best := folds({"dp": n // mp, "mp": mp}, layer, self.machine)):
                found[n] = best[0].ep, best[0].esp, best[0].seconds
            n *= 4
        return found
