"""`moefx.plan`: what a model would take on a cluster that you only describe: time, memory of a rank, choices.

    found = moefx.plan("Qwen3MoeConfig", machine="h100-8x400g", ranks=2048, ep=64, seq=4096)
    print(found); found.draw("plan.html"); found.to_json()

Programs are compiled as rank 0 of so many, without the others and without weights. Of a large model those with one
layer of each kind, and with one more: the difference is what a layer takes, and the rest is extrapolated. A program is
not run and not even linked; times and bytes are those by which `moefx.compile` chooses, see docs/cost-model.md.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moefx import progress
from moefx.costmodel.machine import Machine
from moefx.costmodel.machines import PRESETS, preset
from moefx.errors import MeshError
from moefx.options import Options
from moefx.planning.planner import RegionPlan
from moefx.report import page
from moefx.report import what_if_views as views
from moefx.report.described import described
from moefx.report.hints import hints_of
from moefx.report.one_look import at_batch, nobody
from moefx.report.programs import Programs, compiled
from moefx.report.reports import Printed
from moefx.report.within import Within

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class LayerPlan:
    """Layers that are alike. seconds: of one of them, forward and backward, reductions that are hidden left out.
    bytes_kept: of one of them, for the backward; None where only one was compiled, so that it cannot be told from the
    rest. regions: the plans of its mixtures of experts that exchange; has_experts: whether it has any. curves: {batch:
    {way to run the first of them: seconds}}, and chosen: {batch: way}."""

    name: str
    count: int
    seconds: float | None
    bytes_parameters: float | None
    bytes_kept: float | None
    regions: tuple[RegionPlan, ...] = ()
    curves: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    chosen: Mapping[int, str] = field(default_factory=dict)
    has_experts: bool = False

    @property
    def crossovers(self) -> tuple[tuple[int, str, str], ...]:
        """(batch, what is chosen below it, what from it on)."""
        pairs = itertools.pairwise(self.chosen.items())
        return tuple((batch, one, other) for (_, one), (batch, other) in pairs if one != other)


@dataclass(frozen=True)
class Plan(Printed):
    """What a step takes, predicted. seconds: forward, backward, the part of reductions and gathers that nothing hides,
    sums of gradients of micro-batches, and AdamW's step, which memory bounds; `step_s` is their sum. memory: bytes on a
    rank: parameters, gradients, master weights, optimizer (AdamW's moments), values kept for the backward, and the peak
    of a step with all of them. layers: by kind. mesh: sizes. ep, esp: how experts are spread. accumulate: micro-batches
    of a step. batch: shape of one on one rank. dtype: of most weights. tokens: in a step, on all ranks. flops: of the
    matrix products of a step on one rank. peak_flops_per_s: what a rank can do. programs: (layers, seconds) of each
    compilation. within: what is not kept, to stay in the limit. hints: remedies for whatever takes most.
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
    options: Options = field(default_factory=Options)
    accumulate: int = 1
    tokens: int = 0
    flops: float = 0.0
    dtype: str = "float32"
    peak_flops_per_s: float = math.inf
    hints: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def is_extrapolated(self) -> bool:
        return len(self.programs) > 1

    @property
    def has_experts(self) -> bool:
        return any(layer.has_experts for layer in self.layers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.step_s

    @property
    def share_of_peak(self) -> float:
        """The operations of the model's matrix products, each counted once, over those that a rank can do in a step."""
        return self.flops / self.step_s / self.peak_flops_per_s

    def __rich__(self) -> Any:
        return views.text(self)

    def draw(self, path: str | Path) -> Path:
        """Write a page: time, memory, and where one way to run a layer becomes faster than another. Raises MoefxError
        without plotly."""
        data = self.to_dict()
        return page.write({"title": data["title"], "sentences": data["sentences"], "plan": data}, path)

    def to_dict(self) -> dict[str, Any]:
        return views.to_dict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def plan(model: Any, machine: str | Path | Machine, ranks: int, *, batch: int = 1, seq: int = 4096,
         dp: int | None = None, mp: int = 1, ep: int | None = None, esp: int | None = None, accumulate: int = 1,
         memory_limit: float | None = None, layers: int | None = None, dtype: str = "bfloat16",
         options: Options | None = None, whole: bool = False, curves: bool = True) -> Plan:  # fmt: skip
    """Predict time, memory and choices on a cluster that you only describe. `python -m moefx plan` does the same.

    model: a module, (module, example inputs), a function that returns one of these, a config of transformers, or a
        name: of a config class ("Qwen3MoeConfig"), of a config.json, or "module:function".
    machine: a preset, a file of `python -m moefx calibrate`, or a Machine. ranks: how many in all.
    batch, seq: the shape of one rank's token ids, if the model brings no example inputs. accumulate: micro-batches of
        that size in a step, all but the last in `no_sync`.
    dp, mp, ep, esp: sizes of the mesh. If dp x mp is the number of ranks, experts fold into these. If all four multiply
        to it, they are a mesh of four dims. ep, esp None: the planner spreads the experts.
    memory_limit: bytes of a rank for everything in `Plan.memory`; decides what is kept for the backward.
    layers: in place of the config's number. whole: compile all of them, and extrapolate nothing.
    dtype: of weights and gradients. options: what else to compile with; `Parallel.state` is the optimizer's.
    curves: also price other batches, for `Plan.draw`.
    Raises MoefxError for unknown names, with the nearest, and for too little memory, with what would fit; MeshError for
    sizes that do not divide; UnsupportedUse if torch.distributed is in use. It leaves nothing of torch.distributed.
    """
    found = machine_named(machine)
    sizes, ep, esp = mesh_of(ranks, found, dp=dp, mp=mp, ep=ep, esp=esp)
    check_counts(accumulate=accumulate, batch=batch, seq=seq)
    what = described(model, batch, seq, layers=layers, dtype=dtype)
    with nobody(ranks), progress.task(f"planning {what.title}"):
        programs = compiled(what, sizes, asked(options, found, ep=ep, esp=esp), found, whole=whole)
        progress.step("choosing")
        return plan_of(programs, memory_limit, accumulate, curves=curves)


def asked(options: Options | None, machine: Machine, *, ep: int | None, esp: int | None, **changes: Any) -> Options:
    """To compile with. keep "auto" is what a plan's limit does by itself."""
    options = options or Options()
    keep = None if options.keep == "auto" else options.keep
    return options.changed(machine=machine, ep=ep, esp=esp, ranks_per_node=machine.ranks_per_node, memory_limit=None,
                           verify=0, keep=keep, **changes)  # fmt: skip


def machine_named(machine: str | Path | Machine) -> Machine:
    if isinstance(machine, Machine):
        return machine
    is_file = Path(machine).suffix == ".json" or Path(machine).is_file()
    return Machine.load(machine) if is_file and str(machine) not in PRESETS else preset(str(machine))


def mesh_of(ranks: int, machine: Machine, *, dp: int | None, mp: int, ep: int | None, esp: int | None,
          ) -> tuple[dict[str, int], int | None, int | None]:  # fmt: skip
    """(sizes by name, ep and esp that are folded into them)."""
    check_counts(ranks=ranks, dp=dp, mp=mp, ep=ep, esp=esp)
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


def check_counts(**given: int | None) -> None:
    for name, number in given.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise MeshError(f"{name} is {number!r}", where="plan", hint="1, 2, ..")


def _nearest(number: int, ranks: int, name: str) -> str:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return f"{name}={min(divisors, key=lambda n: abs(math.log(n / number)))}"


def plan_of(programs: Programs, limit: float | None, accumulate: int, *, curves: bool = False) -> Plan:
    """Raises MoefxError where nothing fits."""
    kept = programs.within(limit, accumulate)
    base, mesh, ranks = programs.base, programs.mesh, math.prod(programs.sizes.values())
    layers = _layers(programs, kept)
    if curves:
        layers = _with_curves(layers, programs)
    flops = sum(programs.numbers.get(f"flops.{name}", 0.0) for name in ("forward", "backward"))
    found = Plan(
        programs.what.title, programs.machine, programs.sizes, mesh.size("ep"), mesh.size("esp"), programs.shape,
        programs.seconds(kept, accumulate), programs.memory(kept, accumulate), layers, tuple(programs.took),
        (*programs.what.notes, *base.decision.notes), limit, kept, programs.over_ranks(ranks) if curves else {},
        options=programs.options, accumulate=accumulate, flops=accumulate * flops,
        dtype=programs.dtype, tokens=math.prod(programs.shape) * mesh.size("data") * accumulate,
        peak_flops_per_s=programs.machine.gemm_model(programs.dtype).peak_flops_per_s,
    )  # fmt: skip
    return replace(found, hints=tuple(hints_of(found, programs)))


def _layers(programs: Programs, kept: Within | None) -> tuple[LayerPlan, ...]:
    base, counts, found = programs.base, programs.counts, []
    decision = base.decision if kept is None else kept.decision
    for number, (name, count) in enumerate(counts.kinds):
        regions = tuple(plan for plan in decision.regions if counts.kind_of(plan.module) == number)
        inside = [facts.module for facts in base.attempt.ctx.decisions.regions.values()]
        more = programs.more.get(number)
        each = {} if more is None else {key: more.numbers[key] - base.numbers[key] for key in base.numbers}
        seconds = each["seconds.forward"] + each.get("seconds.backward", 0.0) if each else None
        found.append(LayerPlan(name, count, seconds, each.get("bytes.parameters"), each.get("bytes.kept"), regions,
                               has_experts=any(counts.kind_of(path) == number for path in inside)))  # fmt: skip
    return tuple(found)


def _with_curves(layers: tuple[LayerPlan, ...], programs: Programs) -> tuple[LayerPlan, ...]:
    """Priced again for other batches, by the same program."""
    batches = {}
    for batch in BATCHES if any(layer.regions for layer in layers) else ():
        changed = at_batch(programs.base, batch, programs.machine)
        if changed is None:
            break
        batches[batch] = {each.region: each for each in changed.decision.regions}
    found = []
    for layer in layers:
        region, curves, chosen = layer.regions[0].region if layer.regions else None, {}, {}
        for batch, regions in batches.items() if region is not None else ():
            by_way: dict[str, float] = {}
            for each in regions[region].candidates:
                way = each.choice.words(with_chunks=False)
                by_way[way] = min(by_way.get(way, math.inf), each.seconds)
            curves[batch], chosen[batch] = by_way, regions[region].chosen.choice.words()
        found.append(replace(layer, curves=curves, chosen=chosen))
    return tuple(found)
