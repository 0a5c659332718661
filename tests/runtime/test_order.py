"""Orders in which ranks begin collectives: those that could hold them up for good are found."""

from __future__ import annotations

import re

import pytest

from moefx.runtime.groups import MeshView, OnMesh
from moefx.runtime.order import Begun, deadlock

TABLE = (0, 1, 2, 3)  # dp=2, ep=2: 0 and 1 share ep, 0 and 2 share dp
Place = tuple[str, str]  # axes, purpose


def begun(*orders: list[Place]) -> dict[int, list[Begun]]:
    """What each rank of the mesh begins."""
    found = {}
    for rank, order in enumerate(orders):
        place = OnMesh()
        place.view, place.begun = MeshView(("dp", "ep"), (2, 2), divmod(rank, 2), TABLE, "cpu"), []
        for axes, purpose in order:
            place.begins("all_reduce", axes, purpose)
        found[rank] = place.begun
    return found


A, B, W = ("ep", "tokens"), ("dp", "gradient"), ("dp+ep", "gradient")


def test_one_program_gets_through():
    assert deadlock(begun(*[[A, B, W, A, B]] * 4)) is None
    assert begun([A, W])[0] == [Begun("all_reduce", (0, 1), "tokens"), Begun("all_reduce", (0, 1, 2, 3), "gradient")]
    assert deadlock({}) is None


def test_groups_may_begin_theirs_at_other_places():
    """As buckets of gradients do, which fill up sooner where a rank has more experts."""
    assert deadlock(begun([B, W, A], [W, B, A], [B, W, A], [W, B, A])) is None


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (([A, B], [B, A], [B, A], [A, B]), r"rank 0: its collective 0, all_reduce \(tokens\) of ranks 0, 1\n"
                                           r".*rank 1: its collective 0, all_reduce \(gradient\) of ranks 1, 3\n"),
        (([A, W], [W, A], [A, W], [A, W]), r"rank 1: its collective 0, all_reduce \(gradient\) of ranks 0, 1, 2, 3"),
        (([A, B], [A], [A, B], [A, B]), r"rank 3: its collective 1, all_reduce \(gradient\) of ranks 1, 3$"),
    ],
    ids=["round a square", "two groups of one pair", "a rank that leaves one out"],
)  # fmt: skip
def test_what_holds_ranks_up_is_named(orders, said):
    complaint = deadlock(begun(*orders))
    assert complaint is not None
    assert re.search(said, complaint, re.DOTALL), complaint


def test_kinds_must_fit():
    other = begun(*[[A]] * 4)
    other[1] = [each._replace(kind="all_to_all") for each in other[1]]
    assert "rank 1: its collective 0, all_to_all (tokens) of ranks 0, 1" in deadlock(other)
