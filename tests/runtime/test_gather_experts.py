"""Experts that go to other ranks and their gradients that come home: on ranks that are threads or, as `check_experts`,
wherever tests.runtime.test_collectives runs."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moefx.errors import StaleStateError
from moefx.ir.world import ThreadWorld
from moefx.link.rehearsal import WorldSession
from moefx.placement.messages import messages
from moefx.runtime.gather_experts import add_experts_start, gather_experts_start, scatter_experts_start
from moefx.runtime.groups import MeshView
from moefx.runtime.session import Session
from tests.support.tables import random_table

EXPERTS, ROOM, SPARE, CAP = 9, 5, 2, 7
SIZE = 3 * 2 * 4 + 2  # bytes of an expert: two parameters, of two dtypes
_ops = torch.ops.moefx


@dataclass
class Step:
    leases: list = field(default_factory=list)


def slots_of(rank: int, seed: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    first, second = torch.randn(rows, 3, 2, generator=generator), torch.randn(rows, generator=generator)
    return [first, second.to(torch.bfloat16)]


def wanted(seed: int, n: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What every rank has of every op's plain meaning."""
    table, how = random_table(EXPERTS, n, ROOM, SPARE, seed), (ROOM, CAP, n, "ep", None)
    return ThreadWorld({"ep": n}).run(lambda rank: (
        _ops.gather_experts(slots_of(rank, seed, ROOM), table, *how, None),
        _ops.scatter_experts(slots_of(rank, seed, CAP), table, *how)))  # fmt: skip


def check_experts(session: Session) -> None:
    """Several at once, waited for in any order, of random tables, also node by node: what comes out, and the bytes."""
    n, me = session.size("ep"), session.index("ep")
    how = {"room": ROOM, "cap": CAP, "axis": "ep", "region": "r"}
    for m in (None, 2):
        session.trace = []
        tables = [random_table(EXPERTS, n, ROOM, SPARE, seed) for seed in range(6)]
        gathers = [gather_experts_start(session, Step(), slots_of(me, seed, ROOM), table, m=m, **how)
                   for seed, table in enumerate(tables)]  # fmt: skip
        scatters = [scatter_experts_start(session, slots_of(me, seed, CAP), table, m=m, **how)
                    for seed, table in enumerate(tables)]  # fmt: skip
        for seed in (3, 0, 1, 2, 5, 4):
            slots, homes = wanted(seed, n)[me]
            found = gathers[seed].wait()
            assert all(map(torch.equal, found, slots))
            digits = [{}, {"rtol": 0.02, "atol": 0.05}]
            for one, other, tolerance in zip(scatters[seed].wait(), homes, digits):
                torch.testing.assert_close(one, other, **tolerance)
        sent = Counter()
        for kind, _, _, num_bytes in session.trace:
            sent[kind] += num_bytes
        assert +sent == bytes_by_hand(tables, me, n, m or n)
    session.trace = None


