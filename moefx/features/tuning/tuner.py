"""Which choices batches of each size run by, from what real steps took. A pure state machine.

    bucket   batches of about one size: tokens, rounded up to a power of two
    arm      choices in place of those of the options
    trial    the arms of a bucket are run in turn: one that is clearly behind drops out, and after `SAMPLES` times of
             each the fastest by the median is kept, if it is faster by `GAIN` than what was kept before
    kept     then it stays, until its times `DRIFT` away from those of the trial, and the cool-down is over

Whoever tells two of these the same, call by call, gets the same answers: so ranks agree without a message, as long as
what they tell is what all of them know. The first time of an arm in a bucket is not counted: memory and groups of ranks
are made in it. Arms that differ in nothing but the number of chunks are those between which larger and smaller batches
leave a choice (`GranularityCache`), as in MPipeMoE's search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from moefx.costmodel.granularity import GranularityCache
from moefx.options import Arm

SAMPLES = 5  # times of an arm, of which the median counts
PAUSE = 5.0  # times as long as another arm takes no choice
GAIN = 0.03  # what is kept gives way to what is faster by this much
# An arm drops out of a trial where the best of so many of its times is behind the median of the fastest arm's, and its
# own median by so much.
EARLY = {1: 0.3, 2: 0.1, 3: 0.05, 4: GAIN}
DRIFT = 0.1  # times that are this far from those of the trial call for another one
COOL_DOWN, MOST_COOL_DOWN = 20, 640  # calls of a bucket before that; twice as many after a trial that changed nothing


@dataclass(frozen=True)
class Change:
    """What a call came to. call: how many calls with gradients began before. bucket: tokens. before and after: arms,
    equal where a trial changed nothing. medians: seconds of each arm that was measured, of a batch of the whole bucket.
    """

    call: int
    bucket: int
    before: Arm
    after: Arm
    why: str
    medians: Mapping[Arm, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "call": self.call, "bucket": self.bucket, "before": dict(self.before), "after": dict(self.after),
            "why": self.why, "medians": [[dict(arm), seconds] for arm, seconds in self.medians.items()],
        }  # fmt: skip

    def __str__(self) -> str:
        what = words(self.after)
        if self.before != self.after:
            what = f"{words(self.before)} -> {what}"
        times = "; ".join(f"{words(arm)}: {1e3 * seconds:.3f} ms" for arm, seconds in self.medians.items())
        found = f"call {self.call}, batches of up to {self.bucket} tokens: {what}: {self.why}"
        return f"{found} ({times})" if times else found


def words(arm: Arm) -> str:
    """For logs: chunks=2, alltoall=direct."""
    return ", ".join(f"{name}={value}" for name, value in arm) or "the options"


def bucket_of(tokens: int) -> int:
    """Tokens, rounded up to a power of two."""
    return 1 << max(tokens - 1, 0).bit_length()


@dataclass
class Bucket:
    """Batches of one size. arms: the fastest as predicted first. live: those in the trial that is on; none: there is
    none. times: of the trial. seconds: the medians of the last one. recent: the last times of what is kept.
    calm: calls before another trial may begin; cool_down: how many that are at first. paused: whose first time was
    that of a pause: some rank made a program, say."""

    arms: tuple[Arm, ...]
    kept: Arm
    live: list[Arm] = field(default_factory=list)
    times: dict[Arm, list[float]] = field(default_factory=dict)
    seconds: dict[Arm, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    seen: set[Arm] = field(default_factory=set)
    paused: set[Arm] = field(default_factory=set)
    turn: int = 0
    calm: int = 0
    cool_down: int = COOL_DOWN

    def begin_trial(self) -> None:
        self.live = sorted(self.arms, key=lambda arm: arm != self.kept)
        self.times = {arm: [] for arm in self.live}
        self.turn = 0
        self.recent.clear()


class Tuner:
    """The arms of all buckets.

    candidates: for batches of so many tokens, the arms to choose from, the one that is predicted to be fastest first;
    at least one. measures: False takes that one and measures nothing. predicts: False where nothing predicts.
    """

    def __init__(self, candidates: Callable[[int], Sequence[Arm]], *, measures: bool = True,
                 predicts: bool = True) -> None:  # fmt: skip
        self.candidates, self.measures, self.predicts = candidates, measures, predicts
        self.buckets: dict[int, Bucket] = {}
        self.failed: dict[Arm, str] = {}
        self.changes: list[Change] = []
        self.calls = 0
        self.last: int | None = None  # the bucket of the last call
        self._granularity = GranularityCache()

    # -- what is asked

    def next(self) -> Arm | None:
        """Of a call with gradients that begins; None: nothing is known of any bucket yet. A trial goes on with it."""
        self.calls += 1
        bucket = self.buckets.get(self.last)
        if bucket is None:
            return None
        if not bucket.live:
            return bucket.kept
        bucket.turn += 1
        return bucket.live[(bucket.turn - 1) % len(bucket.live)]

    def settled(self) -> Arm | None:
        """Of a call that is not measured."""
        bucket = self.buckets.get(self.last)
        return None if bucket is None else bucket.kept

    # -- what is told

    def saw(self, tokens: int) -> None:
        """A call had batches of so many tokens, on the rank with most: those that follow are taken to have as many."""
        self.last = size = bucket_of(tokens)
        if size in self.buckets:
            return
        arms = tuple(arm for arm in dict.fromkeys(self.candidates(tokens)) if arm not in self.failed) or ((),)
        arms = self._between(size, arms)
        self.buckets[size] = bucket = Bucket(arms, arms[0])
        why = "predicted to be the fastest" if self.predicts else "the simplest"
        if self.measures and len(arms) > 1:
            bucket.begin_trial()
            why = f"{why}; {' and '.join(map(words, arms[1:]))} will be measured beside it"
        self._note(size, arms[0], arms[0], why)

    def learn(self, size: int, arm: Arm, seconds: float) -> None:
        """A call of a bucket took so long by this arm, on the slowest rank, as if its batch had filled the bucket."""
        bucket = self.buckets.get(size)
        if bucket is None or not self.measures or arm not in bucket.arms or len(bucket.arms) < 2:
            return
        if arm not in bucket.seen:
            bucket.seen.add(arm)
        elif arm in bucket.live:
            bucket.times[arm].append(seconds)
            self._forget_pauses(bucket)
            self._judge(size, bucket)
        elif arm == bucket.kept and not bucket.live:
            self._watch(size, bucket, seconds)

    def drop(self, arm: Arm, why: str) -> None:
        """An arm cannot be: no bucket asks for it any more."""
        self.failed[arm] = why
        for size, bucket in self.buckets.items():
            if arm not in bucket.arms:
                continue
            before = bucket.kept
            bucket.arms = tuple(other for other in bucket.arms if other != arm) or ((),)
            bucket.live = [other for other in bucket.live if other != arm]
            bucket.kept = bucket.arms[0] if before == arm else before
            self._note(size, before, bucket.kept, f"{words(arm)} cannot be: {why}")
            if bucket.live:
                self._judge(size, bucket)

    # -- what is remembered

    def state(self) -> dict[str, Any]:
        """What was found, as plain data."""
        return {
            "last": self.last,
            "failed": [[list(map(list, arm)), why] for arm, why in self.failed.items()],
            "buckets": [[size, {"arms": [list(map(list, arm)) for arm in bucket.arms],
                                "kept": list(map(list, bucket.kept)),
                                "seconds": [[list(map(list, arm)), s] for arm, s in bucket.seconds.items()]}]
                        for size, bucket in self.buckets.items() if bucket.seconds],
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what was found is measured no more. Raises KeyError, TypeError or ValueError where the data
        are none of these."""
        failed = {_arm(arm): str(why) for arm, why in state["failed"]}
        buckets = {}
        for size, found in state["buckets"]:
            bucket = Bucket(tuple(map(_arm, found["arms"])), _arm(found["kept"]), calm=COOL_DOWN)
            bucket.seconds = {_arm(arm): float(seconds) for arm, seconds in found["seconds"]}
            if bucket.kept not in bucket.arms or bucket.kept not in bucket.seconds:
                raise ValueError(f"{words(bucket.kept)} was kept, and not measured")
            if min(bucket.seconds.values()) <= 0:
                raise ValueError("a step took no time")
            buckets[int(size)] = bucket
        last = state["last"] if state["last"] in buckets else None
        self.failed, self.buckets, self.last = failed, buckets, last
        for size, bucket in sorted(buckets.items()):
            self._learn_degree(size, bucket)
            self._note(size, bucket.kept, bucket.kept, "was found by an earlier run", bucket.seconds)

    # -- decisions

    def _forget_pauses(self, bucket: Bucket) -> None:
        """No choice makes a step so much slower; each arm has one such time forgotten."""
        known = [min(times) for times in bucket.times.values() if times]
        for arm in set(bucket.live) - bucket.paused:
            if len(bucket.times[arm]) == 1 and bucket.times[arm][0] > PAUSE * min(known):
                bucket.times[arm].clear()
                bucket.paused.add(arm)

    def _judge(self, size: int, bucket: Bucket) -> None:
        """The trial so far: who drops out, and whether it is over."""
        rounds = min(len(bucket.times[arm]) for arm in bucket.live)
        medians = {arm: median(bucket.times[arm]) for arm in bucket.live if bucket.times[arm]}
        if rounds in EARLY:
            best = min(bucket.live, key=medians.__getitem__)
            bucket.live = [arm for arm in bucket.live if arm == best or not (
                min(bucket.times[arm]) > medians[best] and medians[arm] > medians[best] * (1 + EARLY[rounds])
            )]  # fmt: skip
        if rounds >= SAMPLES or len(bucket.live) == 1:
            self._end(size, bucket)

    def _end(self, size: int, bucket: Bucket) -> None:
        known = {arm: median(times) for arm, times in bucket.times.items() if times and arm in bucket.arms}
        before, live = bucket.kept, [arm for arm in bucket.live if arm in known] or [bucket.kept]
        bucket.kept = min(live, key=lambda arm: known.get(arm, 0.0))
        if before in live and known.get(bucket.kept, 0.0) >= known.get(before, 0.0) * (1 - GAIN):
            bucket.kept = before
        bucket.live, bucket.seconds = [], known
        bucket.cool_down = COOL_DOWN if before != bucket.kept else min(2 * bucket.cool_down, MOST_COOL_DOWN)
        bucket.calm = bucket.cool_down
        self._learn_degree(size, bucket)
        if before != bucket.kept:
            slower = known[before] / known[bucket.kept] - 1 if before in known else 0.0
            why = f"measured to be {slower:.1%} faster"
        else:
            why = f"nothing was measured to be more than {GAIN:.0%} faster"
        self._note(size, before, bucket.kept, why, known)

    def _watch(self, size: int, bucket: Bucket, seconds: float) -> None:
        """Whether what is kept still takes what it took in the trial."""
        bucket.recent.append(seconds)
        bucket.calm = max(bucket.calm - 1, 0)
        before, now = bucket.seconds.get(bucket.kept), median(bucket.recent)
        if bucket.calm or len(bucket.recent) < SAMPLES or before is None:
            return
        if not 1 / (1 + DRIFT) < now / before < 1 + DRIFT:
            bucket.begin_trial()
            self._note(size, bucket.kept, bucket.kept, f"takes {now / before:.2f} times what it took: all are measured "
                       "again", {bucket.kept: now})  # fmt: skip

    def _between(self, size: int, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        """Those arms with a number of chunks that what was found for other sizes allows."""
        degrees = {arm: dict(arm).get("chunks") for arm in arms}
        if None in degrees.values() or not _differ_in_chunks_alone(arms):
            return arms
        possible = self._granularity.possible(size, sorted(set(degrees.values())))
        return tuple(arm for arm in arms if degrees[arm] in possible) or arms

    def _learn_degree(self, size: int, bucket: Bucket) -> None:
        chunks = dict(bucket.kept).get("chunks")
        if chunks is not None and _differ_in_chunks_alone(bucket.arms):
            self._granularity = self._granularity.learned(size, chunks)

    def _note(self, size: int, before: Arm, after: Arm, why: str, medians: Mapping[Arm, float] | None = None) -> None:
        self.changes.append(Change(self.calls, size, before, after, why, dict(medians or {})))


def _differ_in_chunks_alone(arms: Iterable[Arm]) -> bool:
    rest = {tuple(item for item in arm if item[0] not in ("chunks", "scheduler")) for arm in arms}
    return len(rest) == 1


def _arm(found: Sequence[Sequence[Any]]) -> Arm:
    """As it was written."""
    arm = tuple((str(name), value) for name, value in found)
    if any(isinstance(value, (list, dict)) for _, value in arm):
        raise TypeError(f"{found} are no choices")
    return arm
