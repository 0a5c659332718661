"""Timelines: arithmetic and format on timelines made by hand, and a profiled step of a real program."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import moefx
from moefx.__main__ import app
from moefx.errors import MoefxError, UnsupportedUse
from moefx.report import charts
from moefx.report.run import of_trace
from moefx.report.step_times import IDLE, Comparison, StepTimes
from moefx.report.trace_views import summary
from moefx.report.traces import Process, Span, Trace, one_at_a_time
from moefx.runtime.profiler import ClockOffset, Profiler, estimate
from tests.support.handmade import Loop, OneLayer
from tests.support.ranks import one_rank, run_ranks


def span(name: str, track: str, start: float, end: float, **more) -> Span:
    return Span(name, "E" if track == "compute" else "A1", track, start, end, **more)


def hand_made() -> Trace:
    """Step 0 of 4 s, step 1 of 8 s, on two ranks, and a prediction. Half of the communication is hidden."""
    spans = [span("e", "compute", 1, 3), span("a", "comm", 0, 2, waited_s=1), span("b", "comm", 2, 4)]
    slow = [replace(s, start_s=10 + 2 * s.start_s, end_s=10 + 2 * s.end_s, step=1) for s in spans]
    ranks = [Process(f"rank {r}", r, (*spans, *slow), 0.25 * r, 1e-5 * r) for r in range(2)]
    return Trace((Process("predicted", None, tuple(spans)), *ranks), {"machine": "by hand"})


# ---- arithmetic


@pytest.mark.parametrize(
    ("communication", "compute", "share"),
    [
        ([], [(0, 1)], 1.0),
        ([(0, 1)], [], 0.0),
        ([(0, 4)], [(1, 2), (3, 5)], 0.5),
        ([(0, 1), (2, 3)], [(0.5, 2.25)], 0.375),
        ([(0, 2)], [(0, 1), (1, 2)], 1.0),
        ([(5, 6)], [(0, 1), (7, 8)], 0.0),
        ([(1, 1)], [(0, 2)], 1.0),
        ([(0, 2), (1, 4)], [(0, 1), (1, 1)], 0.25),
    ],
)
def test_hidden_share(communication, compute, share):
    """Time counts once, however many exchanges are in flight."""
    spans = [span(f"a{i}", "gradient" if i else "comm", *times) for i, times in enumerate(communication)]
    spans += [span(f"e{i}", "compute", *times) for i, times in enumerate(compute)]
    assert Process("rank 0", 0, tuple(spans)).hidden_share() == pytest.approx(share)


def test_hidden_share_is_counted_instant_by_instant():
    """On a grid fine enough that every span fills cells of it; reads by the host and copies are no exchanges."""
    chance = random.Random(5)
    for _ in range(50):
        busy = {track: [False] * 40 for track in ("compute", "comm", "inter", "host", "d2h", "copy")}
        spans = []
        for i in range(12):
            track, start, long = chance.choice(list(busy)), chance.randrange(36), chance.randrange(5)
            busy[track][start : start + long] = [True] * long
            spans.append(span(f"t{i}", track, start / 4, (start + long) / 4))
        sent = [a or b for a, b in zip(busy["comm"], busy["inter"])]
        hidden = sum(a and b for a, b in zip(sent, busy["compute"]))
        share = hidden / sum(sent) if any(sent) else 1.0
        assert Process("rank 0", 0, tuple(spans)).hidden_share() == pytest.approx(share)


def test_ranks_and_steps_are_summed():
    """1 of 2 s on one rank, 0 of 6 s on the other; programs that run between one another's parts are apart."""
    one = Process("rank 0", 0, (span("a", "comm", 0, 2), span("e", "compute", 1, 3)))
    other = Process("rank 1", 1, (span("a", "comm", 0, 6, program="x"), span("e", "compute", 1, 3, program="y")))
    assert Trace((one, other)).hidden_share().measured == pytest.approx(1 / 8)


# ---- where the time goes


def step_of(*spans: tuple[str, str, float, float], **more) -> tuple[Span, ...]:
    return tuple(Span(f"{kind}{i}", kind, *rest, **more) for i, (kind, *rest) in enumerate(spans))


EXPECTED = step_of(("dense", "compute", 0, 1), ("A1", "comm", 1, 2), ("E", "compute", 2, 5), ("A2", "comm", 4, 6))
PARTS = {"dense": 1, "waiting for rows out": 1, "experts": 3, "waiting for rows back": 1, IDLE: 0}


