"""Choices that follow batch sizes while a model trains: all ranks switch in the same call, and numbers stay right."""

from __future__ import annotations

import json
import os
import threading
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import moefx
from moefx.compiler.variants import Builder
from moefx.errors import MoefxError, UnsupportedUse
from moefx.features.tuning import arms
from moefx.features.tuning import file as tuning_file
from moefx.features.tuning.follower import Tuning
from tests.support.models import Case, shallow
from tests.support.parity import compare, gradients
from tests.support.ranks import one_rank, run_ranks
from tests.support.scenarios import EP1, EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing
from tests.support.uncapturable import simple

ONE, TWO, THREE = ((("chunks", n),) for n in (1, 2, 3))
CASE = shallow("loop-plain")
SMALL, LARGE = [(2, 8), (1, 6)], [(4, 16), (2, 8)]
# Seconds of a call on each rank, by bucket and arm. For small batches rank 0 alone would take two chunks, for large
# ones rank 1; the largest of a call counts.
SECONDS = [{16: {ONE: 2.0, TWO: 1.0}, 64: {ONE: 1.0, TWO: 1.0}},
           {16: {ONE: 2.0, TWO: 3.0}, 64: {ONE: 3.0, TWO: 1.5}}]  # fmt: skip


class Clock:
    """Of one rank: between the start and the end of a span it goes on by half of what a call takes."""

    def __init__(self, compiled, seconds):
        self.compiled, self.seconds, self.size, self.now = compiled, seconds, 16, 0

    def __call__(self):
        self.now += int(1e9 * self.seconds[self.size][self.compiled.tuning.arm] / 2)
        return self.now


def _train(compiled, rank, steps):
    """(arms of calls, what was decided)."""
    compiled.tuning.clock = clock = Clock(compiled, SECONDS[rank])
    ran = []
    for size, step, calls in ((16, steps[0], 14), (64, steps[1], 14), (16, steps[0], 2)):
        clock.size = size
        for _ in range(calls):
            check_compiled(rank, EP2, CASE, [step], compiled)
            ran.append(compiled.tuning.arm)
    with torch.no_grad():
        compiled(**steps[0][0][rank])
    assert compiled.tuning.arm == ran[-1]
    return ran, [str(change) for change in compiled.tuning.changes]


def _accumulate(compiled, rank, step):
    """All calls but every third keep their gradients back; arms change in between."""
    ran = []
    for _ in range(3):
        compiled.zero_grad()
        for micro in range(3):
            with nullcontext() if micro == 2 else compiled.no_sync():
                compiled(**step[0][rank]).loss.backward()
            ran.append(compiled.tuning.arm)
        compare(gradients(compiled), {n: None if g is None else 3 * g for n, g in step[1].grads.items()}).check(
            f"rank {rank}")  # fmt: skip
    return ran


def _use(compiled, rank, steps):
    """What the user chooses comes before all that is tuned, and teaches nothing."""
    before = compiled.tuning.changes
    compiled.use(chunks=2)
    check_compiled(rank, EP2, CASE, steps, compiled)
    assert compiled.tuning.changes == before


def _all(rank, world, steps, path):
    found = []
    for turn in range(3):
        compiled = compiled_case(CASE, EP2, partial(moefx.compile, options=moefx.Options.named(tune="online",
                                                                                         file=path)))
        if not turn:
            compiled.tuning.clock = Clock(compiled, SECONDS[0])
            found.append(_accumulate(compiled, rank, steps[0]))
            _use(compiled, rank, steps[:1])
            if not rank:
                path.unlink()
        else:
            found.append((*_train(compiled, rank, steps), len(compiled._variants)))
            text = str(moefx.explain(compiled))
        compiled.close()
    return found, text


def test_all_ranks_switch_in_the_same_call_and_remember_it(tmp_path):
    """A third candidate cannot be compiled: it is dropped, on all ranks."""
    path, steps = tmp_path / "made" / "tuned.json", steps_of(CASE, [SMALL, LARGE])
    schedule = Builder._schedule

    def refuse(self, *args):
        if self.options.chunks == 3:
            raise UnsupportedUse("there are no three chunks")
        return schedule(self, *args)

    with (mock.patch.object(arms, "without_machine", return_value=[ONE, TWO, THREE]),
          mock.patch.object(Builder, "_schedule", refuse)):  # fmt: skip
        (first, text), second = run_sharing(2, _all, steps, path)
    assert second[0] == first
    assert set(first[0][:6]) == {ONE, TWO}
    assert first[0][-1] == TWO

    ran, changes, programs = first[1]
    assert programs == 3  # one each, and one for evaluation
    assert ran[:6] == [ONE, ONE, TWO, ONE, TWO, ONE]
    assert set(ran[9:14]) == {ONE}
    assert ran[14:19] == [ONE, ONE, TWO, ONE, TWO], "a wrong guess costs one call"
    assert set(ran[23:29]) == {TWO}
    assert ran[29] == ONE
    assert changes[1].endswith("chunks=1: chunks=3 cannot be: there are no three chunks")
    assert changes[-1].endswith("chunks=1 -> chunks=2: measured to be 100.0% faster "
                                "(chunks=1: 3000.000 ms; chunks=2: 1500.000 ms)")  # fmt: skip

    ran, changes, _ = first[2]
    assert ran == [TWO] + [ONE] * 14 + [TWO] * 14 + [ONE], "the last size of the other run, and nothing measured again"
    assert all("earlier run" in change for change in changes)
    assert " ".join(changes[-1].split()) in " ".join(text.split())
    (found,) = json.loads(path.read_text())["found"].values()
    assert [size for size, _ in found["buckets"]] == [16, 64]