def bytes_by_hand(tables: list[Tensor], me: int, n: int, m: int) -> Counter:
    """What a rank sends: an expert crosses to a node of m ranks once, and goes on from there."""
    sent: Counter = Counter()
    for home, *copies in (row for table in tables for row in table.tolist()):
        ranks = sorted(copy // CAP for copy in copies if copy >= 0)
        for rank in ranks:
            first = next(other for other in ranks if other // m == rank // m)
            near = rank // m == home // CAP // m
            source = home // CAP if near or first == rank else first
            link = "" if m == n else "_intra" if near or first != rank else "_inter"
            sent[f"gather_experts{link}"] += SIZE * (source == me)
            sent[f"scatter_experts{link}"] += SIZE * (rank == me)
    return +sent


def test_the_plan_of_messages():
    """Expert 0 lives on rank 0 of two nodes of two ranks, and has copies on all others; expert 1 has none."""
    table = torch.tensor([[0, 2, 4, 6], [1, -1, -1, -1]]).mul(3).floor_divide(2).numpy()
    direct, (far, near) = messages(table, 3), messages(table, 3, 2)
    assert [[(each.source, each.target) for each in turn] for turn in direct] == [[(0, 1), (0, 2), (0, 3)]]
    assert [(each.source, each.target) for each in far] == [(0, 1), (0, 2)]
    assert [(each.source, each.source_place, each.target) for each in near] == [(2, 0, 3)]
    assert messages(table[1:], 3, 2) == ()


# ---- room that is lent


def on_two(run) -> list:
    """`run(session)` on two ranks, of which the second has a copy of the first one's expert."""
    def one(rank: int):
        return run(WorldSession(MeshView(("ep",), (2,), (rank,), (0, 1), "cpu")))

    return ThreadWorld({"ep": 2}).run(one)


TABLE = torch.tensor([[0, 3], [2, -1]])


def gathered(session, step: Step, param: Tensor, table: Tensor = TABLE, *, lend: bool = True) -> Tensor:
    how = {"room": 1, "cap": 2, "axis": "ep", "region": "r", "lend": lend}
    return gather_experts_start(session, step, [param], table, **how).wait()[0]


def test_copies_arrive_behind_the_rows_of_who_has_the_room():
    """One step at a time: others get memory of their own, until the first is done, or gone."""
    def run(session) -> None:
        rank = session.index("ep")
        pool = torch.full((2, 3), rank + 1.0)
        param, steps = pool[:1], [Step() for _ in range(4)]
        found = [gathered(session, step, param) for step in steps[:2]]
        assert [each.data_ptr() == pool.data_ptr() for each in found] == [True, False]
        assert torch.equal(found[0], torch.tensor([[1.0] * 3, [0.0] * 3] if rank == 0 else [[2.0] * 3, [1.0] * 3]))
        assert torch.equal(*found)
        assert gathered(session, steps[0], param).data_ptr() == pool.data_ptr()  # again, by the same table
        assert gathered(session, steps[0], param, TABLE.clone().fill_(-1)[:, :1]).data_ptr() != pool.data_ptr()
        steps[0].leases.clear()  # as behind the backward
        assert gathered(session, steps[2], param).data_ptr() == pool.data_ptr()
        del steps[2]
        gc.collect()
        assert gathered(session, steps[2], param).data_ptr() == pool.data_ptr()
        assert gathered(session, Step(), param.clone()).data_ptr() != pool.data_ptr()  # without such room
        assert gathered(session, Step(), torch.ones(2, 3)[:1], lend=False).shape == (2, 3)

    on_two(run)


def test_copies_that_come_to_others_lie_in_the_same_room():
    """And are gone from it in the next step."""
    def run(session) -> None:
        rank, how = session.index("ep"), {"axis": "ep", "region": "r"}
        first, added = map(torch.tensor, ([[0, 4], [3, -1]], [[0, -1], [3, 1]]))
        pool, theirs = torch.zeros(3, 2), torch.full((2,), 2.0 - rank)
        pool[0] = 1.0 + rank
        for is_corrected in (True, False):
            step = Step()
            found = gather_experts_start(session, step, [pool[:1]], first, room=1, cap=3, lend=True, **how).wait()
            assert torch.equal(found[0][1], theirs if rank == 1 else torch.zeros(2))
            if is_corrected:
                found = add_experts_start(session, step, found, added, cap=3, **how).wait()
                assert torch.equal(found[0][1], theirs)
            assert found[0].data_ptr() == pool.data_ptr()

    on_two(run)


def test_regions_that_share_the_room_do_not_add_to_it_in_turn():
    """Nor clear what the other has added; the one that has may come again, for its backward."""
    def run(session) -> None:
        rank, step = session.index("ep"), Step()
        first, others = torch.tensor([[0, -1], [3, -1]]), {"a": [[0, 4], [3, -1]], "b": [[0, -1], [3, 1]]}
        pool = torch.zeros(3, 2)
        pool[0] = 1.0 + rank
        found = {}
        for region in ("a", "b", "a"):
            how = {"axis": "ep", "region": region}
            slots = gather_experts_start(session, step, [pool[:1]], first, room=1, cap=3, lend=True, **how).wait()
            (found[region],) = add_experts_start(session, step, slots, torch.tensor(others[region]), cap=3,
                                                 **how).wait()  # fmt: skip
            assert (found[region].data_ptr() == pool.data_ptr()) == (region == "a")
        rows = {"a": [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]], "b": [[1.0, 2.0, 0.0], [2.0, 0.0, 0.0]]}
        for region, each in found.items():
            assert each[:, 0].tolist() == rows[region][rank]

    on_two(run)


def test_who_waits_names_the_other_ranks():
    def run(session) -> str:
        handle = gather_experts_start(session, Step(), [torch.ones(1, 3)], TABLE, room=1, cap=2, axis="ep", region="r")
        handle.wait()
        return handle._text

    assert on_two(run) == ["gather_experts of r (with ranks 1)", "gather_experts of r (with ranks 0)"]


def test_a_lease_that_is_not_its_step_s_any_more_is_named():
    def run(session) -> None:
        step, pool = Step(), torch.ones(2, 3)
        gathered(session, step, pool[:1])
        (lease,) = step.leases
        lease.check()
        with pytest.raises(StaleStateError, match="lent to two steps at once"):
            type(lease)(pool, TABLE)
        lease.pool = torch.ones(2, 3)  # as if somebody had moved it
        with pytest.raises(StaleStateError, match="went to another step before the backward"):
            lease.check()

    on_two(run)
