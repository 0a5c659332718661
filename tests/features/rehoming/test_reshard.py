"""Hecate's algorithm 2, by hand and by what must hold."""

from __future__ import annotations

import numpy as np
import pytest

from moefx.features.rehoming.reshard import reshard
from moefx.placement.tables import contiguous
from tests.support.skews import zipf


def spread(loads: np.ndarray, owners, group: int, ranks: int) -> float:
    """The largest over the mean of what groups of ranks have, over all layers, without the hot experts."""
    cold = np.where(loads * ranks > loads.sum(1, keepdims=True), 0, loads)
    found = [np.bincount(np.array(each) // group, weights=totals, minlength=ranks // group)
             for each, totals in zip(owners, cold)]  # fmt: skip
    return float(np.mean([each.max() / each.mean() for each in found]))


def test_homes_even_out_the_cold_experts():
    rng, homes = np.random.default_rng(0), [contiguous(16, 8)] * 4
    loads = np.stack([zipf(rng, 1, 16, 100000, 1.2)[0] for _ in homes])
    found = reshard(loads, homes, 8, 2, [4] * 4)
    numbers = np.stack([np.bincount(each, minlength=8) for each in found])
    assert numbers.max() <= 4
    assert (numbers.sum(0) == 8).all()  # of all layers, each rank has as many
    assert spread(loads, found, 2, 8) < 1.1 < spread(loads, homes, 2, 8)
    assert spread(loads, found, 1, 8) < spread(loads, homes, 1, 8)
    assert reshard(loads, found, 8, 2, [4] * 4) == found  # nothing to gain


@pytest.mark.parametrize("room", [2, 3])
def test_tight_rooms_hold(room):
    """Of 3 experts and 2 ranks; and E < n; and no loads at all, which leave homes where they are."""
    loads = np.array([[5, 1, 1], [9, 9, 1]])
    for each in reshard(loads, [(0, 0, 1)] * 2, 2, 1, [room] * 2):
        assert max(np.bincount(each)) <= room
    assert reshard(loads[:, :1], [(3,), (2,)], 4, 2, [1, 1]) == [(3,), (2,)]
    assert reshard(0 * loads, [(0, 0, 1)] * 2, 2, 1, [room] * 2) == [(0, 0, 1)] * 2
