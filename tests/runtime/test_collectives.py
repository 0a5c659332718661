"""Collectives on real gloo ranks, on threads and on a fake world, against what one process computes by itself."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moefx.errors import DivergenceError, MeshError, StaleStateError, UnsupportedUse
from moefx.runtime import collectives as c
from moefx.runtime import kernels
from moefx.runtime.agreement import gather
from moefx.runtime.order import deadlock
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session
from tests.runtime.test_gather_experts import check_experts
from tests.support.ranks import fake_world, one_rank, run_ranks, run_threads

TIMEOUT = timedelta(seconds=30)
D, K, S = 3, 2, 2


@dataclass(frozen=True)
class Step:
    program: int = -7
    number: int = 5
    synchronise: bool = True
    tables: int = 0


def open_session(mesh: DeviceMesh, name: str = "test") -> Session:
    return Session(mesh, name, TIMEOUT, watch_period_s=0.5)


def routing(case: str, rank: int, n: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(x [T, D], idx [T, K], table, quota) of one rank: any rank can compute that of all."""
    generator = torch.Generator().manual_seed(100 * n + rank)
    T = {"uneven": 3 + 4 * rank, "no tokens": 0 if rank == 0 else 5, "nobody": 0}.get(case, 6)
    E = n * S
    x = torch.randn(T, D, generator=generator)
    idx = torch.randint(0, E, (T, K), generator=generator)
    table = quota = None
    if case == "all to one":
        idx = torch.full((T, K), E - 1)
    elif case == "drops":
        idx[::2, 0] = -1
        idx[1::2, 1] = E
    elif case == "permuted":
        table = torch.arange(E).flip(0).unsqueeze(1)
    elif case == "replicas":  # half as many experts as slots; each has a replica in the other half of the ranks
        idx = idx // 2
        table = torch.stack([torch.arange(E // 2), torch.arange(E // 2) + E // 2], 1)
        quota = torch.randint(0, 3, (E // 2, 2), generator=generator)
    return x, idx, table, quota


CASES = ("even", "uneven", "no tokens", "nobody", "all to one", "drops", "permuted", "replicas")


def sorted_rows(case: str, rank: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    x, idx, table, quota = routing(case, rank, n)
    perm, counts = kernels.route(idx, table, quota, n * S)
    return kernels.dispatch(x, perm, K), perm, counts


def check_round_trip(session: Session, case: str) -> None:
    """Out to the slots, times (slot + 1), and back."""
    n, me = session.size("ep"), session.index("ep")
    rows, perm, counts = sorted_rows(case, me, n)
    handle = c.exchange_counts_start(session, Step(), counts, axis="ep", region=case)
    traffic = handle.wait()
    every = [sorted_rows(case, rank, n) for rank in range(n)]
    assert torch.equal(traffic, torch.stack([other for _, _, other in every]))

    plan = c.counts_to_host_start(session, traffic, axis="ep").wait()
    received = c.all_to_all_start(session, rows, plan, axis="ep", region=case).wait()
    blocks = [(r[: m.sum()].split(m.tolist()), m) for r, _, m in every]
    mine = range(me * S, (me + 1) * S)
    assert torch.equal(received, torch.cat([pieces[slot] for pieces, _ in blocks for slot in mine]))

    by_slot = c.regroup(received, plan)
    assert torch.equal(by_slot, torch.cat([pieces[slot] for slot in mine for pieces, _ in blocks]))
    here = c.slot_counts(session, traffic, axis="ep")
    assert here.tolist() == [int(sum(m[slot] for _, m in blocks)) for slot in mine]
    assert plan.num_received == int(here.sum()) == received.shape[0]

    factor = kernels.expert_rows(torch.tensor(mine).float() + 1, here, plan.num_received)
    back = c.regroup(by_slot * factor[:, None], plan, reverse=True)
    back = c.all_to_all_start(session, back, plan, axis="ep", region=case, reverse=True, num_rows=rows.shape[0]).wait()
    slots = torch.repeat_interleave(torch.arange(n * S), counts)
    expected = torch.zeros_like(rows)
    expected[: slots.numel()] = rows[: slots.numel()] * (slots[:, None] + 1)
    assert torch.equal(back, expected)
    assert kernels.combine(back, None, perm, K).shape == (perm.numel() // K, D)


def check_capacity(session: Session, capacities: Sequence[int]) -> None:
    """Blocks go to their experts and come back, also when every rank has a capacity of its own."""
    n, me = session.size("ep"), session.index("ep")
    E = n * S
    capacities = tuple(capacities[:n])
    assert c.exchange_sizes_start(session, Step(), capacities[me], axis="ep").wait() == capacities
    assert c.exchange_sizes_start(session, Step(), 5, axis="ep", fixed=True).wait() == (5,) * n

    def of(rank: int) -> Tensor:
        return (
            torch.arange(2 * E * capacities[rank] * D, dtype=torch.float32).view(2, E, capacities[rank], D)
            + 1000 * rank
        )

    arguments = dict(axis="ep", expert_dim=1, row_dim=-2, region="capacity")
    out = c.all_to_all_capacity_start(session, of(me), capacities, **arguments).wait()
    assert torch.equal(out, torch.cat([of(rank)[:, me * S : (me + 1) * S] for rank in range(n)], 2))
    back = c.all_to_all_capacity_start(session, out, capacities, reverse=True, **arguments).wait()
    assert torch.equal(back, of(me))
    # The other order of the two dims, as in [C, E, D] layouts.
    arguments.update(expert_dim=2, row_dim=1)
    flipped = of(me).transpose(1, 2)
    out = c.all_to_all_capacity_start(session, flipped, capacities, **arguments).wait()
    assert out.shape == (2, sum(capacities), S, D)
    assert torch.equal(c.all_to_all_capacity_start(session, out, capacities, reverse=True, **arguments).wait(), flipped)


def check_reductions(session: Session) -> None:
    n, me = session.size("ep"), session.index("ep")
    tensor = torch.arange(6.0).view(2, 3).t() * (me + 1)
    kept = tensor.clone()
    total = n * (n + 1) // 2
    mean = c.all_reduce_start(session, tensor, axes=("dp", "ep"), scale=1 / n, name="w").wait()
    torch.testing.assert_close(mean, torch.arange(6.0).view(2, 3).t() * total / n)
    assert torch.equal(tensor, kept)
    owned = kept.contiguous()
    out = c.all_reduce_start(session, owned, axes="ep", scale=1.0, name="w", owned=True).wait()
    assert out is owned
    assert torch.equal(out, torch.arange(6.0).view(2, 3).t() * total)
    old = torch.tensor([10, 20])
    assert c.sum_statistic_start(session, old, old + me, axes="ep").wait().tolist() == [
        10 + n * (n - 1) // 2,
        20 + n * (n - 1) // 2,
    ]
    # An average that fits must not overflow on the way: half the largest number, n times.
    big = torch.full((4,), torch.finfo(torch.float16).max / 2, dtype=torch.float16)
    average = c.all_reduce_start(session, big, axes="ep", scale=1 / n, name="big").wait()
    assert average.isfinite().all()


def check_handles(session: Session) -> None:
    handle = c.all_reduce_start(session, torch.ones(2), axes="ep", scale=1.0, name="once")
    handle.wait()
    with pytest.raises(StaleStateError, match="all_reduce of once"):
        handle.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        c.all_reduce_start(session, torch.ones(2), axes="ep", scale=1.0, name="dropped")
        gc.collect()
    assert any("dropped was started and never waited for" in str(w.message) for w in caught)


def check_several_in_flight(session: Session) -> None:
    """Waits in another order than starts, two regions and a reduction at once."""
    n, me = session.size("ep"), session.index("ep")
    firsts = [sorted_rows(case, me, n) for case in ("uneven", "all to one")]
    counts = [
        c.exchange_counts_start(session, Step(), m, axis="ep", region=str(i)) for i, (_, _, m) in enumerate(firsts)
    ]
    grad = c.all_reduce_start(session, torch.full((1000,), float(me)), axes="ep", scale=1.0, name="g")
    plans = [c.counts_to_host_start(session, handle.wait(), axis="ep").wait() for handle in reversed(counts)][::-1]
    sent = [c.all_to_all_start(session, rows, plan, axis="ep", region="r") for (rows, _, _), plan in zip(firsts, plans)]
    outs = [handle.wait() for handle in reversed(sent)][::-1]
    for out, plan in zip(outs, plans, strict=True):
        assert out.shape == (plan.num_received, D)
    assert torch.equal(grad.wait(), torch.full((1000,), float(n * (n - 1) // 2)))


def check_trace(session: Session) -> None:
    n, me = session.size("ep"), session.index("ep")
    rows, _, counts = sorted_rows("uneven", me, n)
    session.trace = []
    traffic = c.exchange_counts_start(session, Step(), counts, axis="ep", region="a.b").wait()
    plan = c.counts_to_host_start(session, traffic, axis="ep").wait()
    c.all_to_all_start(session, rows, plan, axis="ep", region="a.b").wait()
    c.all_reduce_start(session, torch.ones(8), axes="ep", scale=1.0, name="w").wait()
    gather, tokens, reduction = session.trace
    session.trace = None
    assert gather == ("all_gather", ("ep",), "a.b", (n - 1) * 64 * 8)
    others = sum(int(m) for rank, m in enumerate(counts.view(n, S).sum(1)) if rank != me)
    assert tokens == ("all_to_all", ("ep",), "a.b", others * D * 4)
    assert reduction == ("all_reduce", ("ep",), "w", 2 * (n - 1) * 8 * 4 // n)


def check_all(rank: int, n: int, mesh: DeviceMesh, with_handles: bool = True) -> None:
    session = open_session(mesh)
    session.begun = []
    for case in CASES:
        check_round_trip(session, case)
    check_capacity(session, [3] * 8)
    check_capacity(session, [3, 0, 5, 1, 2, 2, 1, 4])
    check_reductions(session)
    check_trace(session)
    check_several_in_flight(session)
    check_experts(session)
    c.check_header_start(session, Step(), axis="ep").wait()
    orders = gather(session, ("ep",), session.begun, "comparing orders")
    assert {each.kind for each in orders[0]} >= {"all_gather", "all_to_all", "all_reduce", "exchange"}
    assert deadlock(dict(zip(session.ranks("ep"), orders))) is None
    if with_handles:
        check_handles(session)
    session.close()
    session.close()
    with pytest.raises(UnsupportedUse, match="closed"):
        c.check_header_start(session, Step(), axis="ep")


def check_divergence(session: Session) -> None:
    """Another step, another program, another region and gradients that are kept back are seen by every rank."""
    me = session.index("ep")
    counts = torch.zeros(session.size("ep") * S, dtype=torch.int64)
    for step, region, text in (
        (Step(number=me), "r", f"rank 1: program {(1 << 64) - 7:016x}, step 1"),
        (Step(program=me), "r", "rank 1: program 0000000000000001, step 5"),
        (Step(synchronise=me == 0), "r", r"rank 1: program .*, step 5, in no_sync\(\)"),
        (Step(tables=me), "r", f"rank {1 - me}: .*, with another placement of experts"),
        (Step(), f"r{me}", "rank 1.*another region" if me == 0 else "rank 0.*another region"),
    ):
        with pytest.raises(DivergenceError, match=text):
            c.exchange_counts_start(session, step, counts, axis="ep", region=region).wait()
        with pytest.raises(DivergenceError, match=text):
            c.check_header_start(session, step, axis="ep", region=region).wait()
    # Regions of different numbers of slots, and a capacity program against a dropless one.
    with pytest.raises(DivergenceError, match="another region"):
        c.exchange_counts_start(session, Step(), counts[: S * (me + 1)], axis="ep", region=f"r{me}").wait()
    if me == 0:
        handle = c.check_header_start(session, Step(program=0), axis="ep")
    else:
        handle = c.exchange_counts_start(session, Step(program=1), counts, axis="ep", region="")
    with pytest.raises(DivergenceError, match="rank 1: program 0000000000000001"):
        handle.wait()


def on_two(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "ep"))
    check_all(rank, n, mesh)
    # Equal groups again: their names must not meet those of the closed ones.
    for _ in range(3):
        session = open_session(mesh)
        check_round_trip(session, "even")
        session.close()
    session = open_session(mesh)
    check_divergence(session)
    session.close()


def test_two_gloo_ranks() -> None:
    run_ranks(2, on_two)


def on_four(rank: int, n: int) -> None:
    check_all(rank, n, init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "ep")))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    session = open_session(mesh)
    for case in CASES:
        check_round_trip(session, case)
    assert session.ranks(("dp", "ep")) == [0, 1, 2, 3]
    assert session.ranks(("ep", "dp")) == [0, 2, 1, 3]
    assert session.index(("ep", "dp")) == session.ranks(("ep", "dp")).index(rank)
    group = session.group(("ep", "dp"), "gradient")
    assert dist.get_group_rank(group, rank) == session.index(("ep", "dp"))
    out = c.all_reduce_start(session, torch.tensor([float(rank)]), axes="dp", scale=0.5, name="w").wait()
    assert out.item() == (rank % 2) + 1
    session.close()
    # A mesh that is a slice of the world: the other ranks take no part, and make groups of their own beside it.
    part = DeviceMesh("cpu", [[1, 3]], mesh_dim_names=("dp", "ep"), _init_backend=False)
    if rank in (1, 3):
        session = open_session(part, "slice")
        check_round_trip(session, "uneven")
        session.close()
    else:
        with pytest.raises(MeshError, match="not in the mesh"):
            open_session(part, "slice")


def test_four_gloo_ranks() -> None:
    run_ranks(4, on_four)


def on_threads(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "ep"))
    # `warnings.catch_warnings` is not for threads.
    check_all(rank, n, mesh, with_handles=False)


def test_four_threads() -> None:
    run_threads(4, on_threads)


def on_group_counts(rank: int, n: int) -> None:
    """close() destroys its own groups only, also when the default group went first."""
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("ep",))
    before = set(dist.distributed_c10d._world.pg_map)
    first, second = open_session(mesh), open_session(mesh)
    for session in (first, second):
        check_round_trip(session, "even")
    first.close()
    check_round_trip(second, "even")
    second.close()
    assert set(dist.distributed_c10d._world.pg_map) == before


def test_close_destroys_its_own_groups_only() -> None:
    run_ranks(2, on_group_counts)


def test_close_after_the_default_group_is_gone() -> None:
    with fake_world(4):
        session = open_session(init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
        session.group("ep", "tokens")
    session.close()
    session.close()


def test_one_rank_communicates_nothing() -> None:
    with one_rank():
        session = open_session(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep")))
        session.trace = []
        for case in ("even", "drops", "nobody", "permuted"):
            check_round_trip(session, case)
        check_capacity(session, [3] * 8)
        check_capacity(session, [3, 0, 5, 1, 2, 2, 1, 4])
        check_reductions(session)
        c.check_header_start(session, Step(), axis="ep").wait()
        assert session.trace == []
        assert session.group(("dp", "ep"), "tokens") is None
        session.close()


def test_fake_world_of_a_thousand_runs_through() -> None:
    with fake_world(1024, rank=1023):
        session = open_session(init_device_mesh("cpu", (16, 64), mesh_dim_names=("dp", "ep")))
        again = open_session(init_device_mesh("cpu", (16, 64), mesh_dim_names=("dp", "ep")))
        n = session.size("ep")
        rows, _, counts = sorted_rows("even", 0, n)
        traffic = c.exchange_counts_start(session, Step(), counts, axis="ep", region="r").wait()
        plan = c.counts_to_host_start(session, traffic, axis="ep").wait()
        out = c.all_to_all_start(session, rows, plan, axis="ep", region="r").wait()
        assert out.shape == (plan.num_received, D)
        assert out.isfinite().all()
        back = c.all_to_all_start(session, out, plan, axis="ep", region="r", reverse=True, num_rows=99).wait()
        assert back.shape == (99, D)
        assert len(session.ranks(("dp", "ep"))) == 1024
        assert session.ranks("dp")[-1] == 1023
        again.close()
        session.close()


def test_mesh_is_checked() -> None:
    with fake_world(2):
        with pytest.raises(MeshError, match="axis names"):
            open_session(init_device_mesh("cpu", (2,)))
        session = open_session(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
        with pytest.raises(MeshError, match=r"no axis 'tp'[\s\S]*try: one of ep"):
            session.group("tp", "tokens")
        session.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_plan_counts_bytes_to_other_ranks(reverse: bool) -> None:
    plan = RoutePlan(1, (2, 3, 4), ((5, 1), (3, 0), (0, 2)))
    assert plan.num_sent == 9
    assert plan.receive_splits == (6, 3, 2)
    assert plan.wire_bytes(10, reverse=reverse) == (80 if reverse else 60)


def test_regroup_is_free_when_the_orders_agree() -> None:
    rows = torch.randn(5, 2)
    assert c.regroup(rows, RoutePlan(0, (2, 3), ((2,), (3,)))) is rows
    assert c.regroup(rows, RoutePlan(0, (5,), ((2, 3),)), reverse=True) is rows
    assert c.regroup(rows[:0], RoutePlan(0, (0, 0), ((0, 0), (0, 0)))).shape == (0, 2)
