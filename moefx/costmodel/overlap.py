"""How much communication computation hides: one definition for timelines that were planned, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from moefx.costmodel.tasks import COMPUTE, INSIDE

Interval = tuple[float, float, str]
"""(start, end, track) of a span, in seconds; the track is the resource of a task."""


class Overlap(NamedTuple):
    """in_flight_s: seconds in which at least one exchange with other ranks is in flight. hidden_s: those of them in
    which this rank computes."""

    in_flight_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds in which an exchange is in flight and nothing is computed."""
        return self.in_flight_s - self.hidden_s

    @property
    def share(self) -> float:
        """Hidden, of the time in flight; 1 where nothing is exchanged."""
        return self.hidden_s / self.in_flight_s if self.in_flight_s else 1.0


class Stretch(NamedTuple):
    """Between two events. computing, exchanging: the numbers of the spans that run, those that end first in front."""

    seconds: float
    computing: Sequence[int]
    exchanging: Sequence[int]


def stretches(spans: Sequence[Interval]) -> Iterator[Stretch]:
    """The time of one rank, from event to event. Spans may overlap, also within a track."""
    by_end = sorted(range(len(spans)), key=lambda i: spans[i][1])
    events = []
    for place, number in enumerate(by_end):
        start, end, track = spans[number]
        if track == COMPUTE or track not in INSIDE:
            events += [(start, 0, place), (end, 1, place)]  # of one instant, starts are first
    events.sort()
    computing: set[int] = set()
    exchanging: set[int] = set()
    for (now, ends, place), (then, _, _) in pairwise(events):
        running = computing if spans[by_end[place]][2] == COMPUTE else exchanging
        (running.discard if ends else running.add)(place)
        if then > now:
            yield Stretch(then - now, *([by_end[i] for i in sorted(each)] for each in (computing, exchanging)))


def overlap(spans: Iterable[Interval]) -> Overlap:
    """Of the spans of one rank: hidden is the part of the time with an exchange in flight in which it computes."""
    in_flight = [stretch for stretch in stretches(list(spans)) if stretch.exchanging]
    return Overlap(sum(each.seconds for each in in_flight), sum(each.seconds for each in in_flight if each.computing))


def together(found: Iterable[Overlap]) -> Overlap:
    """Of several ranks or steps: the sums."""
    return Overlap(*map(sum, zip(Overlap(), *found)))
