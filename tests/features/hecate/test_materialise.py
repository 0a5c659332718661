"""Hecate's algorithm 1, by hand."""

from __future__ import annotations

import numpy as np

from moefx.features.hecate.materialise import materialise, overlap
from moefx.placement.score import Costs

OWNERS = (0, 1, 2, 3)


def test_what_fits_into_memory_goes_everywhere():
    held = materialise(np.array([1, 9, 5, 2]), OWNERS, 4, overlap=2, spare=2, per_node=2)
    assert held.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]


def test_otherwise_slots_go_in_proportion_and_to_other_nodes_first():
    """Four slots for loads of 30 and 10: three and one. The hot expert goes to node 1 first, then to the others."""
    held = materialise(np.array([30, 10, 0, 0]), OWNERS, 4, overlap=3, spare=1, per_node=2)
    assert held.astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_overlap_is_what_the_tighter_pass_hides():
    """An expert takes 1 s to the other node, its gradients 2; each node's experts live on one rank."""
    costs = Costs(1, 1, expert_bytes=1, gradient_bytes=2, byte=(0, 1.0), hidden=(5, 6))
    assert overlap(costs, np.arange(4), (0, 0, 1, 1), 2, 1) == 4  # each node sends 2
    costs = Costs(1, 1, expert_bytes=1, gradient_bytes=2, byte=(0, 1.0), hidden=(5, 2))
    assert overlap(costs, np.arange(4), (0, 0, 1, 1), 2, 1) == 1
