"""The state machine of tuning: what it keeps for any times, what trials cost, and that equal ranks agree."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.costmodel.granularity import GranularityCache, Range
from moefx.features.tuning.tuner import COOL_DOWN, GAIN, SAMPLES, Tuner, bucket_of, words

A, B, C = (("chunks", 1),), (("alltoall", "2dh"), ("chunks", 1)), (("chunks", 4), ("r", 1))
ARMS = [A, B, C]


def run(tuner, calls, seconds, tokens=lambda call: 100):
    """Calls of one rank after the other: what each took is told one call later, as headers do. The arms that ran."""
    ran, before = [], None
    for call in range(calls):
        arm = tuner.next()
        ran.append(arm)
        if before is not None:
            tuner.learn(*before)
        size = bucket_of(tokens(call))
        before = size, arm or A, seconds(call, size, arm or A)
        tuner.saw(tokens(call))
    return ran


def constant(times, noise=0.0, seed=0):
    draw = random.Random(seed)
    return lambda call, size, arm: times[ARMS.index(arm)] * (1 + draw.uniform(-noise, noise))


def tuner(arms=ARMS, **more):
    return Tuner(lambda tokens: list(arms), **more)


@given(st.lists(st.floats(1.0, 2.0), min_size=3, max_size=3), st.sampled_from([0, 0.005, 0.01]), st.integers(0, 999))
def test_it_keeps_what_is_within_the_gain_of_the_best(times, noise, seed):
    found = tuner()
    run(found, 60, constant(times, noise, seed))
    kept = times[ARMS.index(found.buckets[128].kept)]
    assert kept <= min(times) * (1 + GAIN) * (1 + noise) ** 2 * 1.001


@given(st.lists(st.floats(1.0, 1.5), min_size=3, max_size=3), st.sampled_from([0.02, 0.1, 0.3]), st.integers(0, 999))
@settings(max_examples=40)
def test_it_does_not_flap(times, noise, seed):
    """However noisy the times: cool-downs double as long as trials change nothing."""
    found = tuner()
    ran = run(found, 1000, constant(times, noise, seed))
    trials = [change for change in found.changes if change.medians and "again" not in change.why]
    assert len(trials) <= 1 + 1000 // COOL_DOWN
    if noise <= 0.02:
        assert len(trials) == 1
        assert len(set(ran[40:])) == 1


def test_a_trial_costs_little_where_arms_differ_much():
    found = tuner()
    ran = run(found, 50, constant([1.0, 1.3, 1.5]))
    assert ran.count(B) + ran.count(C) <= 6  # one that is not counted, two that are
    assert sum(constant([1.0, 1.3, 1.5])(0, 0, arm or A) for arm in ran) <= 50 * 1.05


def test_the_first_time_of_an_arm_does_not_count():
    first = set()

    def seconds(call, size, arm):
        is_first = arm not in first
        first.add(arm)
        return 100.0 if is_first else {A: 1.0, B: 0.9, C: 1.2}[arm]

    found = tuner()
    run(found, 40, seconds)
    assert found.buckets[128].kept == B
    assert max(found.buckets[128].seconds.values()) < 2


def test_what_was_kept_stays_unless_another_one_is_faster_by_the_gain():
    for second, kept in ((0.98, A), (0.96, B)):
        found = tuner([A, B])
        run(found, 40, lambda call, size, arm, second=second: {A: 1.0, B: second}[arm])
        assert found.buckets[128].kept == kept
        last = found.changes[-1]
        assert (last.before, last.after, set(last.medians)) == (A, kept, {A, B})
        assert "4.2% faster" in last.why or kept == A


def test_times_that_drift_are_measured_again():
    """Another skew of the routing, say: the batch is of the same size."""
    found = tuner([A, B])
    ran = run(found, 200, lambda call, size, arm: {A: 1.0, B: 1.2}[arm] if call < 100 else {A: 2.0, B: 1.5}[arm])
    assert ran[90] == A
    assert ran[-1] == B
    assert ran[100:].count(A) <= SAMPLES + 6
    assert [change.why.split(":")[0] for change in found.changes if "times what" in change.why] == [
        "takes 2.00 times what it took"]  # fmt: skip


def test_every_bucket_has_an_arm_of_its_own_and_times_count_where_they_were():
    times = {128: {A: 1.0, B: 2.0}, 1024: {A: 9.0, B: 5.0}}
    found = tuner([A, B])
    ran = run(found, 300, lambda call, size, arm: times[size][arm], lambda call: 1000 if call // 50 % 2 else 100)
    assert {size: bucket.kept for size, bucket in found.buckets.items()} == {128: A, 1024: B}
    assert ran[201] == A
    assert ran[251] == B
    assert found.settled() == B


def test_the_model_alone_measures_nothing():
    asked = []

    def candidates(tokens):
        asked.append(tokens)
        return [B, A]

    found = Tuner(candidates, measures=False)
    ran = run(found, 50, constant([1.0, 5.0, 9.0]))
    assert ran == [None] + [B] * 49
    assert asked == [100]


def test_an_arm_that_cannot_be_is_dropped_in_all_buckets():
    found = tuner()
    run(found, 12, constant([1.0, 1.0, 1.0]))
    found.saw(1000)
    found.drop(C, "no room")
    found.drop(A, "no room")
    assert found.buckets[128].arms == found.buckets[1024].arms == (B,)
    assert found.next() == B
    found.saw(10_000)
    assert found.buckets[16384].arms == (B,)
    assert "chunks=4, r=1 cannot be: no room" in [change.why for change in found.changes]
    found.drop(B, "no room")
    assert found.next() == ()


def test_what_was_found_is_not_measured_again():
    first = tuner()
    run(first, 60, constant([1.0, 0.8, 1.2]))
    again = tuner()
    again.load(json.loads(json.dumps(first.state())))
    assert run(again, 60, constant([1.0, 0.8, 1.2])) == [B] * 60
    assert again.buckets[128].seconds == first.buckets[128].seconds


@pytest.mark.parametrize("data", [{}, {"last": 1, "failed": [], "buckets": [[128, {"arms": [], "kept": [], "seconds":
                                  []}]]}, {"last": 1, "failed": 3, "buckets": []}])  # fmt: skip
def test_what_is_no_state_is_refused_and_changes_nothing(data):
    found = tuner()
    with pytest.raises((KeyError, TypeError, ValueError)):
        found.load(data)
    assert not found.buckets
    assert not found.changes


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0.1, 9)), max_size=80))
def test_who_is_told_the_same_has_the_same_arms(calls):
    """A rank that alone would decide otherwise has no say: each is told the largest time of all."""
    one, two = tuner(), tuner()
    for tokens, seconds in calls:
        arm = one.next()
        assert arm == two.next()
        for each in (one, two):
            each.learn(bucket_of(tokens), arm, seconds)
            each.saw(tokens)
    assert one.changes == two.changes
    assert one.state() == two.state()


def test_degrees_lie_between_those_of_other_sizes():
    """One axis: MPipeMoE's search."""
    arms = [(("chunks", n),) for n in (1, 2, 4)]
    found = Tuner(lambda tokens: arms)
    best = {128: 2, 4096: 2}
    run(found, 80, lambda call, size, arm: 1.0 + abs(arm[0][1] - best[size]) if arm in arms else 9.0,
        lambda call: 100 if call < 40 else 4000)  # fmt: skip
    found.saw(1000)
    assert found.buckets[1024].arms == (arms[1],)


