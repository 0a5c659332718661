"""Which number of chunks suits which batch size: MPipeMoE's granularity search, corrected.

Larger batches want as many chunks or more, so what was found for some batch sizes bounds the search for others, and
decides it where both bounds agree (Zhang et al., "MPipeMoE", IPDPS 2023, algorithm 1). The paper's algorithm searches
all degrees every time and then widens the range of whatever it found. With times that are not exactly monotonic
that makes ranges that overlap, and then the answer depends on the order of questions. Here only degrees between those
of the neighbouring ranges are tried, so that ranges cannot overlap.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moefx.errors import MoefxError

TOLERANCE = 0.02  # a degree so near to the best is as good: the known neighbour's is kept then


class Range(NamedTuple):
    """Batches of `low` to `high` rows are cut into `chunks`."""

    low: int
    high: int
    chunks: int


@dataclass(frozen=True)
class GranularityCache:
    """What is known of one region under one algorithm, codec, scheduler and world. A value: `choose` returns a new one.

    ranges: sorted by batch, disjoint, one for each degree, degrees rising.
    """

    ranges: tuple[Range, ...] = field(default=())

    def choose(self, batch: int, degrees: Sequence[int],
               seconds: Callable[[int], float]) -> tuple[int, GranularityCache]:
        """(chunks for a batch of so many rows, the cache that knows it).

        degrees: those to choose from, rising; seconds: the time of one, asked only where the ranges do not decide. Of
        degrees within `TOLERANCE` of the fastest the lower neighbour's counts most, then the upper neighbour's, then
        the least. If the degrees exclude what the ranges say (for want of memory, say), all are asked and nothing is
        learned. Raises MoefxError for degrees that are none, or a batch below 0.
        """
        possible = self.possible(batch, degrees)
        place, below, least, most = self._around(batch)
        if not any(least <= n <= most for n in possible):
            return _fastest(possible, seconds, ()), self
        chosen = possible[0] if len(possible) == 1 else _fastest(possible, seconds, (least, most))
        return chosen, self if below is not None and batch <= below.high else self._with(batch, chosen, place)

    def possible(self, batch: int, degrees: Sequence[int]) -> tuple[int, ...]:
        """Those of the degrees that the ranges leave for a batch of so many rows; all, where they leave none."""
        degrees = tuple(degrees)
        if not degrees or list(degrees) != sorted(set(degrees)) or degrees[0] < 1:
            raise MoefxError(f"the degrees are {degrees}", hint="whole numbers from 1 on, rising")
        if batch < 0:
            raise MoefxError(f"the batch has {batch} rows", hint="0 or more")
        _, _, least, most = self._around(batch)
        return tuple(n for n in degrees if least <= n <= most) or degrees

    def asks(self, batch: int, degrees: Sequence[int], known: Mapping[int, float]) -> int | None:
        """The next degree whose time is wanted, for searches in which times come one by one; None: `choose` decides by
        those that are known, with `known.__getitem__`."""
        possible = self.possible(batch, degrees)
        return None if len(possible) == 1 else next((n for n in possible if n not in known), None)

    def learned(self, batch: int, chunks: int) -> GranularityCache:
        """The cache that knows that so many chunks suit a batch, however that was found; itself, where its ranges say
        otherwise."""
        place, below, least, most = self._around(batch)
        is_known = below is not None and batch <= below.high
        return self if is_known or not least <= chunks <= most else self._with(batch, chunks, place)

    def _around(self, batch: int) -> tuple[int, Range | None, int, float]:
        """(place of the first range above a batch, the range below or around it, the least and most chunks)."""
        place = bisect.bisect_right([found.low for found in self.ranges], batch)
        below = self.ranges[place - 1] if place else None
        above = self.ranges[place] if place < len(self.ranges) else None
        if below is not None and batch <= below.high:
            above = below
        return place, below, below.chunks if below else 1, above.chunks if above else math.inf

    def _with(self, batch: int, chunks: int, place: int) -> GranularityCache:
        """With one more batch between ranges place-1 and place. Degrees rise, so only one of them can have its own."""
        before, after = list(self.ranges[:place]), list(self.ranges[place:])
        low = high = batch
        if before and before[-1].chunks == chunks:
            low = before.pop().low
        elif after and after[0].chunks == chunks:
            high = after.pop(0).high
        return GranularityCache((*before, Range(low, high, chunks), *after))


def _fastest(degrees: Sequence[int], seconds: Callable[[int], float], preferred: Sequence[float]) -> int:
    times = {n: seconds(n) for n in degrees}
    near = [n for n in degrees if times[n] <= min(times.values()) * (1 + TOLERANCE)]
    return next((n for n in preferred if n in near), near[0])  # type: ignore[return-value]
