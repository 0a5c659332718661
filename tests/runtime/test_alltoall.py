"""All-to-alls in steps: the planning against a plain exchange in Python, the runtime against the direct all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from moefx.errors import ExtensionError, UnsupportedUse
from moefx.runtime import alltoall
from moefx.runtime import collectives as c
from moefx.runtime.plan import RoutePlan
from moefx.runtime.session import Session
from moefx.transport import algorithms, blocks
from moefx.transport.algorithms import Algorithm, Exchange, Local, all_to_all_named, register_all_to_all, transport
from tests.support.ranks import fake_world, one_rank, run_ranks, run_threads

NAMES = ("direct", "1dh", "2dh", "pipe")
S, D = 2, 3


@dataclass(frozen=True)
class Step:
    program: int = 1
    number: int = 1
    synchronise: bool = True
    tables: int = 0


# ---- planning


@st.composite
def clusters(draw):
    """(n, m, pairs [n, n]): m divides n; some ranks send nothing, some all to one."""
    n = draw(st.sampled_from([1, 2, 4, 6, 8]))
    m = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    pairs = np.array(draw(st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n))).reshape(n, n)
    for rank in draw(st.sets(st.integers(0, n - 1))):
        pairs[rank] = 0
    if draw(st.booleans()):
        pairs[:, 1:] = 0
    return n, m, pairs


def moved(name: str, n: int, m: int, pairs: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """What every rank holds in the end if rank s starts with the rows (s, target, i), by the plans of all ranks."""
    here = [transport(name, n, m, rank) for rank in range(n)]
    held = [{"rows": [(s, t, i) for t in range(n) for i in range(pairs[s, t])]} for s in range(n)]
    algorithm = all_to_all_named(name)
    for step in algorithm.steps:
        reads = algorithm.reads(step)
        if isinstance(step, Local):
            for rows, plan in zip(held, here):
                segments = plan.segments(step.name, pairs)
                assert all(length for _, _, length in segments)
                rows[step.name] = [row for which, a, length in segments for row in rows[reads[which]][a : a + length]]
        else:
            sent = [cut(rows[reads[0]], plan.peers(step.name), plan.splits(step.name, pairs)[0])
                    for rows, plan in zip(held, here)]
            for rank, (rows, plan) in enumerate(zip(held, here)):
                peers, (_, received) = plan.peers(step.name), plan.splits(step.name, pairs)
                assert [len(sent[peer][rank]) for peer in peers] == received
                rows[step.name] = [row for peer in peers for row in sent[peer][rank]]
                foreign = any(sent[p][q] for p in peers for q in peers if p != q)
                assert plan.is_idle(step.name, pairs) is not foreign
        for rows, plan in zip(held, here):
            assert len(rows[step.name]) == plan.num_rows(step.name, pairs)
    return [rows[algorithm.steps[-1].name] for rows in held]


def cut(rows: list, peers: list[int], sizes: list[int]) -> dict[int, list]:
    assert sum(sizes) == len(rows)
    ends = np.cumsum([0, *sizes]).tolist()
    return {peer: rows[a:b] for peer, a, b in zip(peers, ends, ends[1:])}


@given(clusters(), st.sampled_from(NAMES))
@settings(max_examples=150, deadline=None)
def test_rows_arrive_by_source(cluster, name):
    n, m, pairs = cluster
    wanted = [[(s, t, i) for s in range(n) for i in range(pairs[s, t])] for t in range(n)]
    assert moved(name, n, m, pairs) == wanted


def messages(name: str, n: int, m: int) -> tuple[int, int]:
    """(messages to other nodes, rows to other nodes) of the busiest rank, with one row per pair."""
    pairs, most = np.ones((n, n), dtype=np.int64), (0, 0)
    for rank in range(n):
        here, count, rows = transport(name, n, m, rank), 0, 0
        for step in all_to_all_named(name).steps:
            if isinstance(step, Exchange):
                leaving = [size for peer, size in zip(here.peers(step.name), here.splits(step.name, pairs)[0])
                           if peer // m != rank // m and size]
                count, rows = count + len(leaving), rows + sum(leaving)
        most = max(most, (count, rows))
    return most


def test_messages_between_nodes_are_those_of_the_papers():
    assert messages("direct", 16, 4) == messages("pipe", 16, 4) == (12, 12)
    assert messages("2dh", 16, 4) == (3, 12)  # n/m - 1, each m times as large
    assert messages("1dh", 16, 4) == (3, 48)  # the leader carries the rows of its whole node


def test_what_stays_in_order_is_not_copied():
    pairs = np.ones((8, 8), dtype=np.int64)
    assert transport("pipe", 8, 4, 5).segments("near", pairs) == [(0, 4, 4)]
    assert transport("pipe", 8, 4, 5).segments("far", pairs) == [(0, 0, 4)]
    assert transport("pipe", 12, 4, 5).segments("far", np.ones((12, 12), int)) == [(0, 0, 4), (0, 8, 4)]


# ---- the registry


def to_target(b):
    return b.target


@pytest.mark.parametrize(("steps", "message"), [
    ([Exchange("a", "intra", to=to_target)], "sends blocks out of their group 'intra'"),
    ([Exchange("a", "near", to=to_target)], "runs over 'near', not one of intra, inter, all"),
    ([Exchange("a", "all", to=lambda b: b.target + 1)], "ranks that do not exist"),
    ([Exchange("a", "all", to=lambda b: b.source)], "leaves blocks in the wrong place or order"),
    ([Local("a", by=(lambda b: -b.target,)), Exchange("b", "all", to=to_target)], "the order of their receivers"),
    ([Exchange("a", "all", to=to_target), Local("a")], "has the name of another"),
    ([Exchange("a", "all", to=to_target, reads=("b",))], "not all made before it"),
    ([Local("a", keep=lambda b: b.target > 0), Exchange("b", "all", to=to_target)], "in the wrong place or order"),
    ([Exchange("a", "all", to=to_target), Local("b", by=(lambda b: -b.source,))], "in the wrong place or order"),
])
def test_an_algorithm_that_is_none_is_refused(steps, message):
    with pytest.raises(UnsupportedUse, match=message):
        register_all_to_all("broken", Algorithm(tuple(steps)))
    with pytest.raises(UnsupportedUse, match="no all-to-all 'broken'"):
        all_to_all_named("broken")


def raises(blocks):
    return blocks.nothing


@pytest.mark.parametrize(("algorithm", "message"), [
    (3, "it is of type int"),
    (Algorithm(()), r"its steps are \(\)"),
    (Algorithm([to_target]), "a step is of type function"),
    (Algorithm([Exchange(None, "all", to=to_target)]), "the name of a step is None"),
    (Algorithm([Exchange("a", ["all"], to=to_target)]), r"step 'a' runs over \['all'\], not one of intra, inter, all"),
    (Algorithm([Exchange("a", "all", to=3)]), "`to` of step 'a' is of type int"),
    (Algorithm([Exchange("a", "all", to=to_target, reads="rows")]), "step 'a' reads 'rows', not a tuple of names"),
    (Algorithm([Exchange("a", "all", to=to_target, reads=["rows", "rows"])]), "an exchange reads one step"),
    (Algorithm([Exchange("a", "all", to=raises)]), r"`to` of step 'a' raised Attr.*\n.*test_alltoall.py:\d+"),
    (Algorithm([Local("a", keep=raises)]), r"`keep` of step 'a' raised AttributeError: .*\n.*test_alltoall.py:\d+"),
    (Algorithm([Local("a", by=(raises,))]), r"`by` of step 'a' raised AttributeError: .*\n.*test_alltoall.py:\d+"),
    (Algorithm([Local("a", by=to_target)]), "step 'a' has a `by` that is not a tuple of functions"),
    (Algorithm([Exchange("a", "all", to=lambda b: None)]), "`to` that gives NoneType"),
    (Algorithm([Exchange("a", "all", to=lambda b: b.target / 1)]), r"`to` that gives ndarray float64\[1\] for 1"),
    (Algorithm([Local("a", keep=lambda b: np.flatnonzero(b.target >= 1))]), r"`keep` that gives ndarray int64\[0\]"),
    (Algorithm([Local("a", by=(lambda b: [1, [2]],))]), "`by` that gives list"),
])
def test_what_is_no_algorithm_at_all_is_named(algorithm, message):
    with pytest.raises(ExtensionError, match=f"the all-to-all 'broken': .*{message}"):
        register_all_to_all("broken", algorithm)
    assert "broken" not in algorithms._ALGORITHMS


def test_an_algorithm_that_fails_on_a_larger_cluster_is_named(monkeypatch):
    monkeypatch.setattr(algorithms, "_ALGORITHMS", dict(algorithms._ALGORITHMS))
    register_all_to_all("small only", Algorithm([
        Exchange("a", "all", to=lambda b: b.target if b.n < 9 else b.nothing),
    ]))  # fmt: skip
    with pytest.raises(ExtensionError, match=r"the all-to-all 'small only': `to` of step 'a' raised AttributeError"):
        transport("small only", 16, 4, 0)


def test_a_name_is_given_once():
    with pytest.raises(UnsupportedUse, match="there is an all-to-all '2dh' already"):
        register_all_to_all("2dh", all_to_all_named("1dh"))


def test_a_users_algorithm(monkeypatch):
    """First between nodes, then within them: 2DH the other way round."""
    monkeypatch.setattr(algorithms, "_ALGORITHMS", dict(algorithms._ALGORITHMS))
    register_all_to_all("inter first", Algorithm((
        Exchange("inter", "inter", to=lambda b: b.target // b.m * b.m + b.source % b.m),
        Local("by_number", by=(lambda b: b.target % b.m,)),
        Exchange("intra", "intra", to=to_target),
        Local("by_source", by=(lambda b: b.source,)),
    )))  # fmt: skip
    pairs = np.arange(36).reshape(6, 6) % 4
    assert moved("inter first", 6, 3, pairs) == moved("direct", 6, 3, pairs)


# ---- static blocks


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_survive_packing(data):
    n = data.draw(st.sampled_from([1, 2, 3]))
    dims = data.draw(st.permutations(["E", "C", *["other"] * data.draw(st.integers(0, 2))]))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    me = data.draw(st.integers(0, n - 1))
    expert_dim, row_dim = dims.index("E"), dims.index("C")
    shape = [{"E": 2 * n, "C": sizes[me]}.get(d, 2 + i) for i, d in enumerate(dims)]
    x = torch.randn(shape)
    rows = blocks.pack(x, sizes, expert_dim, row_dim, n, reverse=False)
    unit, width = blocks.row_shape(shape, expert_dim, row_dim, n, reverse=False)
    assert rows.shape == (n * unit * sizes[me], width)
    # Rows that come back as they went out.
    back = blocks.unpack(rows, shape, sizes, expert_dim, row_dim, reverse=True, rank=me)
    assert torch.equal(back, x)
    inside = list(shape)
    inside[expert_dim], inside[row_dim] = 2, sum(sizes)
    y = torch.randn(inside)
    rows = blocks.pack(y, sizes, expert_dim, row_dim, n, reverse=True)
    assert blocks.row_shape(inside, expert_dim, row_dim, n, reverse=True) == (unit, width)
    assert torch.equal(blocks.unpack(rows, inside, sizes, expert_dim, row_dim, reverse=False, rank=me), y)


# ---- the runtime, bit for bit against the direct all-to-all


def traffic_of(case: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    traffic = torch.randint(0, 4, (n, n * S), generator=generator)
    if case == "one sends nothing":
        traffic[0] = 0
    elif case == "nobody":
        traffic[:] = 0
    elif case == "all to one":
        traffic[:, :-1] = 0
    elif case == "only at home":
        traffic *= torch.eye(n, dtype=torch.int64).repeat_interleave(S, 1)
    return traffic


CASES = ("uneven", "one sends nothing", "nobody", "all to one", "only at home")


def in_steps(
    session: Session, name: str, m: int, rows: Tensor, plan: RoutePlan, num_rows: int, *, reverse: bool
) -> Tensor:
    """As the emitted code does it, all exchanges of a layer of steps under way at once."""
    algorithm, known = all_to_all_named(name), {"rows": rows}
    where = {"m": m, "algorithm": name, "reverse": reverse}

    def get(key: str) -> Tensor:
        if isinstance(known[key], c.Handle):
            known[key] = known[key].wait()
        return known[key]

    for step in algorithm.steps:
        last = step is algorithm.steps[-1]
        size = num_rows if last else alltoall.phase_rows(plan, step=step.name, **where)
        inputs = [get(key) for key in algorithm.reads(step)]
        if isinstance(step, Local):
            known[step.name] = alltoall.repack(inputs, plan, step=step.name, num_rows=size, **where)
        else:
            known[step.name] = alltoall.exchange_phase_start(
                session, inputs[0], plan, axis="ep", step=step.name, region="r", num_rows=size, **where
            )
    return get(algorithm.steps[-1].name)


def check_rows(session: Session, m: int) -> None:
    n, me = session.size("ep"), session.index("ep")
    for case in CASES:
        traffic = traffic_of(case, n)
        plan = c.counts_to_host_start(session, traffic, axis="ep").wait()
        rows = torch.randn(plan.num_sent + 2, D, generator=torch.Generator().manual_seed(me))  # two are dropped
        out = c.all_to_all_start(session, rows, plan, axis="ep", region="r").wait()
        there = {"axis": "ep", "region": "r", "reverse": True, "num_rows": len(rows)}
        back = c.all_to_all_start(session, out * 2, plan, **there).wait()
        for name in NAMES:
            found = in_steps(session, name, m, rows, plan, plan.num_received, reverse=False)
            assert torch.equal(found, out), (case, name)
            returned = in_steps(session, name, m, found * 2, plan, len(rows), reverse=True)
            assert torch.equal(returned, back), (case, name)


def check_blocks(session: Session, m: int) -> None:
    n, me = session.size("ep"), session.index("ep")
    for sizes in ((2,) * n, tuple(range(n))):
        x = torch.randn(2, n * S, sizes[me], D, generator=torch.Generator().manual_seed(me))
        dims = {"expert_dim": 1, "row_dim": 2}
        out = c.all_to_all_capacity_start(session, x, sizes, axis="ep", region="r", **dims).wait()
        for name in NAMES:
            plan = alltoall.block_plan(session, sizes, x.shape, axis="ep", reverse=False, **dims)
            rows = alltoall.pack_blocks(x, sizes, reverse=False, **dims)
            arrived = in_steps(session, name, m, rows, plan, plan.num_received, reverse=False)
            found = alltoall.unpack_blocks(session, arrived, sizes, out.shape, axis="ep", reverse=False, **dims)
            assert torch.equal(found, out), name
            plan = alltoall.block_plan(session, sizes, out.shape, axis="ep", reverse=True, **dims)
            rows = alltoall.pack_blocks(out, sizes, reverse=True, **dims)
            returned = in_steps(session, name, m, rows, plan, plan.num_sent, reverse=True)
            back = alltoall.unpack_blocks(session, returned, sizes, x.shape, axis="ep", reverse=True, **dims)
            assert torch.equal(back, x), name


def check_bytes(session: Session, m: int) -> None:
    """What every phase sends to other ranks: one row per pair of ranks, D fp32 numbers each."""
    n = session.size("ep")
    plan = c.counts_to_host_start(session, torch.ones(n, n, dtype=torch.int64), axis="ep").wait()
    rows = torch.zeros(n, D)

    def traffic(name: str) -> list[tuple[str, int]]:
        session.trace = []
        in_steps(session, name, m, rows, plan, n, reverse=False)
        found, session.trace = [(t.kind, t.num_bytes // (4 * D)) for t in session.trace], None
        return found

    assert traffic("2dh") == [("all_to_all_intra", n - n // m), ("all_to_all_inter", n - m)]
    assert traffic("pipe") == [("all_to_all", n - m), ("all_to_all_intra", m - 1)]
    leader = session.index("ep") % m == 0
    gather, scatter = (0, n * (m - 1)) if leader else (n, 0)
    between = [("all_to_all_inter", m * (n - m))] if leader else []  # the others have nothing to say
    assert traffic("1dh") == [("all_to_all_intra", gather), *between, ("all_to_all_intra", scatter)]


def check_all(rank: int, n: int) -> None:
    session = Session(init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "ep")), "test", timedelta(seconds=30))
    for m in (d for d in range(1, n + 1) if n % d == 0):
        check_rows(session, m)
        check_blocks(session, m)
        if 1 < m < n:
            check_bytes(session, m)
    session.close()


@pytest.mark.parametrize("n", [2, 4, 8])
def test_threads(n):
    run_threads(n, check_all)


@pytest.mark.parametrize("n", [2, 4])
def test_gloo_ranks(n):
    run_ranks(n, check_all)


def test_one_rank():
    with one_rank():
        check_all(0, 1)


def test_fake_world_of_a_thousand_runs_through():
    with fake_world(1024, rank=1023):
        session = Session(init_device_mesh("cpu", (16, 64), mesh_dim_names=("dp", "ep")), "t", timedelta(seconds=30))
        n = session.size("ep")
        counts = torch.ones(n * S, dtype=torch.int64)
        traffic = c.exchange_counts_start(session, Step(), counts, axis="ep", region="r").wait()
        plan = c.counts_to_host_start(session, traffic, axis="ep").wait()
        for name in NAMES:
            out = in_steps(session, name, 8, torch.randn(n * S, D), plan, plan.num_received, reverse=False)
            assert out.shape == (plan.num_received, D)
            assert out.isfinite().all()
            back = in_steps(session, name, 8, out, plan, 999, reverse=True)
            assert back.shape == (999, D)
        session.close()


def on_one_group(rank: int, n: int) -> tuple[int, int, str]:
    """(how often a small exchange overtook the large one that was started before it, how often the end of one that is
    watched was not seen, what a wait for a rank that never sends says)."""
    session = Session(init_device_mesh("cpu", (n,), mesh_dim_names=("ep",)), "test", timedelta(seconds=30))
    overtaken = unseen = 0
    for _ in range(3):
        large, small = torch.ones(n * 2**20), torch.ones(n)
        arrived = torch.zeros_like(large)
        first = session.all_to_all(arrived, large, [2**20] * n, [2**20] * n, "ep")
        second = session.all_to_all(torch.empty_like(small), small, [1] * n, [1] * n, "ep")
        ended = second.get_future()
        second.wait(timedelta(seconds=30))
        overtaken += not arrived.all()
        unseen += not (ended.done() and second.is_completed())
        first.wait()
    said = ""
    if rank == 0:
        try:
            session.all_to_all(torch.empty(1), torch.empty(0), [0, 1], [0, 0], "ep").wait(timedelta(seconds=1))
        except RuntimeError as error:
            said = "Timed out" if "imed out" in str(error) else str(error)
    dist.barrier()
    session.close()
    return overtaken, unseen, said


def test_token_groups_keep_the_order_of_starts():
    assert run_ranks(2, on_one_group) == [(0, 0, "Timed out"), (0, 0, "")]