def test_a_search_step_by_step_finds_what_the_whole_search_finds():
    cache = GranularityCache((Range(10, 20, 2), Range(100, 100, 8)))
    for batch in (5, 15, 60, 200):
        known = {}
        while (wanted := cache.asks(batch, (1, 2, 4, 8), known)) is not None:
            known[wanted] = abs(wanted - 4.0)
        assert cache.choose(batch, (1, 2, 4, 8), known.__getitem__) == cache.choose(
            batch, (1, 2, 4, 8), lambda n: abs(n - 4.0))  # fmt: skip
    assert cache.learned(60, 4).ranges == (Range(10, 20, 2), Range(60, 60, 4), Range(100, 100, 8))
    assert cache.learned(60, 1) is cache
    assert cache.learned(15, 4) is cache


def test_buckets_and_words():
    assert [bucket_of(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 2048]
    assert words(C) == "chunks=4, r=1"
    assert words(()) == "the options"
    found = tuner([A, B])
    run(found, 40, lambda call, size, arm: {A: 1.0, B: 0.5}[arm])
    assert str(found.changes[-1]).endswith(
        "batches of up to 128 tokens: chunks=1 -> alltoall=2dh, chunks=1: measured to be 100.0% faster "
        "(chunks=1: 1000.000 ms; alltoall=2dh, chunks=1: 500.000 ms)")  # fmt: skip


@pytest.mark.parametrize(("predicts", "words"), [(True, "predicted to be the fastest"), (False, "the simplest")])
def test_only_a_machine_predicts(predicts: bool, words: str) -> None:
    found = Tuner(lambda tokens: [(("chunks", 1),)], predicts=predicts)
    found.next()
    found.saw(8)
    assert found.changes[0].why == words


def test_a_pause_drops_no_arm() -> None:
    """A rank makes a program while others wait: one time of each arm may be that of something else."""
    arms = [(("chunks", n),) for n in (1, 2)]
    found = Tuner(lambda tokens: arms)
    found.next()
    found.saw(8)
    for number in range(40):
        arm = found.next()
        found.learn(8, arm, 9.0 if number == 3 else {1: 1.0, 2: 0.9}[dict(arm)["chunks"]])
    assert dict(found.buckets[8].kept) == {"chunks": 2}
