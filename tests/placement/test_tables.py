"""Tables of plans: who is told what is wrong with one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moefx.errors import MoefxError
from moefx.placement import balance, tables
from moefx.placement.loads import Window

OWNERS, ROOM, SPARE = (0, 0, 1, 1), 2, 1


def a_plan() -> tables.Plan:
    """Expert 0 is copied to rank 1, expert 3 to rank 0."""
    held = balance.homes(OWNERS, 2)
    held[0, 1] = held[3, 0] = True
    quota = np.array([[[3, 1], [1, 7]]] * 2)
    return tables.of(quota, np.array([0, 3]), tables.slots_of(held, OWNERS, ROOM, SPARE), ROOM + SPARE)


def test_a_plan_gives_every_rank_its_rows():
    plan = a_plan()
    plan.check(OWNERS, ROOM, SPARE)
    assert plan.slots.tolist() == [[0, 5], [1, -1], [3, -1], [4, 2]]
    assert plan.copies == 2
    assert plan.traffic(np.array([[4, 5, 5, 8], [4, 5, 5, 8]]), 3).tolist() == [[9, 13], [9, 13]]
    assert plan.traffic(np.array([[0, 1, 0, 0], [8, 0, 0, 0]]), 3).tolist() == [[1, 0], [6, 2]]


def test_a_rank_without_rows_shares_as_the_others_do():
    held = balance.homes((0,), 2) | True
    quota = np.array([[[3, 1]], [[0, 0]]])
    plan = tables.of(quota, np.array([0]), tables.slots_of(held, (0,), 1, 1), 2)
    assert (plan.ends[0] == plan.ends[1]).all()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((0, 0), 1, "the home of expert 0 is slot 0 (rank 0), not 1"),
        ((1, 1), 5, "slot 5 has experts 0 and 1"),
        ((2, 1), 6, "expert 2 has slot 6 of 6"),
        ((2, 1), 4, "the copy of expert 2 has slot 4, for experts that live on rank 1"),
        ((0, 1), 2, "expert 0 is twice on a rank: its slots are on ranks [0, 0]"),
        ((1, 1), -2, "expert 1 has slots [1, -2]: -1 stands behind the last one alone"),
    ],
)
def test_wrong_slots_are_named(place, value, said):
    plan = a_plan()
    plan.slots[place] = value
    if place == (0, 1):
        plan.slots[3, 1] = -1
    with pytest.raises(MoefxError, match="a plan of placement is wrong") as caught:
        plan.check(OWNERS, ROOM, SPARE)
    assert said in str(caught.value)


@pytest.mark.parametrize(("end", "said"), [((1 << 20) + 1, "decrease"), (-1, "decrease"), (None, "end at 5, not at")])
def test_wrong_shares_are_named(end, said):
    plan = a_plan()
    if end is None:
        plan.ends[1, 0] = 5
    else:
        plan.ends[1, 0, 0] = end
    with pytest.raises(MoefxError, match=f"the shares of rank 1 for expert 0 {said}"):
        plan.check(OWNERS, ROOM, SPARE)


def test_other_sizes_are_named():
    plan = a_plan()
    for owners, room, other, said in [
        ((0, 0, 1), 2, plan, "4 experts have slots, 3 have homes"),
        ((0, 0, 0, 1), 2, plan, "3 experts live on one rank, which has room for 2"),
        (OWNERS, 2, replace(plan, ends=plan.ends[:, :, :1]), "shares of shape [2, 4, 1] for slots of shape [4, 2]"),
    ]:
        with pytest.raises(MoefxError) as caught:
            other.check(owners, room, SPARE)
        assert said in str(caught.value)


def test_the_window_holds_the_last_steps():
    window = Window(2)
    assert window.mean() is None
    for rows in (100, 1, 2):
        window.add(np.full((2, 3), rows))
    assert window.mean().tolist() == [[2] * 3] * 2  # 1.5 is rounded up
    other = Window(2)
    other.restore(window.state())
    assert (other.mean() == window.mean()).all()
    assert other.state() == window.state()
