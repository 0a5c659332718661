"""Choices that are made anew while training goes on: what `tune=..` asks for.

    a call begins             it has the arm of the bucket of the call before: the one that is kept, or one on trial
    its forward and backward  are timed on every rank, without what is between them
    a backward begins         its header carries how many tokens the call has on this rank, and what the call before
                              took; all ranks hear that of all
    the next call begins      all ranks put the largest numbers into the same state machine (`tuner.py`), which
                              says the next arm

Nothing is sent for it, and no rank decides anything of its own. A call has the arm of the bucket before it: a batch of
another size costs time, and no more than that. Calls without gradients have what is kept, and teach nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from moefx.capture.inputs import flatten_call, tokens_of
from moefx.costmodel.machine import Machine
from moefx.errors import CaptureError, MoefxError
from moefx.features.tuning import arms, file
from moefx.features.tuning.meter import Clock, Meter, Numbers
from moefx.features.tuning.options import MODES
from moefx.features.tuning.tuner import Bucket, Change, Tuner, bucket_of, words
from moefx.model.runner import Runner
from moefx.options import Arm, Options
from moefx.planning.plans import Decision
from moefx.runtime.together import Ranks

log = logging.getLogger("moefx")


class Call(Meter):
    """A call that is measured. tokens: on this rank, and once ranks have told, on that with most."""

    arm: Arm = ()
    tokens: int = 0


class Tuning:
    """What was chosen for a compiled model, and why. `str()` tells it."""

    clock: Clock = staticmethod(time.perf_counter_ns)

    def __init__(self, options: Options, machine: Machine | None, model: nn.Module, ranks: Callable[[], Ranks],
                 runners: Callable[[], Sequence[Runner]]) -> None:  # fmt: skip
        """ranks: all of the mesh. runners: of the model, as it is compiled when that is asked."""
        self._options, self._machine, self._model = options, machine, model
        self._ranks, self._runners = ranks, runners
        self._tuner = Tuner(self._candidates, measures=options.tune.mode == "online",
                            predicts=machine is not None)  # fmt: skip
        self._is_on = options.tune.mode != "off"
        self._was_read = not self._is_on
        self._noted = 0  # changes that were told
        self._done: deque[Call] = deque()  # calls that ranks have not told one another of
        self._heard: deque[tuple[Call, Call | None, Numbers]] = deque()
        self._telling: Call | None = None
        self._last: Call | None = None
        self._now: Arm = ()
        self._plain_of: tuple[int, Arm] = (0, ())  # of so many programs
        self._calls, self._in_call = 0, False
        self._ran: list[tuple[int, Arm]] = []  # from which call on which arm's programs ran
        self._replayed: list[tuple[int, Arm]] | None = None  # by an earlier run

    # -- what users read

    @property
    def changes(self) -> tuple[Change, ...]:
        """What was decided, the oldest first."""
        return tuple(self._tuner.changes)

    @property
    def buckets(self) -> dict[int, Bucket]:
        """By tokens: the arms of batches of that size, and what they took."""
        return dict(self._tuner.buckets)

    @property
    def arm(self) -> Arm:
        """Of the last call."""
        return self._now

    def save(self, path: str | os.PathLike) -> None:
        """Write which calls had which arm; `tune=path` makes the calls of another run alike, to the last bit.
        Any rank may: all know the same."""
        file.write_log(Path(path), self._ran)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing was tuned"

    # -- calls

    def set_arm(self, given: Arm) -> None:
        """Of programs that are made now, on all ranks. given: the user's, which comes before all that is tuned."""
        if not self._is_on or given:
            self._give(given, None, is_users=True)
            return
        self._read()
        self._give(self._as_run(self._tuner.settled()) if self._replayed is None else self._replayed_arm(), None)

    def begin_call(self, given: Arm, args: tuple, kwargs: Mapping[str, Any], *, grad: bool) -> None:
        """A call of the model begins on all ranks, who have made all calls before it."""
        if not self._is_on or given:
            self._give(given, None, is_users=True)
            return
        self._read()
        if self._replayed is not None:
            self._now = self._replayed_arm()
            self._give(self._now, None)
            self._begin(self._now)
            return
        self._listen()
        arm = self._tuner.next() if grad else self._tuner.settled()
        self._note()
        self._now = self._explicit(arm)
        call = None
        if grad:
            call = Call(self, self._ranks().session, self.clock)
            call.arm, call.tokens = self._now, tokens_of(flatten_call(args, dict(kwargs))[0])
        self._last = call
        self._give(self._as_run(arm), call)
        self._begin(self._as_run(arm))

    def _replayed_arm(self) -> Arm:
        """Of the next call."""
        return next((arm for first, arm in reversed(self._replayed) if first <= self._calls + 1), ())

    def _give(self, arm: Arm, call: Call | None, *, is_users: bool = False) -> None:
        for runner in self._runners():
            runner.arm, runner.meter, runner.refused = arm, call, None if is_users else self._refuse
        self._in_call = False

    def _begin(self, arm: Arm) -> None:
        self._in_call, self._calls = True, self._calls + 1
        self._record(arm)

    def _record(self, arm: Arm) -> None:
        """Of the call that begins."""
        if self._ran and self._ran[-1][0] == self._calls:
            self._ran.pop()
        if not self._ran or self._ran[-1][1] != arm:
            self._ran.append((self._calls, arm))

    def _refuse(self, error: Exception) -> bool:
        """A program could not be made; whether there is another arm to try. All ranks ask this, or none."""
        arm, is_known = self._runners()[0].arm, vars(error).get("together", False)
        if not arm or not is_known or isinstance(error, CaptureError) or self._replayed is not None:
            return False
        why = error.what if isinstance(error, MoefxError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, MoefxError):
            self._ranks().tell(f"no program can be made with {words(arm)}, which is a bug of moefx, please report it: "
                               f"{why}")  # fmt: skip
        self._tuner.drop(self._explicit(arm), next(iter(why.splitlines()), ""))
        self._note()
        self._now = self._explicit(self._tuner.settled())
        if self._last is not None:
            self._last.arm = self._now
        arm = self._as_run(self._now)
        for runner in self._runners():
            runner.arm = arm
        if self._in_call:
            self._record(arm)
        return True

    # -- what ranks tell one another (`meter.Book`)

    def tell(self, call: Call) -> tuple[int, int]:
        self._telling = self._done.popleft() if self._done else None
        return (0 if self._telling is None else self._telling.nanoseconds()), call.tokens

    def hear(self, call: Call, found: Numbers) -> None:
        self._heard.append((call, self._telling, found))

    def note_done(self, call: Call) -> None:
        self._done.append(call)

    def _listen(self) -> None:
        """What was heard since the last call. On CUDA this waits until the device has begun the last backward."""
        if self._last is not None and self._last.backwards and self._last.to_come:
            self._done.append(self._last)  # programs that an activation checkpoint runs twice have one backward
        self._last = None
        while self._heard:
            call, done, numbers = self._heard.popleft()
            told = numbers.wait()
            call.tokens = max(tokens for _, tokens in told)
            taken = [ns for ns, _ in told]
            if done is not None and all(taken):
                size = bucket_of(done.tokens)
                self._tuner.learn(size, done.arm, 1e-9 * max(taken) * size / max(done.tokens, 1))
            self._tuner.saw(call.tokens)

    # -- arms

    def _candidates(self, tokens: int) -> list[Arm]:
        if self._machine is None:
            return arms.without_machine(self._options)
        variants = [runner.trained for runner in self._runners()]
        if None in variants and self._tuner.buckets:  # none was made in this run: as for the nearest size
            size = bucket_of(tokens)
            return list(min(self._tuner.buckets.items(), key=lambda item: max(size / item[0], item[0] / size))[1].arms)
        plans = [variant.planned_for(tokens, self._options) for variant in variants if variant is not None]
        return [arm for arm, _ in arms.near([plan for plan in plans if plan is not None], self._options)] or [()]

    @property
    def _plain(self) -> Arm:
        """What programs by the options are, as an arm; (): no arm, as regions differ, or nothing was compiled."""
        if self._machine is None:
            return arms.without_machine(self._options)[0]
        variants = [variant for runner in self._runners() for variant in runner.variants_of(())]
        if self._plain_of[0] != len(variants):
            self._plain_of = len(variants), self._plan_of([variant.context.decisions.plan for variant in variants])
        return self._plain_of[1]

    def _plan_of(self, plans: Sequence[Decision | None]) -> Arm:
        """What all regions were planned to have."""
        found = {arms.arm_of(region.chosen, region, self._options) for plan in plans if plan for region in plan.regions}
        return found.pop() if len(found) == 1 else ()

    def _as_run(self, arm: Arm | None) -> Arm:
        """() where programs by the options are the same."""
        return () if arm is None or arm == self._plain else arm

    def _explicit(self, arm: Arm | None) -> Arm:
        return arm or self._plain

    # -- the file, and the log

    def _read(self) -> None:
        """What an earlier run found: the first rank reads it for all. A collective, at the first call."""
        if self._was_read:
            return
        ranks, named = self._ranks(), self._options.tune.mode
        if named not in MODES:
            log_or_error = file.read_log(Path(named)) if ranks.index == 0 else None
            found = ranks.gather(log_or_error, "reading what is run again")[0]
            if isinstance(found, str):
                hint = f"compiled.tuning.save(path) writes one; or one of {', '.join(MODES)}"
                raise MoefxError(f"{named} is no log of tuning: {found}", where="tune=..", hint=hint)
            self._replayed = found
        self._was_read = True  # what could not be read is no log in the next call, either
        if named == "online":
            path, mine = self._path(ranks), None
            if path is not None:
                mine = file.read(path, self._key)
            found = ranks.gather(mine, "reading what was tuned")[0]
            if found is not None:
                try:
                    self._tuner.load(found)
                except (KeyError, TypeError, ValueError) as error:
                    ranks.tell(f"what was tuned cannot be read, and is measured again: {error!r}")

    def _note(self) -> None:
        """Tell, and write down, what was decided since the last time."""
        new = self._tuner.changes[self._noted :]
        if not new:
            return
        self._noted += len(new)
        ranks = self._ranks()
        if ranks.index == 0:
            for change in new:
                log.info("tune: %s", change)
        path = self._path(ranks)
        if path is not None and any(change.medians for change in new):
            file.write(path, self._key, self._tuner.state())

    def _path(self, ranks: Ranks) -> Path | None:
        named = self._options.tune.file
        return None if named is None or ranks.index else Path(named)

    @property
    def _key(self) -> str:
        """Of the machine, the model, the mesh and the options: for others, other choices are best."""
        shapes = [(name, tuple(param.shape), str(param.dtype)) for name, param in self._model.named_parameters()]
        view = self._ranks().session.view
        told = {name: value for name, value in self._options.told().items() if name != "tune"}
        mine = type(self._model).__name__, shapes, view.device_type, view.names, view.sizes, sorted(told.items())
        machine = "no machine" if self._machine is None else f"{self._machine.name} {self._machine.digest()}"
        return f"{machine}, {type(self._model).__name__} {hashlib.sha256(repr(mine).encode()).hexdigest()[:16]}"
