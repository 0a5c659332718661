"""Plans of true counts: the traffic that follows, and whether copies pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moefx.placement import after_gate, tables
from moefx.placement.score import Costs


def test_traffic():
    slots = np.array([[0, 4, -1], [3, -1, -1]])
    quota = np.array([[[2, 1, 0], [5, 0, 0]], [[0, 7, 0], [1, 0, 0]]])
    np.testing.assert_array_equal(tables.traffic(slots, quota, 6), [[2, 0, 0, 5, 1, 0], [0, 0, 0, 1, 7, 0]])


def test_copies_are_weighed():
    owners, slots = (0, 0, 1, 1), (2, 1)
    skewed, even = np.full((2, 4), [40, 40, 1, 1]), np.full((2, 4), [11, 10, 10, 10])
    homes = tables.homes_only(owners, 2, sum(slots), 2).slots
    costs = Costs(1e-3, 0, 1e6, 1e6, (1e-8, 1e-8))  # a row takes a millisecond, and an expert on its way ten
    for counts, is_copied in ((skewed, True), (even, False)):
        found, quota = after_gate.balanced(counts, homes, slots, 2, costs)
        assert ((found[:, 1:] >= 0).any(), (quota.sum(-1) == counts).all()) == (is_copied, True)
        assert (after_gate.balanced(counts, homes, slots, 2)[0][:, 1:] >= 0).any()


def test_copies_wait_for_the_gate_where_that_makes_them_less_late_than_a_forecast_is_wrong():
    costs = Costs(1e-3, 0, 1e6, 1e6, (1e-8, 1e-8), hidden=(1.0, 1.0), rows=100, out=0.025)
    assert costs.waits(4, 4)  # 30 ms, of which 25 are hidden, and 11 to be saved
    assert not replace(costs, out=0.01).waits(4, 4)
    assert replace(costs, out=0.01, hidden=(0.0, 1.0)).waits(4, 4)  # nothing hides what a forecast sends