def test_every_instant_of_a_step_is_in_one_part():
    found = StepTimes.of([Process("predicted", None, EXPECTED)])
    assert found.parts == PARTS
    assert sum(found.parts.values()) == found.seconds == 6
    assert found.overlap == (3, 1)
    two = step_of(("A1", "comm", 0, 2), ("AR", "gradient", 0, 5), ("E", "compute", 6, 7))
    assert StepTimes.of([Process("rank 0", 0, two)]).parts == {
        "waiting for rows out": 2, "waiting for gradients": 3, "experts": 1, IDLE: 1
    }  # fmt: skip
    assert StepTimes.of([Process("rank 0", 0, ())]) is None
    alone = StepTimes.of([Process("rank 0", 0, step_of(("E", "compute", 0, 1)))])
    assert str(alone) == "a step takes 1000.000 ms; nothing is exchanged"


def compared(*measured: tuple[str, str, float, float], **about) -> Comparison:
    """A step on two ranks, twice each, of which the second one takes as long; and the prediction above."""
    steps = *step_of(*measured), *step_of(*measured, step=1)
    ranks = [Process(f"rank {r}", r, steps) for r in range(2)]
    return Comparison.of(Trace((Process("predicted", None, EXPECTED), *ranks), {"machine": "by hand", **about}))


LATE = (("dense", "compute", 0, 1), ("A1", "comm", 1, 2), ("E", "compute", 2, 6), ("A2", "comm", 4, 16))


def test_a_prediction_that_was_off_names_what_it_missed():
    found = compared(*LATE)
    assert found.error == pytest.approx(6 / 16 - 1)
    assert found.causes == {"waiting for rows back": 9}
    assert list(found.differences.items())[:2] == [("waiting for rows back", 9), ("experts", 1)]
    said = str(found)
    assert "predicted: a step takes 6000.000 ms; an exchange is in flight for 3000.000 ms of it" in said
    assert "computation hides 33% of that" in said
    assert "measured: a step takes 16000.000 ms; an exchange is in flight for 13000.000 ms" in said
    assert said.endswith("the prediction was off, 62% too short; most of the difference of +10000.000 ms: "
                         "waiting for rows back +9000.000 ms")  # fmt: skip
    early = compared(("dense", "compute", 0, 1), ("E", "compute", 1, 4), ("A2", "comm", 3, 5))
    assert early.causes == {"waiting for rows out": -1}
    assert "off, 20% too long" in str(early)


def test_a_prediction_that_was_right_blames_nothing():
    near = compared(*LATE[:3], ("A2", "comm", 4, 7))
    assert near.error == pytest.approx(6 / 7 - 1)
    assert near.causes == {}
    assert "off" not in str(near)
    assert near.differences["waiting for rows back"] == 0


def test_a_preset_is_no_prediction_of_milliseconds():
    said = str(compared(*LATE, machine_given=False))
    assert "too short" not in said
    assert "no machine was named: the prediction is for the preset by hand" in said


def test_collectives_of_a_track_are_told_apart():
    found = one_at_a_time([span("a", "comm", 0, 5), span("b", "comm", 1, 7), span("c", "comm", 2, 6),
                           span("d", "comm", 9, 10)])  # fmt: skip
    assert [(s.name, s.start_s, s.end_s) for s in found] == [("a", 0, 5), ("c", 5, 6), ("b", 6, 7), ("d", 9, 10)]


def test_the_quickest_round_tells_the_offset():
    """The other clock is 100 s ahead; the first round took its time on the way out, the third one on the way back."""
    rounds = [(0.0, 109.0, 10.0), (20.0, 120.5, 21.0), (30.0, 130.1, 38.0)]
    assert estimate(rounds) == ClockOffset(100.0, 0.5)
    for sent, read, received in rounds:
        assert abs(estimate([(sent, read, received)]).seconds - 100) <= (received - sent) / 2


def test_offsets_bring_ranks_together():
    first = Process("rank 0", 0, (span("a", "comm", 5, 6),))
    other = Process("rank 1", 1, (span("a", "comm", 105, 106),), 100.0)
    assert other.shifted(-other.clock_offset_s).spans == first.spans


# ---- marks


class Done:
    """A handle whose collective ends when the test says so."""

    def on_done(self, callback) -> bool:
        self.finish = callback
        return True


class Never:
    def on_done(self, callback) -> bool:
        return False


