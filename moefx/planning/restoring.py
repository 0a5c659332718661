"""What of the forward is kept, made again or moved away, chunk by chunk and layer by layer, within a limit of memory.

The program with whole regions says what classes of values there are, what each way of theirs takes, and how many bytes
are in use at every node, values of which class among them. A plan's peak follows from that: at every node what is in
use besides, what all layers hold by then, and what the layer that runs has back. `costmodel.restore` makes the fastest
plan of a budget; the largest budget is taken whose plan has its peak within the limit. Of a region's mixes that need no
more bytes, equation 10 names the best few, and the simulator the one that is taken.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moefx import rooms
from moefx.analysis.restorables import FETCHED, GATHERED
from moefx.context.decisions import Restorable, Weighing
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import Amounts, Kind, at
from moefx.costmodel.layers import COMM
from moefx.costmodel.machine import Machine
from moefx.costmodel.restore import PASSES, Layer, Loads, Mix, Plan, Space, ValueClass, Way
from moefx.costmodel.simulate import Rates
from moefx.costmodel.tasks import COMPUTE
from moefx.ir.describe import layer_of
from moefx.options import WEIGHTS
from moefx.planning.degrees import degrees
from moefx.planning.memory import step_memory
from moefx.planning.peak_template import State, Template, Unit
from moefx.planning.pieces import Piece, in_numbers, scaled, stages_of
from moefx.planning.pricing import FORMULAS, Candidate

ARRIVED = ("T_DI", "T_DO")  # roles of values that are rows as ranks with experts have them
RINGS = (2, 1)  # so many chunks of one kind of values are alive at once where something is not kept: two overlap
OPEN = ("keep", "lean", "redo")  # of all machines, beside what is priced of `rooms.keepings`
INSIDE = "inside"  # of R. A region whose scores are applied there is a layer of its own, since inner rows are others
STEPS = 12  # of the search for the largest budget
MOST = 8  # mixes of one region that are simulated


@dataclass(frozen=True)
class Restored:
    """One class of values: bytes of all its chunks where they are kept, the way of each chunk, and the seconds that the
    ways cost its layer, forward and backward. reason: why these. less: bytes that the ways hold less on the device."""

    name: str
    role: str
    nbytes: float
    ways: tuple[str, ...]
    seconds: float
    reason: str
    less: float = 0.0


@dataclass(frozen=True)
class Restoring:
    """What was chosen. bytes: the estimated peak; least: of the plan that needs least. candidates: of every region one
    of those that were given. rings: see `Decisions`. is_exact: see `costmodel.restore.Plan`."""

    bytes: float
    least: float
    rows: tuple[Restored, ...]
    candidates: Mapping[int, Candidate]
    rings: int = 0
    is_exact: bool = True

    @property
    def is_least(self) -> bool:
        return self.bytes <= self.least

    @property
    def ways(self) -> dict[str, tuple[str, ...]]:
        """What `Decisions.restoring` has to say: classes of which something is not kept, and gathered weights."""
        return {row.name: row.ways for row in self.rows if {*row.ways} != {"keep"} or row.role.endswith(GATHERED)}


class _Unit(NamedTuple):
    """A region, or what is around regions in a layer of the model: its classes' names by `ValueClass.name`, its
    alternatives, and the bytes that the program that was looked at keeps of it."""

    key: Any
    names: Mapping[str, str]
    layers: tuple[Layer, ...]
    kept: float


def restore(graphs: StepGraphs, ctx: PassContext, machine: Machine, sizes: Mapping[str, float],
            free: Mapping[int, Candidate], candidates: Mapping[int, Sequence[Candidate]], limit: float) -> Restoring:
    """free: of every region, what to take if everything can be kept. candidates: one of each number of chunks and r.
    Where no plan stays within the limit, the one that needs least."""
    template = template_of(graphs, ctx, sizes)
    kept = Search(template, ctx, machine, sizes, {number: [each] for number, each in free.items()}).all_kept()
    if kept.bytes <= limit:
        return kept
    found = []
    for rings in RINGS:
        found.append(Search(template, ctx, machine, sizes, candidates, rings).run(limit))
        if found[-1].bytes <= limit:
            return found[-1] if rings == RINGS[-1] else replace(found[-1], least=0.0)  # the next one needs less
    return min(found, key=lambda each: each.bytes)


def template_of(graphs: StepGraphs, ctx: PassContext, sizes: Mapping[str, float]) -> Template:
    mark = degrees().arrived(graphs, {name: stages_of(gm.graph.nodes, ctx) for name, gm in graphs.graphs.items()})

    def times(unit: Unit) -> int:
        return ctx.stands_for.get(layer_of(ctx.decisions.regions[unit].module) if isinstance(unit, int) else unit, 1)

    return Template(graphs, step_memory(graphs, ctx.resident, mark), sizes, mark, of_saved=not _is_open(ctx),
                    times=times)  # fmt: skip


def _is_open(ctx: PassContext) -> bool:
    """Whether values that the backward reads may go another way than to be kept."""
    return ctx.options.keep in (None, "auto")


class Search:
    """inside: whether scores may be applied inside of experts where the program does not."""

    def __init__(self, template: Template, ctx: PassContext, machine: Machine, sizes: Mapping[str, float],
                 candidates: Mapping[int, Sequence[Candidate]], rings: int = 0, *, inside: bool = True) -> None:
        self.template, self.ctx, self.machine, self.sizes = template, ctx, machine, sizes
        self.candidates, self.rings, self.inside = candidates, rings, inside
        alike: dict[str, list[_Unit]] = defaultdict(list)
        for unit in self._units():
            alike[repr(unit.layers)].append(unit)
        self.units = [unit for units in alike.values() for unit in units]
        self.space = Space([[replace(layer, count=len(units)) for layer in units[0].layers]
                            for units in alike.values()], self.rates())  # fmt: skip

    # ---- the layers and what they may be

    def _units(self) -> list[_Unit]:
        members: dict[Any, list[Restorable]] = {number: [] for number in self.candidates}
        for each in self.ctx.decisions.restorables if _is_open(self.ctx) else ():
            members.setdefault(each.region if each.region >= 0 else layer_of(each.name), []).append(each)
        dense = [key for key in members if isinstance(key, str)]
        finest = {number: min(self._share(each.choice.chunks) for each in some)
                  for number, some in self.candidates.items()}  # fmt: skip
        outside = max((self.template.transient(key, finest) for key in dense), default=0.0)
        units = []
        for key, some in members.items():
            names = {each.role if isinstance(key, int) else each.name[len(key) :]: each.name for each in some}
            if isinstance(key, int):
                layers = tuple(layer for place, each in enumerate(self.candidates[key])
                               for layer in self._region(str(place), each, some))  # fmt: skip
            else:
                classes = tuple(self._values(name, each, 1, None) for name, each in zip(names, some))
                layers = (Layer("dense", 1, {}, classes, outside),)
            layers = tuple(replace(layer, times=self.template.times.get(key, 1)) for layer in layers)
            kept = sum(at(each.nbytes["keep"], self.sizes) for each in some)
            units.append(_Unit(key, names, layers, kept))
        return units

    def _region(self, name: str, candidate: Candidate, some: Sequence[Restorable]) -> list[Layer]:
        """A region by a candidate, with scores applied outside and, where that can be chosen, inside of its experts."""
        chunks = candidate.choice.chunks
        classes = tuple(self._values(each.role, each, 1 if each.role == FETCHED else chunks, candidate)
                        for each in some)  # fmt: skip
        fixed = max(self.template.transient(number, {number: self._share(chunks)}, candidate.more.rows)
                    for number in self.candidates)  # fmt: skip
        fixed += candidate.more.transient
        found = [Layer(name, chunks, candidate.loads, classes, fixed, seconds=candidate.seconds)]
        weighing = next((each.weighing for each in some if each.weighing is not None), None)
        if weighing is not None and self.inside:
            weighed = tuple(self._weighed(values, weighing, candidate) for values in classes)
            found.append(replace(found[0], name=f"{name} {INSIDE}", classes=weighed))
        return found

    def _weighed(self, values: ValueClass, weighing: Weighing, candidate: Candidate) -> ValueClass:
        """The class where scores are applied inside: no rows that return are kept, and inner rows that are, twice. The
        backward has inner rows by what is to become of them, one after the other: weighed, and times their gradient."""
        more = at(weighing.nbytes, self.sizes) / values.number
        if values.name == "T_M":
            again = {name: replace(way, passing=way.passing + more) for name, way in values.ways.items()}
            kept = values.ways["keep"]
            return replace(values, ways={**again, "keep": replace(kept, held=kept.held + more)})
        if values.name != "R":
            return values
        loads: dict[tuple[str, str], float] = defaultdict(float)
        for amounts in weighing.again:
            one = scaled(in_numbers(Piece(amounts), self.sizes).amounts, 1 / values.number)
            for name in PASSES:
                loads[name, COMM if one.kind is Kind.COLLECTIVE else COMPUTE] += self._seconds(one, candidate)
        return replace(values, ways={INSIDE: Way(0.0, dict(loads), more)})

    def _share(self, chunks: int) -> float:
        return min(1.0, self.rings / chunks) if self.rings else 1.0

    def _values(self, name: str, each: Restorable, chunks: int, candidate: Candidate | None) -> ValueClass:
        """The class as `chunks` equal values."""
        rows = candidate.more.rows if candidate is not None and each.role in ARRIVED else 1.0
        kept = at(each.nbytes["keep"], self.sizes) / chunks * rows
        ways = {}
        for way in self._open(each):
            held = 0.0 if way in rooms.keepings() else at(each.nbytes[way], self.sizes) / chunks * rows
            if way == "keep" or held < kept:
                # What is sent again is rows of about its own size before, in every chunk that is on its way.
                is_sent = any(amounts.kind is Kind.COLLECTIVE for amounts in each.again[way])
                passing = (kept - held) * min(self.rings or chunks, chunks) * is_sent
                ways[way] = Way(held, self._loads(each, way, chunks / rows, candidate), passing)
        return ValueClass(name, kept, chunks, ways, self.rings)

    def _open(self, each: Restorable) -> Sequence[str]:
        if each.role in (FETCHED, WEIGHTS):
            return "keep", "redo"
        return *OPEN, *(name for name, way in rooms.keepings().items() if way.is_priced(self.machine))

    def _loads(self, each: Restorable, way: str, chunks: float, candidate: Candidate | None) -> Loads:
        loads: dict[tuple[str, str], float] = defaultdict(float)
        for amounts in each.again[way]:
            one = scaled(in_numbers(Piece(amounts), self.sizes).amounts, 1 / chunks)
            if one.kind is Kind.COLLECTIVE:
                loads["backward", COMM] += self._seconds(one, candidate)
                loads["backward", COMPUTE] += self.machine.start_s
            elif one.kind is not Kind.HOST:
                loads["backward", COMPUTE] += self._seconds(one, candidate)
        if way in rooms.keepings():
            moved = rooms.keepings()[way].loads(self.machine, at(each.nbytes[way], self.sizes) / chunks)
            for queue, seconds in moved.items():
                loads[queue] += seconds
        return dict(loads)

    def _seconds(self, amounts: Amounts, candidate: Candidate | None) -> float:
        algorithm = FORMULAS[0] if candidate is None else candidate.choice.alltoall
        return self.machine.time_of(amounts, {}, self.ctx.mesh.root,
                                    algorithm=algorithm if algorithm in FORMULAS else FORMULAS[0])  # fmt: skip

    # ---- the search

    def all_kept(self) -> Restoring:
        """The fastest plan; everything is kept."""
        return self._account(*self._tried(math.inf), 0.0)

    def run(self, limit: float) -> Restoring:
        """The plan of the largest budget that has its peak within the limit."""
        smallest, largest = self._tried(self.space.least), self._tried(math.inf)
        if largest[1] <= limit:
            return self._account(*largest, smallest[1])
        best, low, high = smallest, self.space.least, largest[0].bytes
        for _ in range(STEPS if low < high and smallest[1] <= limit else 0):
            middle = (low + high) / 2
            found = self._tried(middle)
            if found[1] <= limit:
                best, low = min(best, found, key=lambda each: each[0].seconds), middle
            else:
                high = middle
        return self._account(*self._simulated(*best, limit), smallest[1])

    def of(self, mixes: Sequence[tuple[Layer, Mix]]) -> Restoring:
        """These of all units, in order, whatever they need."""
        plan = replace(self._tried(math.inf)[0], mixes=tuple(mixes))
        peak = self._peak(plan)
        return self._account(plan, peak, peak)

    def _tried(self, budget: float) -> tuple[Plan, float]:
        """The plan of a budget, and its peak."""
        plan = self.space.choose(max(budget, self.space.least))
        return plan, self._peak(plan)

    def _peak(self, plan: Plan) -> float:
        states = {}
        for unit, (layer, mix) in zip(self.units, plan.mixes):
            share, weights, rows = 1.0, 0.0, 1.0
            if isinstance(unit.key, int):
                more = self._candidate(unit.key, layer).more
                share, weights, rows = self._share(layer.chunks), more.transient, more.rows
            less = layer.times * (unit.kept - layer.held(mix))
            states[unit.key] = State(less, layer.back(mix), layer.passing(mix) + weights, share, rows)
        return self.template.peak(states)

    def _simulated(self, plan: Plan, peak: float, limit: float) -> tuple[Plan, float]:
        """The plan with those of every region's best mixes within the limit that the simulator finds fastest, and its
        peak. Regions that are alike change together."""
        keys = [(self.space.which[place], layer.name, repr(mix)) if isinstance(unit.key, int) else None
                for place, (unit, (layer, mix)) in enumerate(zip(self.units, plan.mixes))]  # fmt: skip
        for key in dict.fromkeys(filter(None, keys)):
            place = keys.index(key)
            layer, mix = plan.mixes[place]
            # What is in use for a short time may be more than budgets say where the peak is elsewhere.
            near = [each for most in (plan.transient, math.inf)
                    for each in self.space.near(place, layer.held(mix), most, MOST)]  # fmt: skip
            found = []
            for each in {(other.name, repr(ways)): (other, ways) for other, ways in near}.values():
                mixes = tuple(each if mine == key else old for mine, old in zip(keys, plan.mixes))
                changed = replace(plan, mixes=mixes)
                if (other := self._peak(changed)) <= limit:
                    found.append((self._seconds_in(self.units[place].key, *each), changed, other))
            if found:
                _, plan, peak = min(found, key=lambda each: each[0])
        return plan, peak

    def _seconds_in(self, number: int, layer: Layer, mix: Mix) -> float:
        """Seconds of a region in the simulator, with these of its values not kept."""
        candidate, extra = self._candidate(number, layer), [defaultdict(float) for _ in range(layer.chunks)]
        for values in layer.classes:
            for chunk, way in zip(extra, _ways(mix[values.name])):
                for queue, seconds in values.ways[way].loads.items():
                    chunk[queue] += seconds
        return candidate.seconds + candidate.restored(extra, self.rings)

    def _candidate(self, number: int, layer: Layer) -> Candidate:
        return self.candidates[number][int(layer.name.removesuffix(INSIDE))]

    def rates(self) -> Rates:
        """Links by the name that loads have: the slower one where there are two."""
        mesh = self.ctx.mesh
        size, local = mesh.nodes_of("ep+esp")
        names = {"intra" if size == local else "inter": COMM}
        return {(names.get(a, a), names.get(b, b)): rate for (a, b), rate in self.machine.interference.items()}

    def _account(self, plan: Plan, peak: float, least: float) -> Restoring:
        rows, candidates = [], {}
        for unit, (layer, mix) in zip(self.units, plan.mixes):
            if isinstance(unit.key, int):
                candidates[unit.key] = self._candidate(unit.key, layer)
            rows += [self._row(unit.names[values.name], layer, values, mix) for values in layer.classes]
        return Restoring(peak, least, tuple(rows), candidates, self.rings, plan.is_exact)

    def _row(self, name: str, layer: Layer, values: ValueClass, mix: Mix) -> Restored:
        ways = _ways(mix[values.name])
        saved = sum(values.nbytes - values.ways[way].held for way in ways)
        if ways[0] == INSIDE:
            reason = f"{saved / 1e6:.1f} MB less on the device: scores are applied before the last product"
        elif len(values.ways) == 1:
            reason = "there is no other way"
        elif saved < 0:
            reason = "kept weighed and not: scores are applied before the last product"
        elif not saved:
            reason = "there is room, or others cost less"
        else:
            reason = f"{saved / 1e6:.1f} MB less on the device"
        seconds = layer.costs(mix, values.name, self.rates())
        return Restored(name, values.name, values.nbytes * values.number, ways, seconds, reason, saved)


def _ways(numbers: Mapping[str, int]) -> tuple[str, ...]:
    """The way of every chunk. numbers: how many go each."""
    return tuple(way for way, number in numbers.items() for _ in range(number))


def mix_of(layer: Layer, strategy: Mapping[str, str]) -> Mix:
    """What is not in a strategy, or cannot go its way, is kept."""
    ways = {values.name: strategy.get(values.name, "keep") for values in layer.classes}
    taken = {values.name: ways[values.name] if ways[values.name] in values.ways else "keep" for values in layer.classes}
    return {values.name: {way: values.number * (way == taken[values.name]) for way in values.ways}
            for values in layer.classes}