@pytest.mark.full
def test_blocks_of_a_model_have_one_arm_together():
    case, ran = Case("blocks", simple), []
    with one_rank(), mock.patch.object(arms, "without_machine", return_value=[ONE, TWO]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiled block by block
            compiled = compiled_case(case, EP1, partial(moefx.compile, options=moefx.Options(tune="online")))
            compiled.tuning.clock = Clock(compiled, SECONDS[0])
            for _ in range(9):
                check_compiled(0, EP1, case, steps_of(case, [[(2, 8)]]), compiled)
                ran.append(compiled.tuning.arm)
        assert len(compiled._runners) > 1
        assert len(compiled._variants) == 2 * len(compiled._runners)
        compiled.close()
    assert ran == [ONE, ONE, ONE, TWO, ONE, TWO, ONE, TWO, TWO]


def _alike(rank, world, steps):
    compiled, ran = compiled_case(CASE, EP2, partial(moefx.compile, options=moefx.Options(tune="online"))), []
    for _ in range(24):
        check_compiled(rank, EP2, CASE, steps, compiled)
        ran.append(compiled.tuning.arm)
    found = list(map(str, compiled.tuning.changes))
    compiled.close()
    return ran, found


@pytest.mark.full
def test_processes_agree_on_what_their_clocks_say():
    (ran, changes), other = run_ranks(2, _alike, steps_of(CASE, [SMALL]))
    assert other == (ran, changes)
    assert len(set(ran)) == 3
    assert ran[-1] in ran[:3]
    assert "measured" in changes[-1] or "nothing was" in changes[-1]


class Alone:
    """A compiled model of one rank that computes nothing; a call by `arm` takes `seconds(arm)`."""

    def __init__(self, seconds=None, **options):
        device, view = torch.device("cpu"), SimpleNamespace(device_type="cpu", names=("ep",), sizes=(1,))
        ranks = SimpleNamespace(index=0, session=SimpleNamespace(device=device, view=view, to_host=lambda x: None),
                                gather=lambda value, doing: [value], tell=warnings.warn)  # fmt: skip
        self.runner = SimpleNamespace(arm=(), meter=None, refused=None, trained=None, variants_of=lambda arm: [])
        self.tuning = Tuning(moefx.Options.named(**options), None, nn.Linear(1, 1), lambda: ranks,
                             lambda: [self.runner])  # fmt: skip
        self.seconds, self.now = seconds, 0
        self.tuning.clock = self.clock

    def clock(self):
        self.now += int(1e9 * self.seconds(self.tuning.arm) / 2) if self.seconds else 1
        return self.now

    def call(self, tokens=16, *, grad=True, forwards=1, backwards=1, given=()):
        """The arm that it had."""
        self.tuning.begin_call(given, (torch.zeros(tokens, 4),), {}, grad=grad)
        arm, meter = self.runner.arm, self.runner.meter
        if meter is not None:
            for _ in range(forwards):
                with meter.forward(has_backward=True):
                    pass
            for _ in range(backwards):
                meter.hear(torch.tensor([meter.words()]))
                with meter.backward():
                    pass
        return arm


def faster_in_two(arm):
    return 1.0 if arm == TWO else 2.0


def test_a_log_is_run_again(tmp_path):
    path = tmp_path / "log.json"
    one = Alone(faster_in_two, tune="online")
    ran = [one.call(grad=number % 7 != 3) for number in range(40)]
    assert ran[-1] == TWO
    assert () in ran, "programs by the options are whole already"
    one.tuning.save(path)
    again = Alone(tune=path)
    assert [again.call(grad=number % 7 != 3) for number in range(40)] == ran
    assert again.call() == ran[-1]
    for text in ('{"moefx_tuning_log": 99}', "{}"):
        path.write_text(text)
        with pytest.raises(MoefxError, match="is no log of tuning"):
            Alone(tune=path).call()
    with pytest.raises(MoefxError, match="tune is 'always'"):
        moefx.Options(tune="always")


def test_calls_of_several_programs_are_measured_as_one():
    """Blocks of a model; and an activation checkpoint, which runs forwards that have no backward."""
    for forwards, backwards in ((3, 3), (4, 2)):
        model = Alone(lambda arm, share=forwards + backwards: 2 * faster_in_two(arm) / share, tune="online")
        assert [model.call(forwards=forwards, backwards=backwards) for _ in range(30)][-1] == TWO
        found = model.tuning.buckets[16].seconds
        assert found[TWO] == pytest.approx(1.0)
        assert found[ONE] == pytest.approx(2.0)


def test_calls_without_gradients_or_backwards_teach_nothing():
    model = Alone(faster_in_two, tune="online")
    model.call()
    before = len(model.tuning.changes)
    for _ in range(20):
        assert model.call(grad=False) == ()
        model.call(backwards=0)
    assert len(model.tuning.changes) == before + 1
    assert not model.tuning.buckets[16].seconds


def test_nothing_is_tuned_unless_asked_for():
    model = Alone()
    assert [model.call() for _ in range(3)] == [()] * 3
    assert model.runner.meter is None
    assert str(model.tuning) == "nothing was tuned"
    assert Alone(tune="online").call(given=TWO) == TWO


def test_the_model_needs_a_machine():
    with pytest.raises(UnsupportedUse, match="without a machine to predict by"):
        moefx.planning.planner.check_names(moefx.Options(tune="model"))


def test_a_file_that_is_damaged_or_of_a_newer_version_is_not_read(tmp_path):
    path = tmp_path / "tuned.json"
    assert tuning_file.read(path, "key") is None
    for text in ("{", '{"moefx_tuning": 99, "found": {}}', "[]"):
        path.write_text(text)
        with pytest.warns(UserWarning, match="holds nothing that was tuned"):
            assert tuning_file.read(path, "key") is None
    with pytest.warns(UserWarning, match="holds nothing that was tuned"):
        tuning_file.write(path, "key", {"last": 1})
    tuning_file.write(path, "other", {"last": 2})
    assert [tuning_file.read(path, key) for key in ("key", "other")] == [{"last": 1}, {"last": 2}]
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="is not written"):
        tuning_file.write(tmp_path / "file" / "tuned.json", "key", {})


