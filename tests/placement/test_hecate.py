"""Hecate's two algorithms, by hand and by what must hold."""

from __future__ import annotations

import numpy as np
import pytest

from moefx.placement import balance, hecate
from moefx.placement.score import Costs
from moefx.placement.tables import contiguous
from tests.support.skews import zipf

OWNERS = (0, 1, 2, 3)


def test_what_fits_into_memory_goes_everywhere():
    held = hecate.materialise(np.array([1, 9, 5, 2]), OWNERS, 4, overlap=2, spare=2, per_node=2)
    assert held.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]


def test_otherwise_slots_go_in_proportion_and_to_other_nodes_first():
    """Four slots for loads of 30 and 10: three and one. The hot expert goes to node 1 first, then to the others."""
    held = hecate.materialise(np.array([30, 10, 0, 0]), OWNERS, 4, overlap=3, spare=1, per_node=2)
    assert held.astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_greedy_slots_make_the_largest_part_small():
    numbers = balance.greedy_numbers(np.array([80, 30, 10]), top=3, slots=4, most=3)
    assert numbers.tolist() == [3, 1, 0]


def test_overlap_is_what_the_tighter_pass_hides():
    """An expert takes 1 s to the other node, its gradients 2; each node's experts live on one rank."""
    costs = Costs(1, 1, expert_bytes=1, gradient_bytes=2, byte=(0, 1.0), hidden=(5, 6))
    assert costs.overlap(np.arange(4), (0, 0, 1, 1), 2, 1) == 4  # each node sends 2
    costs = Costs(1, 1, expert_bytes=1, gradient_bytes=2, byte=(0, 1.0), hidden=(5, 2))
    assert costs.overlap(np.arange(4), (0, 0, 1, 1), 2, 1) == 1


def spread(loads: np.ndarray, owners, group: int, ranks: int) -> float:
    """The largest over the mean of what groups of ranks have, over all layers, without the hot experts."""
    cold = np.where(loads * ranks > loads.sum(1, keepdims=True), 0, loads)
    found = [np.bincount(np.array(each) // group, weights=totals, minlength=ranks // group)
             for each, totals in zip(owners, cold)]  # fmt: skip
    return float(np.mean([each.max() / each.mean() for each in found]))


def test_homes_even_out_the_cold_experts():
    rng, homes = np.random.default_rng(0), [contiguous(16, 8)] * 4
    loads = np.stack([zipf(rng, 1, 16, 100000, 1.2)[0] for _ in homes])
    found = hecate.reshard(loads, homes, 8, 2, [4] * 4)
    numbers = np.stack([np.bincount(each, minlength=8) for each in found])
    assert numbers.max() <= 4
    assert (numbers.sum(0) == 8).all()  # of all layers, each rank has as many
    assert spread(loads, found, 2, 8) < 1.1 < spread(loads, homes, 2, 8)
    assert spread(loads, found, 1, 8) < spread(loads, homes, 1, 8)
    assert hecate.reshard(loads, found, 8, 2, [4] * 4) == found  # nothing to gain


@pytest.mark.parametrize("room", [2, 3])
def test_tight_rooms_hold(room):
    """Of 3 experts and 2 ranks; and E < n; and no loads at all, which leave homes where they are."""
    loads = np.array([[5, 1, 1], [9, 9, 1]])
    for each in hecate.reshard(loads, [(0, 0, 1)] * 2, 2, 1, [room] * 2):
        assert max(np.bincount(each)) <= room
    assert hecate.reshard(loads[:, :1], [(3,), (2,)], 4, 2, [1, 1]) == [(3,), (2,)]
    assert hecate.reshard(0 * loads, [(0, 0, 1)] * 2, 2, 1, [room] * 2) == [(0, 0, 1)] * 2
