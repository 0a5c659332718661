"""Plans for rows that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moefx.placement import balance, exact, tables
from tests.support.skews import Skew, fewest_copies, fits, skews, zipf


def planned(case: Skew, per_node: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(rows by rank, who has which expert [E, n]) of a plan whose tables are checked and whose rows add up."""
    slots, quota = exact.plan(case.loads, case.owners, case.slots, per_node)
    ranks, cap = len(case.loads), sum(case.slots)
    tables.Plan(slots, np.full((ranks, *slots.shape), 1 << tables.BITS)).check(case.owners, *case.slots)
    assert (quota >= 0).all()
    assert (quota.sum(2) == case.loads).all()
    assert not quota[:, slots < 0].any()
    rows, held = np.zeros((len(case.owners), ranks), dtype=int), np.zeros((len(case.owners), ranks), dtype=bool)
    valid = slots >= 0
    np.add.at(rows, (np.nonzero(valid)[0], slots[valid] // cap), quota.sum(0)[valid])
    held[np.nonzero(valid)[0], slots[valid] // cap] = True
    return rows.sum(0), held


def test_ranks_are_even_with_few_copies():
    """Where spare slots allow it; elsewhere no other shares of the same copies are better."""
    copies = least = 0
    for case in skews(0, 40):
        rows, held = planned(case)
        number, ranks = int(held.sum()) - len(held), len(rows)
        if rows.max() - rows.min() <= 1:
            copies, least = copies + number, least + fewest_copies(case.homes)
        else:
            assert not fits(case.loads.sum(0), held, rows.max() / 1.02 - 1)
        assert number <= ranks * case.slots[1]
    assert copies <= 1.1 * least


@pytest.mark.parametrize("seed", range(3))
def test_too_few_slots_give_nearly_the_least_maximum(seed):
    """One spare slot on three ranks, and experts that are too small: among all placements."""
    loads = zipf(np.random.default_rng(seed), 3, 6, 500, 0.4)
    case = Skew("", loads, (0, 0, 0, 1, 1, 2), (3, 1))
    rows, _ = planned(case)
    homes = balance.homes(case.owners, 3)
    least = rows.max()
    for extra in itertools.product(range(-1, 6), repeat=3):
        held = homes.copy()
        for rank, expert in enumerate(extra):
            held[expert, rank] |= expert >= 0
        while fits(loads.sum(0), held, least - 1):
            least -= 1
    assert rows.max() <= 1.02 * least


def test_rows_stay_where_they_are_first():
    """Both ranks of a node have rows of the hot expert; what leaves its home goes to ranks that have such rows."""
    loads = np.array([[40, 0], [40, 0], [40, 0], [40, 0]])
    slots, quota = exact.plan(loads, (0, 1), (1, 1), per_node=2)
    to = np.zeros((4, 4), dtype=int)
    for place, slot in enumerate(slots[0]):
        to[:, slot // 2] += quota[:, 0, place]
    assert (to == 40 * np.eye(4)).all()


def test_the_same_counts_give_the_same_plan():
    case = next(iter(skews(5, 1, (8,))))
    first, again = (exact.plan(case.loads.copy(), case.owners, case.slots) for _ in range(2))
    assert all((one == other).all() for one, other in zip(first, again))
