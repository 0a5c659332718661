"""What the backward reads is kept, done again or offloaded, under one budget for the whole step.

Values come in classes (what arrived at the experts, their inner rows, ..), one value for each chunk, and values of one
class are alike: only how many of them go which way matters. What a layer takes is MPipeMoE's equation 10 (Zhang et al.,
IPDPS 2023), extended by fill and drain: with load_q the seconds of queue q in one pass, and n chunks,

    seconds = sum over passes of  max_q load_q + (sum_q load_q - max_q load_q) / n

where loads are those of n chunks together, so that what a message or a launch costs counts n times. The choice
minimises the sum over layers, subject to held + transient <= limit (bytes): held is what waits for the backward, of all
layers; transient what the one layer that runs has in use besides, values that were restored among it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefx.costmodel import budget
from moefx.costmodel.layers import COMM
from moefx.costmodel.simulate import Rates
from moefx.costmodel.tasks import COMPUTE

KEEP = "keep"
PASSES = ("forward", "backward")
QUEUES = (COMPUTE, COMM, "d2h", "h2d")
MOST = 200_000  # mixes of one layer that are looked at together

Loads = Mapping[tuple[str, str], float]
"""(pass, queue) -> seconds."""
Mix = Mapping[str, Mapping[str, int]]
"""{class: {way: how many of its values go it}}."""


@dataclass(frozen=True)
class Way:
    """What one value takes that goes this way, more than one that is kept. held: bytes on the device from the forward
    to the backward; a cut of a value's closure may hold less than the value, and not nothing; what is held twice, more.
    passing: bytes in use besides while one is restored."""

    held: float = 0.0
    loads: Loads = field(default_factory=dict)
    passing: float = 0.0


@dataclass(frozen=True)
class ValueClass:
    """nbytes: of one of `number` equal values. ways: those that are open, by name. slots: how many of those that are
    not kept are back on the device at once (a ring's); 0: all of them."""

    name: str
    nbytes: float
    number: int
    ways: Mapping[str, Way]
    slots: int = 0

    @classmethod
    def of(cls, name: str, nbytes: float, number: int, *, slots: int = 0, **loads: Loads) -> ValueClass:
        """One that can be kept, or go other ways (redo=.., offload=..) that hold nothing and take these loads."""
        ways = {KEEP: Way(nbytes), **{way: Way(0.0, each) for way, each in loads.items()}}
        return cls(name, nbytes, number, ways, slots)


@dataclass(frozen=True)
class Layer:
    """`count` layers of one structure. loads: of one of them with everything kept, all its chunks together. fixed:
    bytes that it has in use while it runs, whatever is kept. seconds: of one with everything kept, where somebody knows
    better than the equation, which then gives only what other mixes take more. times: so many of the model are meant by
    one, and go its way: what they hold and take counts so often."""

    name: str
    chunks: int
    loads: Loads
    classes: tuple[ValueClass, ...]
    fixed: float = 0.0
    count: int = 1
    seconds: float | None = None
    times: int = 1

    def seconds_with(self, loads: NDArray[np.float64], rates: Rates | None = None) -> NDArray[np.float64]:
        """With loads [.., pass, queue] more than what it has."""
        base = as_array(self.loads)
        found = seconds_of(base + loads, self.chunks, rates)
        return found if self.seconds is None else self.seconds + found - seconds_of(base, self.chunks, rates)

    def held(self, mix: Mix) -> float:
        return sum(values.ways[way].held * n for values in self.classes for way, n in mix[values.name].items())

    def back(self, mix: Mix) -> float:
        """Bytes of what is not kept that are on the device at once."""
        return sum(_back(values, list(mix[values.name].values())) for values in self.classes)

    def passing(self, mix: Mix) -> float:
        """Bytes in use besides while they are restored."""
        return sum(_passing(values, list(mix[values.name].values())) for values in self.classes)

    def costs(self, mix: Mix, name: str, rates: Rates | None = None) -> float:
        """Seconds that the ways of one class cost, beside those of the others."""
        loads = {values.name: sum(as_array(values.ways[way].loads) * n for way, n in mix[values.name].items())
                 for values in self.classes}  # fmt: skip
        every = sum(loads.values())
        return float(self.seconds_with(every, rates) - self.seconds_with(every - loads[name], rates))


@dataclass(frozen=True)
class Plan:
    """mixes: of every layer, in order, the alternative that was chosen and its mix. seconds: of the whole step. held,
    transient: bytes. is_exact: nothing is faster within the limit; false only where there were too many mixes to look
    at all."""

    mixes: tuple[tuple[Layer, Mix], ...]
    seconds: float
    held: float
    transient: float
    is_exact: bool = True

    @property
    def bytes(self) -> float:
        return self.held + self.transient


def seconds_of(loads: NDArray[np.float64], chunks: int, rates: Rates | None = None) -> NDArray[np.float64]:
    """Equation 10 as above of loads [.., pass, queue]; rates: how queues slow one another down while both are busy."""
    slowed = loads.copy()
    for (name, other), rate in (rates or {}).items():
        if name in QUEUES and other in QUEUES:
            mine, beside = loads[..., QUEUES.index(name)], loads[..., QUEUES.index(other)]
            slowed[..., QUEUES.index(name)] += np.minimum(mine * (1 / rate - 1), beside * (1 - rate))
    longest = slowed.max(axis=-1)
    return (longest + (slowed.sum(axis=-1) - longest) / chunks).sum(axis=-1)


def as_array(loads: Loads) -> NDArray[np.float64]:
    """[pass, queue]."""
    return np.array([[loads.get((name, queue), 0.0) for queue in QUEUES] for name in PASSES])


class _Mixes(NamedTuple):
    """Of some classes of a layer: bytes [P], loads [P, pass, queue], and which mix of each class [P, classes]."""

    held: NDArray[np.float64]
    transient: NDArray[np.float64]
    loads: NDArray[np.float64]
    picks: NDArray[np.int64]

    def take(self, which: NDArray) -> _Mixes:
        return _Mixes(*(each[which] for each in self))


class _Front:
    """The mixes of one layer of which none is as small as another one and faster."""

    def __init__(self, layer: Layer, rates: Rates | None) -> None:
        self.layer, self.rates, self.is_exact = layer, rates, True
        self.counts = [list(_splits(each.number, len(each.ways))) for each in layer.classes]
        found = _Mixes(np.zeros(1), np.full(1, float(layer.fixed)), np.zeros((1, len(PASSES), len(QUEUES))),
                       np.zeros((1, 0), np.int64))  # fmt: skip
        for values, counts in zip(layer.classes, self.counts):
            if len(found.held) * len(counts) > MOST:
                found, self.is_exact = found.take(self._best(found)), False
            found = _joined(found, _mixes_of(values, counts))
        found = found.take(self._best(found))
        self.held, self.transient, self.picks = found.held, found.transient, found.picks
        self.seconds = layer.seconds_with(found.loads, rates)

    def _best(self, found: _Mixes) -> NDArray:
        return _least(found.held, found.transient, self.layer.seconds_with(found.loads, self.rates))

    def mix(self, point: int) -> Mix:
        return {values.name: dict(zip(values.ways, counts[pick]))
                for values, counts, pick in zip(self.layer.classes, self.counts, self.picks[point])}  # fmt: skip


class _Thing:
    """What one layer may be: all mixes of all its alternatives. of: (alternative, mix)."""

    def __init__(self, alternatives: Sequence[Layer], rates: Rates | None) -> None:
        self.fronts = [_Front(layer, rates) for layer in alternatives]
        of = np.array([(number, point) for number, front in enumerate(self.fronts) for point in range(len(front.held))])
        held, transient, seconds = (np.concatenate([getattr(front, what) for front in self.fronts])
                                    for what in ("held", "transient", "seconds"))  # fmt: skip
        best = _least(held, transient, seconds)
        self.times, self.transient, self.of = alternatives[0].times, transient[best], of[best]
        self.held, self.seconds = self.times * held[best], self.times * seconds[best]

    def within(self, transient: float) -> NDArray:
        """Which mixes need at most so many bytes for a short time; by what they hold, rising."""
        here = np.flatnonzero(self.transient <= transient)
        return here[budget.front(self.held[here], self.seconds[here])]

    def mix(self, point: int) -> tuple[Layer, Mix]:
        number, inner = self.of[point]
        return self.fronts[number].layer, self.fronts[number].mix(inner)


class Space:
    """All that the layers of a step may be; of each its alternatives (numbers of chunks, for example), which have one
    count. least: the fewest bytes, held and transient together, of any mixes."""

    def __init__(self, layers: Sequence[Sequence[Layer]], rates: Rates | None = None) -> None:
        self.things = [_Thing(each, rates) for each in layers]
        self.which = [number for number, each in enumerate(layers) for _ in range(each[0].count)]
        self.is_exact = all(front.is_exact for thing in self.things for front in thing.fronts)
        # For each size that the transient part may have: which mixes need no more of it, and the problem that they are.
        self.problems: list[tuple[float, list[NDArray], budget.Problem]] = []
        for transient in np.unique(np.concatenate([thing.transient for thing in self.things] or [np.zeros(1)])):
            places = [thing.within(transient) for thing in self.things]
            if all(len(each) for each in places):
                choices = [(thing.held[at], thing.seconds[at]) for thing, at in zip(self.things, places)]
                problem = budget.Problem([choices[number] for number in self.which])
                self.problems.append((float(transient), places, problem))
        self.least = min(transient + problem.least for transient, _, problem in self.problems)

    def choose(self, limit: float) -> Plan | None:
        """The fastest mixes whose held + transient bytes stay within the limit. None: `least` is more than that.

        Exact: a Lagrange multiplier gives a lower bound and, with its gap filled value by value, a plan; what may lie
        between the two is searched (`costmodel.budget`), for each size that the transient part may have.
        """
        bounds = [problem.bound(limit - transient) for transient, _, problem in self.problems]
        best, chosen, is_exact = np.inf, None, self.is_exact
        for number in np.argsort(bounds, kind="stable"):
            if bounds[number] >= best:
                break
            transient, places, problem = self.problems[number]
            found = problem.solve(limit - transient, best)
            is_exact &= found.is_exact
            if found.seconds < best:
                best = found.seconds
                chosen = [int(places[number][pick]) for number, pick in zip(self.which, found.picks)]
        if chosen is None:
            return None
        picked = [(self.things[number], point) for number, point in zip(self.which, chosen)]
        return Plan(tuple(thing.mix(point) for thing, point in picked), float(best),
                    float(sum(thing.held[point] for thing, point in picked)),
                    float(max((thing.transient[point] for thing, point in picked), default=0.0)), is_exact)  # fmt: skip

    def near(self, number: int, held: float, transient: float, most: int) -> list[tuple[Layer, Mix]]:
        """Of layer `number` the mixes that equation 10 finds fastest, so many at most, of those that hold and need no
        more bytes than this."""
        thing, more = self.things[self.which[number]], 1 + 1e-9
        here = np.flatnonzero((thing.held <= thing.times * held * more) & (thing.transient <= transient * more))
        return [thing.mix(point) for point in here[np.argsort(thing.seconds[here], kind="stable")][:most]]


def _least(held: NDArray, transient: NDArray, seconds: NDArray) -> NDArray:
    """The indices of those of which no other one has less of everything."""
    kept, small, fast = [], np.empty(0), np.empty(0)
    for each in np.unique(transient):
        here = np.flatnonzero(transient == each)
        here = here[budget.front(held[here], seconds[here])]
        if len(small):
            place = np.searchsorted(small, held[here], side="right") - 1
            here = here[(place < 0) | (fast[place] > seconds[here])]
        kept.append(here)
        small, fast = np.append(small, held[here]), np.append(fast, seconds[here])
        best = budget.front(small, fast)
        small, fast = small[best], fast[best]
    return np.concatenate(kept)


def _splits(number: int, ways: int) -> list[tuple[int, ...]]:
    """All ways to split a number into so many parts, the first the largest first."""
    if ways == 1:
        return [(number,)]
    return [(first, *rest) for first in range(number, -1, -1) for rest in _splits(number - first, ways - 1)]


def _mixes_of(values: ValueClass, counts: Sequence[tuple[int, ...]]) -> _Mixes:
    ways = list(values.ways.values())
    numbers = np.array(counts)
    held = numbers @ np.array([way.held for way in ways])
    loads = np.tensordot(numbers.astype(float), np.stack([as_array(way.loads) for way in ways]), 1)
    transient = np.array([_back(values, each) + _passing(values, each) for each in counts])
    return _Mixes(held, transient, loads, np.arange(len(counts))[:, None])


def _back(values: ValueClass, counts: Sequence[int]) -> float:
    """Bytes of so many values of each way that are back on the device at once, the largest of them."""
    total, slots = 0.0, values.slots or values.number
    for way, count in sorted(zip(values.ways.values(), counts), key=lambda pair: pair[0].held):
        total += max(values.nbytes - way.held, 0.0) * min(count, slots)  # kept twice, it is not back either
        slots -= min(count, slots)
    return total


def _passing(values: ValueClass, counts: Sequence[int]) -> float:
    return max(way.passing for way, count in zip(values.ways.values(), counts) if count)


def _joined(one: _Mixes, other: _Mixes) -> _Mixes:
    """Every mix of the one with every mix of the other."""
    a, b = (index.ravel() for index in np.indices((len(one.held), len(other.held))))
    return _Mixes(one.held[a] + other.held[b], one.transient[a] + other.transient[b], one.loads[a] + other.loads[b],
                  np.concatenate([one.picks[a], other.picks[b]], axis=1))  # fmt: skip
