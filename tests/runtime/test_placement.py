"""Plans beside the steps: when one comes into force, what it is made of, and what is told when it does not come."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from moefx.errors import CollectiveError
from moefx.placement.policies import POLICIES
from moefx.placement.tables import BITS, Plan, homes_only
from moefx.runtime import collectives
from moefx.runtime.placement import Placements, Region, digest_of, has_changed
from moefx.runtime.session import Session
from tests.runtime.test_collectives import Step
from tests.support.ranks import one_rank, run_ranks

RANKS, ROOM, SPARE = 2, 2, 1
CAP, EXPERTS = ROOM + SPARE, RANKS * ROOM


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with one_rank():
        found = Session(init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)), "planned", timedelta(seconds=0.3))
        yield found
        found.close()


def copy_of_the_hottest(region: Region, loads: np.ndarray) -> Plan:
    """On the other rank, of which both ranks take half."""
    plan = homes_only(region.owners, RANKS, CAP, RANKS)
    hot = int(loads.sum(0).argmax())
    plan.slots[hot, 1] = (1 - region.owners[hot]) * CAP + ROOM
    plan.ends[:, hot, 0] = 1 << BITS - 1
    return plan


def region(name: str = "layers.0.up") -> Region:
    return Region(name, "ep", RANKS, 1, RANKS, (0, 0, 1, 1), ROOM, SPARE, torch.device("cpu"))


def traffic(hot: int, placed: Region) -> np.ndarray:
    """Rows per slot, most of them for one expert, at its home and its copies."""
    found = np.zeros((RANKS, RANKS * CAP), dtype=np.int64)
    for expert, slots in enumerate(placed.tables.plan.slots):
        found[:, slots[slots >= 0]] = 9 if expert == hot else 1
    return found


def call(placements: Placements, session: Session, hot: int, *, is_training: bool = True) -> list[int]:
    """The experts that have copies in a call of the model in which this one has most rows."""
    placements.begin_call(session, is_training=is_training)
    for name, placed in placements.regions.items():
        placements.learn(name, traffic(hot, placed))
    slots = next(iter(placements.regions.values())).tables.plan.slots
    return np.flatnonzero((slots[:, 1:] >= 0).any(1)).tolist()


def planned(plan=copy_of_the_hottest) -> Placements:
    placements = Placements(POLICIES["balanced"])
    placements.plan = plan
    return placements


def with_region(plan=copy_of_the_hottest) -> Placements:
    placements = planned(plan)
    placements.add(region())
    return placements


def test_what_a_call_counted_is_in_force_two_calls_later(session):
    placements = with_region()
    placed = placements.regions["layers.0.up"]
    assert placed.tables.table.tolist() == [[0, -1], [1, -1], [3, -1], [4, -1]]
    assert [call(placements, session, hot) for hot in (1, 1, 3)] == [[], [], [1]]
    first = placed.tables
    assert first.table.tolist() == [[0, -1], [1, 5], [3, -1], [4, -1]] == first.moves.tolist()
    assert first.ends.tolist()[1] == [1 << BITS - 1, 1 << BITS]
    assert call(placements, session, 0, is_training=False) == [1]
    assert call(placements, session, 3) == [1]
    assert placed.tables is first  # nothing changed: the same tensors
    assert [call(placements, session, 3) for _ in range(3)][-1] == [3]
    assert digest_of([first]) != digest_of([placed.tables])
    assert first.table.tolist()[1] == [1, 5]  # never written to


def test_nothing_is_planned_for_loads_that_stay(session):
    asked = []

    def noted(region: Region, loads: np.ndarray) -> Plan:
        asked.append(loads.sum(0).tolist())
        return homes_only(region.owners, RANKS, CAP)  # as before: it is known what for, all the same

    placements = with_region(noted)
    tensors = placements.regions["layers.0.up"].tables.table
    for hot in (1, 1, 1, 1, 1, 1, 2, 2, 2):
        call(placements, session, hot)
    assert placements.regions["layers.0.up"].tables.table is tensors
    assert len(asked) == 3
    assert asked[0] == [2, 18, 2, 2]
    assert has_changed(np.array([[8, 0], [0, 8]]), np.array([[0, 8], [8, 0]]))  # in sum nothing changes
    assert not has_changed(np.array([[100, 20]]), np.array([[101, 19]]))


def test_rows_of_copies_are_their_experts(session):
    placed = region()
    placed.use(placed.decided(copy_of_the_hottest(placed, np.array([[0, 5, 1, 1]]))))
    sent = np.arange(12).reshape(RANKS, RANKS * CAP)
    assert placed.loads(sent).tolist() == [[0, 1 + 5, 3, 4], [6, 7 + 11, 9, 10]]


def plain(state: Any) -> Any:
    return tree_map(lambda each: each.tolist() if isinstance(each, torch.Tensor) else each, state)


def test_a_run_goes_on_with_the_same_plans(session):
    """Also from between two calls, and into a model that no call has been made of."""
    one = with_region()
    for hot in (1, 3, 3, 0):
        call(one, session, hot)
    state = one.state(session)
    two = planned()
    two.restore(session, state)
    two.add(region())
    hots = (0, 0, 2, 2, 2, 1)
    assert [call(one, session, hot) for hot in hots] == [call(two, session, hot) for hot in hots]
    assert plain(one.state(session)) == plain(two.state(session))
    moved = Region("layers.0.up", "ep", RANKS, 1, RANKS, (1, 0, 1, 0), ROOM, SPARE, torch.device("cpu"))
    two.restore(session, {})
    two.add(moved)
    two.restore(session, state)  # of other homes
    assert call(two, session, 0) == []
    assert moved.window.mean() is None


def test_a_plan_that_fails_or_does_not_come_is_told(session):
    wait = threading.Event()

    def stalls(region: Region, loads: np.ndarray) -> Plan:
        wait.wait(30)
        return homes_only(region.owners, RANKS, CAP)

    def off_by_one(region: Region, loads: np.ndarray) -> Plan:
        found = homes_only(region.owners, RANKS, CAP)
        found.ends[0, 1] -= 1
        return found

    for plan, why in ((stalls, "takes longer than 0.3 s"), (off_by_one, "MoefxError: a plan of placement is wrong: .*"),
                         (lambda region, loads: {}[region.name], "KeyError: 'layers.0.up'")):  # fmt: skip
        placements = with_region(plan)
        assert [call(placements, session, 1) for _ in range(2)] == [[], []]
        with pytest.raises(CollectiveError, match=f"planning layers.0.up.*{why}"):
            call(placements, session, 1)
        wait.set()


def stalled_on_one(rank: int, n: int) -> str:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("ep",))
    session = Session(mesh, "stalled", timedelta(seconds=1), watch_period_s=0.2)
    session.group("ep", "counts")
    session.placements = placements = with_region(lambda *_: threading.Event().wait(30) if rank else region().homes)
    call(placements, session, 1)
    call(placements, session, 1)

    def third() -> None:
        call(placements, session, 1)
        collectives.check_header_start(session, Step(), axis="ep").wait()

    with pytest.raises(CollectiveError) as caught:
        third()
    session.close()
    return str(caught.value)


def test_all_ranks_hear_of_a_thread_that_stalls_on_one():
    waits, stalls = run_ranks(2, stalled_on_one)
    assert "planning layers.0.up takes longer than 1 s" in stalls
    assert re.search("rank 1: .*waiting for the placement of experts", waits)
