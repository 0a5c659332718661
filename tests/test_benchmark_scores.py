"""What the benchmarks of adaptive and planned choices make of their measurements; the measurements are made up."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import moefx
from moefx.costmodel.machines import preset
from moefx.options import ARMS
from tests.support.peaks import most_alive
from tests.support.sharing import run_sharing

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Scripts that import one another from their folder."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(BENCHMARKS):
            del sys.modules[name]


def test_half_of_the_rounds_choose_and_the_other_half_judge():
    from interleave import split_half

    figures = {"a": [1.0, 2.0] * 4, "b": [1.2, 1.0] * 4, "c": [1.1, 1.5] * 4}
    oracle, regret, floor = split_half("c", figures)  # even rounds are those with 1.0, 1.2, 1.1
    assert (oracle, round(regret, 4), round(floor, 4)) == ("b", round(1.1 / 1.2 - 1, 4), 0.2)
    assert split_half("b", figures)[1] == 0.0


def test_predictions_of_overlap_are_scored_by_shares_of_the_whole():
    import overlap

    batch = {"predicted": {overlap.WHOLE.name: 2.0, "direct, 2, optsche": 1.0},
             "seconds": {overlap.WHOLE.name: [4.0, 2.0] * 4, "direct, 2, optsche": [4.4, 1.0] * 4}}  # fmt: skip
    assert overlap.regret([batch]) == ("direct, 2, optsche", "direct, 2, optsche", 0.0, pytest.approx(0.1))


def made_up(arms, steps=8, **seconds):
    """Phases in which every name takes a time of its own; "online" makes programs in its first two steps."""
    fixed = {name: [1.0 + number] * steps for number, name in enumerate(arms)}
    tuned = {name: [9.0, 9.0, *[each] * (steps - 2)] if name == "online" else [each] * steps
             for name, each in seconds.items()}  # fmt: skip
    return {"seconds": fixed | tuned, "made": {name: [0, 1] if name == "online" else [] for name in fixed | tuned},
            "arms": {name: ["chunks 2"] * (steps - 1) + [""] for name in tuned}}  # fmt: skip


def test_steps_that_make_programs_count_for_nobody():
    from adaptive import Account

    account = Account.of(made_up(["whole", "cut"], online=1.02, model=1.1))
    assert account.best == "whole"
    assert {len(each) for each in account.seconds.values()} == {6}
    assert account.lost["online"] == [9.0, 9.0]
    assert account.over_best("online") == pytest.approx(0.02)
    assert account.over_best("model") == pytest.approx(0.1)
    assert account.floor == 0.0


def test_the_report_of_a_run_says_what_was_asked_and_found():
    import adaptive

    launch = adaptive.LAUNCHES[1]
    names = [adaptive.name_of(arm) for arm in launch.arms]
    assert len(set(names)) == len(names)
    found = {"launch": asdict(launch), "refused": {"chunks 1, direct, r 0": "no such r"}, "load": "none", "logs":
             {"online": ["step 7: 2 instead of 1 chunks"], "model": []},
             "phases": [made_up(names, online=1.02, model=1.1) for _ in launch.phases]}  # fmt: skip
    text = adaptive.report([json.loads(json.dumps(found))], 8, ["one failed"])
    assert '"online": +2.0%' in text
    assert "At most +3% in every phase was asked: met." in text
    assert "At most +8% in every phase was asked: missed." in text
    assert "step 7: 2 instead of 1 chunks" in text
    assert "chunks 1, direct, r 0 was not measured: no such r" in text
    assert "| 2 (18.0 s) |" in text
    assert '- Steps of "online": 7 chunks 2, 1 as planned; at the end as planned.' in text
    assert text.endswith("- one failed\n")


def test_arms_and_points_are_choices():
    import adaptive
    import regret

    for arm in (arm for launch in adaptive.LAUNCHES for arm in launch.arms):
        assert set(arm) <= set(ARMS)
        moefx.Options.named(**arm)
    for case in regret.CASES:
        points = case.points()
        assert len({point.name for point in points}) == len(points) > 3
        assert not points[0].options
        assert points[0].arm["chunks"] == 1
        assert regret.Case(**json.loads(json.dumps(asdict(case)))) == case
        for point in points:
            assert set(point.arm) <= set(ARMS)
            moefx.Options.named(**{**point.options, **point.arm})
    assert len(set(regret.CASES)) == len(regret.CASES) >= 24
    assert {bool(case.limit) for case in regret.CASES} == {case.copies for case in regret.CASES} == {True, False}


def test_regret_is_told_beside_its_floor():
    import regret

    def found(planned, limit=None):
        seconds = {"whole": [2.0] * 8, "cut": [1.0] * 8, regret.PLANNED: [planned] * 8}
        return {"case": asdict(regret.CASES[0]), "seconds": seconds, "predicted": dict.fromkeys(seconds, 1.1),
                "peaks": {name: 1e6 for name in [*seconds, "big"]}, "limit": limit, "planned": "chunks 2",
                "refused": {}, "load": "none"}  # fmt: skip

    assert regret.score(found(1.0)).regret == 0.0
    assert regret.score(found(1.04)) == ("cut", pytest.approx(0.04), 0.0)
    text = regret.report([found(1.006, 5e5), found(1.0)], ["one failed"], 8)
    assert "2 configurations: mean regret 0.3%, of the floor 0.0%: met; 95th percentile 0.6%, of the floor 0.0%: met" \
        in text  # fmt: skip
    assert "Too large: big." in text
    assert "6 predictions without copies: off by 10% (median), 4 by at most 15 %." in text
    assert "mean regret 4.0%, of the floor 0.0%: missed" in regret.report([found(1.04)], [], 8)


def _runs(rank, world, out, machine):
    import adaptive
    import regret

    arms = ({"chunks": 1, "alltoall": "direct"}, {"chunks": 2, "alltoall": "direct", "scheduler": "optsche"})
    phases = adaptive.Phase(16, "zipf 0"), adaptive.Phase(8, "zipf 1.0")
    launch = adaptive.Launch(arms, phases, per_node=1, experts=4, width=16, inner=16)
    adaptive.run(launch, 4, machine, out)
    points = regret.Point({}, arms[0]), regret.Point({"keep": "mpipemoe-s1"}, arms[1])
    return regret.run(regret.Case(16, 16, per_node=1, width=16, experts=4, limit=0.9), points, 2, machine)


@pytest.mark.full
def test_both_run_on_ranks_that_are_threads(tmp_path):
    import adaptive
    import regret

    out = tmp_path / "found.json"
    found = run_sharing(2, _runs, out, preset("emulated-200mbit"))[0]
    assert "### The whole run" in adaptive.report([json.loads(out.read_text())], 4, [])
    assert "planned" in regret.report([found], [], 2)


def test_planned_memory_is_told_beside_what_was_measured():
    import memory_planned
    from memory_works import ROUTINGS, SIZES

    mib = 2.0**20

    def found(keep, forward, alone, **limits):
        """Of two ranks, of which the second is fuller and off by 1 %."""
        ranks = [tuple(size * mib * share for size in (forward, forward * off, 9, 9, alone))
                 for share, off in ((1, 1), (2, 1.01))]  # fmt: skip
        return memory_planned.Found(SIZES[0], 1, keep, 8, 20 * mib, 4 * mib, dict.fromkeys(ROUTINGS, ranks),
                                    **limits)  # fmt: skip

    whole = found("eager", 10, 10)
    text = memory_planned.report([found("auto", 4, 3, limit=21 * mib, refused=12 * mib), whole])
    assert "4 of 448 combinations" in text
    assert "by an earlier commit.\nWorst error: 1.0%" in text
    saved, limits, every = text.split("\n## ")[1:]
    assert "| balanced | 20.00 (0%) |  |  |  |  |  | 6.00 (70%) |" in saved
    assert "| 1 | 8 | 20.00 | 12.00 | 21.00 | 20.00 | 20.00 | yes |" in limits
    rows = [line for line in every.splitlines() if "balanced" in line]
    assert [row.split(" | ")[7] for row in rows] == ["eager", "auto"]  # in the order of the tables
    assert rows[1].endswith("| auto | 8 | 8.00 | 8.08 | -1.0% | 9.00 | 9.00 | +0.0% |")


def test_what_is_alive_beside_gradients_is_told_apart():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    _, backward, alone = most_alive(layers, torch.ones(2, 8))
    row, weight = 2 * 8 * 4, 8 * 8 * 4
    assert backward == 3 * row + 2 * weight  # in the end: both gradients, and inner rows, the output and its gradient
    assert alone == 4 * row  # and the gradient of inner rows, before any of the weights is made
