"""The granularity cache: its invariants for any times, and that the paper's own algorithm breaks them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefx.costmodel.granularity import GranularityCache, Range
from moefx.errors import MoefxError

DEGREES = (1, 2, 4, 8)


def seconds(batch, n, alpha=50.0):
    """Communication and computation of n equal chunks, two stages, with a cost per chunk."""
    return max(batch, 1.5 * batch) + 2.5 * batch / n + n * alpha


def noisy(seed, noise):
    draw = random.Random(seed)
    return lambda batch, n: seconds(batch, n) * (1 + draw.uniform(-noise, noise))


class Literal:
    """MPipeMoE's algorithm 1 as printed: search all degrees, then widen the range of the one that was found."""

    def __init__(self):
        self.ranges = {}

    def choose(self, batch, degrees, time):
        for n, (low, high) in self.ranges.items():
            if low <= batch <= high:
                return n
        n = min(degrees, key=time)
        low, high = self.ranges.get(n, (batch, batch))
        self.ranges[n] = min(low, batch), max(high, batch)
        return n

    def as_ranges(self):
        return sorted(Range(low, high, n) for n, (low, high) in self.ranges.items())


def complaint(ranges):
    """What is wrong with ranges, or None."""
    for one, two in itertools.pairwise(ranges):
        if one.high >= two.low:
            return f"{one} and {two} overlap"
        if one.chunks >= two.chunks:
            return f"{one} and {two} do not rise"
    return next((f"{r} is empty" for r in ranges if r.low > r.high), None)


def asked(batches, time, degrees=DEGREES):
    """(cache, answers, number of timings) after a sequence of questions."""
    cache, answers, count = GranularityCache(), {}, 0

    def counted(batch):
        def measure(n):
            nonlocal count
            count += 1
            return time(batch, n)
        return measure

    for batch in batches:
        answers[batch], cache = cache.choose(batch, degrees, counted(batch))
        assert complaint(cache.ranges) is None
    return cache, answers, count


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(0, 99), st.sampled_from([0, 0.01, 0.08, 1]))
def test_ranges_are_disjoint_and_rise_whatever_the_times(batches, seed, noise):
    cache, answers, _ = asked(batches, noisy(seed, noise))
    assert all(answers[b] <= answers[c] for b in answers for c in answers if b <= c)
    for batch, answer in answers.items():  # asked again, it answers the same and measures nothing
        assert cache.choose(batch, DEGREES, None) == (answer, cache)


def test_the_literal_algorithm_overlaps_and_the_check_sees_it():
    """Not at all times, but often: counted over 60 runs, where the corrected one may have none."""
    def run(seed):
        literal, time = Literal(), noisy(seed, 0.08)
        for batch in random.Random(seed).choices([round(16 * 1.1**i) for i in range(52)], k=60):
            literal.choose(batch, DEGREES, lambda n, batch=batch: time(batch, n))
        return literal.as_ranges()

    assert sum(complaint(run(seed)) is not None for seed in range(60)) >= 10


def test_fewer_timings_and_little_regret():
    batches = random.Random(0).choices(range(16, 2000), k=60)
    _, answers, count = asked(batches, seconds)
    assert count < 0.5 * len(DEGREES) * len(set(batches))
    regrets = [seconds(b, n) / min(seconds(b, d) for d in DEGREES) - 1 for b, n in answers.items()]
    assert max(regrets) <= 0.02 + 1e-12  # the tolerance


def test_one_degree_between_neighbours_needs_no_timing():
    cache = GranularityCache((Range(10, 20, 2), Range(100, 100, 4)))
    assert cache.choose(15, DEGREES, None)[0] == 2
    assert cache.choose(60, (1, 2, 3, 4), lambda n: abs(n - 3))[1].ranges == (
        Range(10, 20, 2), Range(60, 60, 3), Range(100, 100, 4)
    )  # fmt: skip
    assert cache.choose(60, DEGREES, lambda n: -n + 9)[1].ranges == (Range(10, 20, 2), Range(60, 100, 4))
    assert cache.choose(60, DEGREES, lambda n: 1.0)[1].ranges == (Range(10, 60, 2), Range(100, 100, 4))


def test_degrees_that_are_not_there_any_more():
    """Too little memory for what the ranges say: any other may be taken, nothing is learned of it."""
    cache = GranularityCache((Range(10, 20, 2),))
    assert cache.choose(15, (4, 8), lambda n: n) == (4, cache)


def test_nonsense_is_refused():
    for degrees in ((), (0, 1), (2, 1), (2, 2)):
        with pytest.raises(MoefxError, match="the degrees are"):
            GranularityCache().choose(1, degrees, float)
    with pytest.raises(MoefxError, match="-1 rows"):
        GranularityCache().choose(-1, DEGREES, float)