def test_files_are_written_whole(tmp_path):
    """Readers beside a writer see one state or the next, never a part."""
    path, states = tmp_path / "tuned.json", []
    writer = threading.Thread(target=lambda: [tuning_file.write(path, "key", {"last": n}) for n in range(50)])
    writer.start()
    while writer.is_alive():
        states.append(tuning_file.read(path, "key"))
    writer.join()
    found = [state["last"] for state in states if state]
    assert [*found, 49] == [*sorted(found), tuning_file.read(path, "key")["last"]]


def test_another_arm_is_tried_only_for_what_all_ranks_know_and_nobody_chose():
    model = Alone(faster_in_two, tune="online")
    for _ in range(3):
        model.call()
    assert model.runner.arm == TWO
    error = MoefxError("no room\n  for it")
    assert not model.runner.refused(error), "this rank alone"
    error.together = True
    assert model.runner.refused(error)
    assert model.runner.arm == ()
    assert model.tuning.changes[-1].why == "chunks=2 cannot be: no room"
    assert not model.runner.refused(error), "there is nothing beside the options"
    bug = ZeroDivisionError("division by zero")
    bug.together = True
    model.runner.arm = (("chunks", 4),)
    with pytest.warns(UserWarning, match="is a bug of moefx, please report it: ZeroDivisionError"):
        assert model.runner.refused(bug)
    model.call(given=TWO)
    assert model.runner.refused is None


@pytest.mark.parametrize(("ran", "why"), [
    ([[1, [["chunks", [2]]]]], "chunks is [2]"),
    ([[1, [["chunks", -3]]]], "chunks is -3"),
    ([[1, [["foo", 2]]]], "there is no option 'foo'"),
    ([], "there are no calls in it"),
    ([[1, [["chunks", 2]]]], [(1, (("chunks", 2),))]),
])  # fmt: skip
def test_a_log_says_what_is_wrong_with_it(tmp_path, ran, why):
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"moefx_tuning_log": 1, "ran": ran}))
    assert tuning_file.read_log(path) == why


def test_nothing_is_left_where_no_file_can_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.warns(UserWarning, match="is not written"):
        tuning_file.write(tmp_path / "folder", "key", {})
    assert os.listdir(tmp_path) == ["folder"]
