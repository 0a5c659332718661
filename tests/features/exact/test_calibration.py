"""Copies by a forecast, corrected by the rows that there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moefx.features.exact import calibration, transport
from moefx.placement import decide, exact, tables
from moefx.placement.loads import Window
from moefx.placement.score import Costs
from tests.support.skews import Skew, fits, least_cap, skews, traces, zipf

# A row takes a millisecond, an expert on its way ten; nothing hides what is late.
COSTS = Costs(1e-3, 0, 1e6, 1e6, (1e-8, 1e-8), hidden=(1.0, 1.0))


def checked(case: Skew, before: np.ndarray, table: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """[n]: rows by rank, of tables that fit what they are for."""
    ranks, cap = len(case.loads), sum(case.slots)
    tables.Plan(table, np.full((ranks, *table.shape), 1 << tables.BITS)).check(case.owners, *case.slots)
    for old, new in zip(before, table):
        assert {*old[old >= 0]} <= {*new[new >= 0]}  # what was there stays
    assert (quota >= 0).all()
    assert (quota.sum(2) == case.loads).all()
    assert not quota[:, table < 0].any()
    return tables.traffic(table, quota, ranks * cap).reshape(ranks, ranks, cap).sum((0, 2))


def test_forecasts_leave_a_slot_free_on_every_rank_that_has_several():
    for case in skews(11, 20):
        for costs in (None, COSTS):
            room, spare = case.slots
            found = calibration.forecast(case.loads, case.owners, case.slots, costs, 2)
            found.check(case.owners, room, spare)
            policy, used = "auto" if costs else "balanced", (room, max(1, spare - 1))
            same = decide.plan(policy, case.loads, case.owners, used, costs, 2)
            assert (found.traffic(case.loads, room + spare) == same.traffic(case.loads, sum(used))).all()
            if spare > 1:
                assert ((found.slots < 0) | (found.slots % (room + spare) < room + spare - 1)).all()


def test_copies_come_until_ranks_are_even_or_slots_full():
    """Over forecasts that are right, wrong by chance, and for other loads altogether."""
    rng, late, needed = np.random.default_rng(1), 0, 0
    for case in skews(12, 40):
        for real in (case.loads, rng.permutation(case.loads, axis=1),
                     np.rint(case.loads * (1 + 0.1 * rng.standard_normal(case.loads.shape))).astype(np.int64)):
            real = np.maximum(real, 0)
            before = calibration.forecast(case.loads, case.owners, case.slots).slots
            table, quota = calibration.plan(real, before, case.slots, 2, is_weighed=False)
            rows = checked(replace(case, loads=real), before, table, quota)
            came, ranks = transport.added(before, table), len(rows)
            assert (came >= 0).sum() - len(came) == (table >= 0).sum() - (before >= 0).sum()
            was = least_cap(real.sum(0), tables.held(before, ranks, sum(case.slots)), int(real.sum()))
            assert rows.max() <= max(1.02 * was, was + 1)  # never worse than what was there
            if rows.max() - rows.min() > 1:
                held = tables.held(table, ranks, sum(case.slots))
                assert not fits(real.sum(0), held, rows.max() / 1.02 - 1)
            late += (came >= 0).sum() - len(came)
            needed += (exact.plan(real, case.owners, case.slots)[0] >= 0).sum() - len(came)
    assert late < needed / 2  # a forecast has most of what a plan after the gate would have to send


def test_what_was_added_is_what_came():
    before = np.array([[0, 3, -1], [1, -1, -1], [4, 2, -1]])
    after = np.array([[0, 3, -1], [1, 5, 8], [4, 2, 7]])
    np.testing.assert_array_equal(transport.added(before, after), [[0, -1, -1], [1, 5, 8], [4, 7, -1]])


def test_late_copies_are_weighed():
    owners, slots = (0, 0, 1, 1), (2, 1)
    before = tables.homes_only(owners, 2, sum(slots), 2).slots
    skewed, even = np.full((2, 4), [40, 40, 1, 1]), np.full((2, 4), [11, 10, 10, 10])
    for counts, costs, is_copied in ((skewed, COSTS, True), (even, COSTS, False), (skewed, None, True),
                                     (even, None, True), (skewed, replace(COSTS, expert_bytes=1e8), False)):
        table, quota = transport.plan(counts[:, None], before, slots, 2, costs, calibration.plan)
        assert ((table[:, 1:] >= 0).any(), (quota.sum(-1) == counts[:, None]).all()) == (is_copied, True)


def test_nobody_has_rows():
    before = tables.homes_only((0, 1), 2, 2, 2).slots
    table, quota = calibration.plan(np.zeros((2, 2), dtype=np.int64), before, (1, 1), is_weighed=False)
    assert (table == before).all()
    assert not quota.any()


def test_a_jump_is_caught_in_the_step_in_which_it_comes():
    """Where `balanced` takes the window to be even again; between jumps hardly anything is late."""
    window, owners, before, ratios = Window(), tables.contiguous(16, 8), [], []
    late = []
    for loads in traces(np.random.default_rng(5), 24, 0.05, jump=12):
        if len(before) > 1:
            table, quota = calibration.plan(loads, before[-2], (2, 2))
            rows = tables.traffic(table, quota, 32).reshape(8, 8, 4).sum((0, 2))
            ratios.append(rows.max() / rows.mean())
            late.append(int((table >= 0).sum() - (before[-2] >= 0).sum()))
        window.add(loads)
        before.append(calibration.forecast(window.mean(), owners, (2, 2)).slots)
    assert max(ratios) < 1.15
    assert max(late[10:14]) > 2 * np.mean(late[:10])


def test_it_takes_no_longer_than_its_forecast_or_what_waits_for_the_gate():
    """By the score, in the mean of steps of which some have other loads than were expected."""
    costs = Costs(1e-6, 1e3, 3e6, 6e6, (1e-10, 4e-10), (1e-6, 1e-6), hidden=(2e-3, 4e-3))
    rng, owners = np.random.default_rng(2), tables.contiguous(16, 8)
    sums = dict.fromkeys(("auto", "exact", "late"), 0.0)
    for _ in range(8):
        expected = zipf(rng, 8, 16, 4096, 1.2)
        real = expected if rng.random() < 0.7 else zipf(rng, 8, 16, 4096, 1.2)
        found = decide.weighed(expected, real, owners, (2, 2), costs, 2)
        sums["late"] += calibration.seconds(expected, real, owners, (2, 2), costs, 2)
        sums["auto"] += found["auto"]
        sums["exact"] += found["exact"]
    assert sums["late"] < min(sums["auto"], sums["exact"])