class Ticks:
    """A clock that goes on by one whenever it is read."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now(self) -> int:
        return next(self._ticks)

    def seconds(self, stamp: int) -> float:
        return float(stamp)


def marked(handle) -> list:
    profiler = Profiler(torch.device("cpu"))
    profiler._clock = Ticks()
    run = profiler.begin("forward", type("Step", (), {"program": 7, "number": 3}))
    run.exchange("a")  # 0
    run.under_way("a", handle)
    run.compute("e")  # 1
    if isinstance(handle, Done):
        handle.finish()  # 2
    run.wait("a")  # 3, or 2
    assert run.segments() == [], "a run that has not ended tells nothing"
    run.end()
    return [tuple(segment) for segment in run.segments()]


def test_marks_become_segments():
    assert marked(Done()) == [("exchange", "a", 0, 2), ("compute", "e", 1, 3), ("wait", "a", 3, 4)]


def test_without_word_of_its_end_a_collective_ends_with_its_wait():
    assert marked(Never()) == [("exchange", "a", 0, 3), ("compute", "e", 1, 2), ("wait", "a", 2, 3)]


# ---- the format


def test_the_chrome_format(tmp_path):
    trace = hand_made()
    data = json.loads(trace.save(tmp_path / "trace.json").read_text())
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    names = {(e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(0, "predicted"), (1, "rank 0"), (2, "rank 1")}
    assert len(spans) == 3 + 6 + 6
    assert min(e["ts"] for e in spans) == 0
    assert all(tracks[e["pid"], e["tid"]] == e["args"]["track"] and e["dur"] >= 0 for e in spans)
    first = next(e for e in spans if e["pid"] == 1 and e["name"] == "e")
    assert (first["ts"], first["dur"], tracks[1, first["tid"]]) == (1e6, 2e6, "compute")

    back = Trace.load(tmp_path / "trace.json")
    assert back == trace
    assert back.hidden_share() == (0.5, 0.5)
    assert back.rank(1).busy() == {"compute": 6, "comm": 12}
    assert back.rank(1).run_seconds == 12
    assert math.isnan(Trace(trace.measured).hidden_share().predicted)
    with pytest.raises(KeyError, match="no rank 7"):
        back.rank(7)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [], "otherData": {"format": "other"}}',
                                  '{"traceEvents": [{"ph": "X"}], "otherData": {"format": "moefx timeline 1"}}'])
def test_a_file_that_is_no_trace(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(MoefxError, match="not a trace of moefx"):
        Trace.load(tmp_path / "bad.json")
    with pytest.raises(MoefxError, match="cannot be read"):
        Trace.load(tmp_path / "absent.json")


def test_the_command(tmp_path):
    hand_made().save(tmp_path / "trace.json")
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    assert "50% of the communication is hidden (predicted: 50%)" in done.output
    assert "6000.000" in done.output, "the mean step of a rank takes (4 + 8) / 2 s"
    assert "off, 33% too short; most of the difference of +2000.000 ms" in " ".join(done.output.split())


def test_the_tables_compare_tasks():
    out = Console(record=True, width=140, file=io.StringIO())
    out.print(summary(hand_made(), top=1))
    row = next(line for line in out.export_text().splitlines() if " a " in line and "comm" in line)
    assert [word for word in row.replace("│", " ").split() if word[0].isdigit()] == [
        "3000.000", "2000.000", "1.50", "1000.000"
    ]  # fmt: skip


def test_tasks_of_layers_that_are_alike_are_one_row():
    alike = [replace(span(f"e{n}", "compute", n, n + 0.5), layer=n, chunk=0) for n in range(3)]
    slow = [replace(each, end_s=each.end_s + 0.25 * each.layer) for each in alike]
    other = replace(span("other", "compute", 5, 5.25), layer=3, chunk=0)
    out = Console(record=True, width=140, file=io.StringIO())
    out.print(summary(Trace((Process("predicted", None, (*alike, other)), Process("rank 0", 0, (*slow, other))))))
    rows = [line.replace("│", " ").split() for line in out.export_text().splitlines() if "E[" in line]
    assert rows == [["3", "like", "e2", "forward", "E[0", "to", "2].0", "compute", "750.000", "500.000", "1.50"],
                    ["other", "forward", "E[3].0", "compute", "250.000", "250.000", "1.00"]]  # fmt: skip


def test_a_typical_step_is_drawn():
    """Step 1, the slower one of two, has no prediction; every process begins at 0."""
    trace = hand_made()
    assert trace.typical_step == 1
    shown = trace.of_step(1)
    assert [process.name for process in shown.processes] == ["rank 0", "rank 1"]
    figure = charts.timeline(shown, "forward")
    for axis in ("y", "y2"):
        bars = [bar for bar in figure["data"] if bar["yaxis"] == axis]
        found = {track: (base, long) for bar in bars for track, base, long in zip(bar["y"], bar["base"], bar["x"])
                 if track == "compute"}  # fmt: skip
        assert found == {"compute": (2000, 4000)}
        assert sorted(begin for bar in bars for begin in bar["base"]) == [0, 2000, 4000]
    assert figure["layout"]["yaxis"]["domain"][0] > figure["layout"]["yaxis2"]["domain"][1], "one below the other"
    assert "takes rank 0 8000.0 ms, rank 1 8000.0 ms." in of_trace(trace, "t").to_dict()["sentences"][1]
    with pytest.raises(MoefxError, match="no step 5"):
        trace.of_step(5)
    with pytest.raises(MoefxError, match="no spans"):
        _ = Trace(()).typical_step


# ---- a real program


def profiled(rank: int, world: int) -> dict:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    compiled = moefx.compile(OneLayer(Loop()), mesh, chunks=2, verify=0, dynamic=False)
    tokens = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(rank))

    def step() -> list[torch.Tensor]:
        compiled.zero_grad()
        loss = compiled(tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.to_local().clone() for p in compiled.parameters())]

    plain = step()
    with moefx.profile(compiled) as profile:
        measured = [step(), step()]
        with pytest.raises(UnsupportedUse, match="already"), moefx.profile(compiled):
            pass
    after = step()
    ahead = profile._offset.seconds
    counts = {
        (run.step, s.task): (s.begin_s - ahead, s.end_s - ahead)
        for run in profile._runs
        for s in run.segments()
        if s.what == "exchange" and "_traffic_" in s.task
    }
    result = {
        "counts": counts,
        "same": all(torch.equal(a, b) for other in (*measured, after) for a, b in zip(plain, other, strict=True)),
        "trace": profile.gather(),
        "predicted": moefx.timeline(compiled),
        "share": profile.hidden_share(),
        "sources": moefx.inspect(compiled).code,
    }
    compiled.close()
    return result


def test_a_profiled_step():
    results = run_ranks(2, profiled)
    assert all(r["same"] for r in results), "measuring changed a result"
    assert not any("profiler" in text for r in results for text in r["sources"].values())
    predicted = results[0]["predicted"].predicted
    tasks = {graph: sorted(s.name for s in spans) for (_, graph), spans in predicted.runs.items()}
    assert set(tasks) == {"forward", "backward"}
    assert {s.chunk for s in predicted.spans if s.kind == "E"} == {0, 1}
    assert 0 <= results[0]["share"].measured <= 1
    assert results[0]["share"].predicted == pytest.approx(predicted.hidden_share())

    trace = results[0]["trace"]
    assert trace == results[1]["trace"] or trace.measured == results[1]["trace"].measured
    assert [p.rank for p in trace.measured] == [0, 1]
    assert trace.rank(0).clock_error_s == 0 < trace.rank(1).clock_error_s < 1
    for process in trace.measured:
        assert [graph for _, graph in process.runs] == ["forward", "backward"] * 2
        for (_, graph), spans in process.runs.items():
            assert sorted(s.name for s in spans) == tasks[graph], "every task runs exactly once"
        for track in process.tracks:
            mine = sorted((s.start_s, s.end_s) for s in process.spans if s.track == track)
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine)), f"{track} does two things at once"
    # An exchange of counts cannot end on one rank before the other one has begun it.
    error, counts = trace.rank(1).clock_error_s, [r["counts"] for r in results]
    assert len(counts[0]) == 2 * 2, "two steps of two chunks"
    for here, there in (counts, counts[::-1]):
        for key, (_, end) in here.items():
            assert end + error >= there[key][0]


def test_one_rank_and_a_graph_in_nobodys_order():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        compiled = moefx.compile(OneLayer(Loop()), mesh, verify=0)
        with pytest.raises(UnsupportedUse, match="nothing was compiled"):
            moefx.timeline(compiled)
        tokens = torch.randint(0, 64, (2, 6))
        with moefx.profile(compiled) as profile:
            compiled(tokens, labels=tokens).loss.backward()
        names = {s.name for s in moefx.timeline(compiled).predicted.spans}
        assert {s.name for s in profile.trace.rank(0).spans} == names
        (step,) = (program.step for program in moefx.explain(compiled).programs)
        assert step == profile.compare() == Comparison.of(profile.trace)
        assert step.measured.seconds == pytest.approx(profile.trace.rank(0).run_seconds)
        assert "measured: a step takes" in str(moefx.explain(compiled))
        (loads,), (stats,) = profile.loads.values(), compiled.moe_stats().values()
        assert loads == [stats.load]
        found = compiled.report()
        tree = found.to_dict()
        assert tree["loads"] == profile.loads
        assert tree["explanation"]["step"]["measured"]["seconds"] == step.measured.seconds
        shown = Trace.from_chrome(tree["timeline"])
        assert [process.rank for process in shown.processes] == [0, None]
        assert shown.rank(0).run_seconds == pytest.approx(step.measured.seconds)
        assert tree["links"] == [], "there is nobody to send to"
        assert str(found).splitlines()[1:4] == tree["sentences"]
        with moefx.profile(compiled) as empty:
            pass
        with pytest.raises(UnsupportedUse, match="no step ran"):
            empty.hidden_share()
        assert moefx.explain(compiled).programs[0].step is None, "the last profile has nothing, and there is no machine"
        compiled.close()
