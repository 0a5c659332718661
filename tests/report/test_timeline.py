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
from moefx.report.trace_views import draw, summary, typical_step
from moefx.report.traces import Process, Span, Trace, hidden_share, one_at_a_time
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
    ],
)
def test_hidden_share(communication, compute, share):
    spans = [span(f"a{i}", "comm", *times) for i, times in enumerate(communication)]
    spans += [span(f"e{i}", "compute", *times) for i, times in enumerate(compute)]
    assert hidden_share(spans) == pytest.approx(share)


def test_hidden_share_is_the_overlap_of_every_pair():
    chance = random.Random(5)
    for _ in range(50):
        free, spans = {"compute": 0.0, "comm": 0.0, "inter": 0.0, "copy": 0.0}, []
        for i in range(12):
            track = chance.choice(list(free))
            start = free[track] + chance.random()
            free[track] = start + chance.random()
            spans.append(span(f"t{i}", track, start, free[track]))
        sent = [s for s in spans if s.track in ("comm", "inter")]
        hidden = sum(max(0.0, min(s.end_s, c.end_s) - max(s.start_s, c.start_s))
                     for s in sent for c in spans if c.track == "compute")  # fmt: skip
        total = sum(s.seconds for s in sent)
        assert hidden_share(spans) == pytest.approx(hidden / total if total else 1.0)


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
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "trace.json"), "--svg", str(tmp_path / "t.svg")])
    assert done.exit_code == 0, done.output
    assert "50% of the communication is hidden (predicted: 50%)" in done.output
    assert "6000.000" in done.output, "the mean step of a rank takes (4 + 8) / 2 s"
    picture = (tmp_path / "t.svg").read_text()
    assert picture.count("<title>") == 2 * 3, "step 1, the slower one of two, has no prediction"


def test_the_tables_compare_tasks():
    out = Console(record=True, width=140, file=io.StringIO())
    out.print(summary(hand_made(), top=1))
    row = next(line for line in out.export_text().splitlines() if " a " in line and "comm" in line)
    assert [word for word in row.replace("│", " ").split() if word[0].isdigit()] == [
        "3000.000", "2000.000", "1.50", "1000.000"
    ]  # fmt: skip


def test_a_picture_of_a_step_that_is_not_there(tmp_path):
    assert typical_step(hand_made()) == 1
    with pytest.raises(MoefxError, match="no step 5"):
        draw(hand_made(), tmp_path / "t.svg", step=5)
    with pytest.raises(MoefxError, match="no spans"):
        draw(Trace(()), tmp_path / "t.svg")


# ---- a real program


def profiled(rank: int, world: int) -> dict:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    compiled = moefx.compile(OneLayer(Loop()), mesh, moefx.Options(chunks=2, verify=0))
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
        compiled = moefx.compile(OneLayer(Loop()), mesh, moefx.Options(verify=0))
        with pytest.raises(UnsupportedUse, match="nothing was compiled"):
            moefx.timeline(compiled)
        tokens = torch.randint(0, 64, (2, 6))
        with moefx.profile(compiled) as profile:
            compiled(tokens, labels=tokens).loss.backward()
        names = {s.name for s in moefx.timeline(compiled).predicted.spans}
        assert {s.name for s in profile.trace.rank(0).spans} == names
        with moefx.profile(compiled) as empty:
            pass
        with pytest.raises(UnsupportedUse, match="no step ran"):
            empty.hidden_share()
        compiled.close()
