"""FasterMoE's shadowing: by hand, by its published policy, and by what must hold of its tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moefx.features.fastermoe import shadowing
from moefx.placement import tables
from moefx.placement.score import Costs
from tests.support.skews import skews, zipf

# A row takes 3 s to compute, forward and backward, and 1 s on each of its four ways; an expert 10 s to all ranks.
COSTS = Costs(row=3.0, row_bytes=1.0, expert_bytes=5.0, gradient_bytes=5.0, byte=(0.5, 1.0))


def test_by_hand():
    """Three ranks with an expert each, 27 rows at the first one: 27 (3 + 4) s. Shadowed, each has 9 of them; then the
    second one has most to do, 9 + 6, and to receive, 6, beside 10 s for the expert."""
    counts = np.array([[9, 2, 1], [9, 2, 1], [9, 2, 1]])
    assert shadowing.latency(counts, (0, 1, 2), [], COSTS) == 27 * 7
    assert shadowing.latency(counts, (0, 1, 2), [0], COSTS) == (9 + 6) * 3 + 6 * 4 + 10
    assert shadowing.latency(counts, (0, 1, 2), [0, 1], COSTS) == (9 + 2 + 3) * 3 + 3 * 4 + 20
    assert shadowing.latency(counts, (0, 1, 2), [0, 1, 2], COSTS) == (9 + 2 + 1) * 3 + 30
    assert shadowing.shadow(counts, (0, 1, 2), 2, COSTS) == [0, 1, 2]
    assert shadowing.shadow(counts, (0, 1, 2), 1, COSTS) == [0]
    assert shadowing.shadow(counts, (0, 1, 2), 3, replace(COSTS, gradient_bytes=15.0)) == [0]
    assert shadowing.shadow(counts, (0, 1, 2), 3, replace(COSTS, gradient_bytes=500.0)) == []


def published(totals: np.ndarray, costs: Costs) -> list[int]:
    """The loop of FastMoE's shadow_policy.py in our figures: one expert a rank, rows of shadowed experts forgotten."""
    order = np.argsort(-totals, kind="stable").tolist()
    byte, found = max(costs.byte), []
    best = totals[order[0]] * (costs.row + 4 * costs.row_bytes * byte)
    for i, expert in enumerate(order[:-1]):
        rows = totals[order[i + 1]]
        new = rows * (costs.row + 4 * costs.row_bytes * byte)
        new += (i + 1) * (costs.expert_bytes + costs.gradient_bytes) * byte
        if new >= best:
            break
        best, found = new, [*found, expert]
    return found


def test_it_is_the_published_policy_where_rows_at_home_take_nothing():
    """With one expert a rank; its rows at home are what the published one leaves out, so they are made to weigh nothing
    here: only the exchanges count."""
    rng, costs = np.random.default_rng(0), replace(COSTS, row=0.0)
    seen = set()
    for s in (0.0, 0.5, 1.0, 1.5, 2.0):
        counts = zipf(rng, 8, 8, 100, s)
        found = shadowing.shadow(counts, tuple(range(8)), 8, costs)
        assert found[:7] == published(counts.sum(0), costs)  # which never takes the last one
        seen.add(len(found))
    assert len(seen) > 2


def test_rows_of_shadowed_experts_stay_and_no_others():
    for case in skews(7, 40):
        owners, (room, spare), ranks = case.owners, case.slots, len(case.loads)
        if not spare:
            continue
        homes = tables.homes_only(owners, ranks, room + spare).slots
        slots, quota = shadowing.plan(case.loads, homes, case.slots, 2, COSTS)
        plan = tables.of_places(quota, np.arange(len(owners)), slots)
        plan.check(owners, room, spare)
        assert (quota.sum(2) == case.loads).all()
        held = plan.held(ranks, room + spare)
        assert {*held.sum(1).tolist()} <= {1, ranks}
        found = [int(expert) for expert in np.flatnonzero(held.sum(1) > 1)]
        traffic = plan.traffic(case.loads, room + spare)
        chosen = sorted(shadowing.shadow(case.loads, owners, spare, COSTS))
        assert found == (chosen if ranks > 1 else [])
        alone = case.loads.copy()
        alone[:, chosen] = 0
        for rank in range(ranks):
            wanted = alone[:, np.asarray(owners) == rank].sum(1)
            wanted[rank] += case.loads[rank, chosen].sum()
            assert (traffic[:, rank] == wanted).all()


def test_it_never_takes_longer_than_homes_alone():
    for case in skews(8, 40):
        found = shadowing.shadow(case.loads, case.owners, case.slots[1], COSTS)
        assert shadowing.latency(case.loads, case.owners, found, COSTS) <= shadowing.latency(
            case.loads, case.owners, [], COSTS)  # fmt: skip
