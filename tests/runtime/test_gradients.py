"""Gradients that wait: what is reduced in one way adds up, whatever else waits for the same parameter."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh

from moefx.errors import StaleStateError
from moefx.runtime.gradients import (
    GradientBuffers,
    Ready,
    reduce_gradient_start,
    reduce_gradients,
    reduce_gradients_start,
    reduce_waiting,
    told_apart,
)
from moefx.runtime.session import Session
from tests.support.ranks import run_threads


def two_ways(rank: int, world: int) -> tuple[list, list, int]:
    """Micro-steps of programs that reduce `w` in two ways; the last one synchronises in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    session = Session(mesh, "test", timedelta(seconds=30))
    buffers = GradientBuffers()

    def step(value: float, axes: tuple[str, ...], scale: float, synchronise: bool = False):
        call = SimpleNamespace(buffers=buffers, synchronise=synchronise)
        grad = torch.full((2,), float(value + rank))
        return reduce_gradient_start(session, call, grad, axes=axes, scale=scale, name="w", owned=True).wait()

    both = ("dp", "ep")
    for value, axes, scale in ((1, ("dp",), 0.5), (10, both, 0.25), (100, both, 1.0), (2, ("dp",), 0.5)):
        assert step(value, axes, scale) is None
    assert buffers.names() == ["w"]
    own = step(20, both, 0.25, synchronise=True)
    left = reduce_waiting(session, buffers)["w"]
    session.close()
    return own.tolist(), left.tolist(), len(buffers)


def test_a_parameter_that_programs_reduce_in_two_ways():
    for rank, (own, left, waiting) in enumerate(run_threads(4, two_ways)):
        over_dp = sum(3 + 2 * other for other in (rank % 2, rank % 2 + 2)) * 0.5
        assert own == [sum(30 + 2 * other for other in range(4)) * 0.25] * 2
        assert left == [sum(100 + other for other in range(4)) + over_dp] * 2
        assert waiting == 0


def test_what_waits_for_one_parameter_is_dropped_whole():
    buffers = GradientBuffers()
    for name, scale in (("v", 1.0), ("w", 0.5), ("w", 1.0)):
        buffers.add((name, ("dp",), scale), torch.ones(1), owned=True)
    buffers.drop("w")
    assert buffers.ways() == [("v", ("dp",), 1.0)]


# ---- buckets


def sent_together(rank: int, world: int) -> dict[str, list]:
    """Gradients of many forms, reduced with and without buckets. Returns what the trace says of either."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    session = Session(mesh, "test", timedelta(seconds=30))
    torch.manual_seed(rank)
    both, dp = ("dp", "ep"), ("dp",)
    given = [("a", both, torch.randn(3, 4)), ("b", both, torch.randn(4, 3).t()), ("c", dp, torch.randn(5)),
             ("big", both, torch.randn(40)), ("none", both, torch.randn(0, 3)), ("d", both, torch.tensor(1.5)),
             ("half", both, torch.full((4,), torch.finfo(torch.float16).max / 2, dtype=torch.float16)),
             ("e", both, torch.randn(6)), ("f", both, torch.randn(7))]  # fmt: skip
    found, traces = [], {}
    for limit in (0, 4 * 32):
        session.bucket_bytes, session.trace = limit, []
        call = SimpleNamespace(buffers=GradientBuffers(), synchronise=True)
        held = [grad.clone() for _, _, grad in given]
        found.append(reduce_gradients(session, call, [
            Ready((name, axes, 0.25), grad, place % 2 == 0)
            for place, ((name, axes, _), grad) in enumerate(zip(given, held))]))  # fmt: skip
        for (_, _, grad), kept in [*zip(given, held)][1::2]:  # nobody's but the caller's
            assert torch.equal(grad, kept)
        traces[str(limit)] = [(t.axes, t.region) for t in session.trace]
    for (name, _, grad), alone, together in zip(given, *found):
        assert together.shape == grad.shape, name
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
        assert together.isfinite().all(), name
    session.close()
    return traces


def test_small_gradients_that_go_one_way_share_a_collective():
    alone, together = zip(*((each["0"], each["128"]) for each in run_threads(4, sent_together)))
    assert [region for _, region in alone[0]] == ["a", "b", "c", "big", "none", "d", "half", "e", "f"]
    both, dp = ("dp", "ep"), ("dp",)
    assert together[0] == [(both, "big"), (both, "a and 5 more"), (dp, "c"), (both, "half")]
    assert all(each == together[0] for each in together), "ranks send other buckets"


def test_names_of_a_bucket_are_told_apart() -> None:
    assert told_apart(["w", "v", "w", "w"]) == ["w", "v", "w, 2", "w, 3"]


def in_a_bucket(rank: int, world: int) -> list[str]:
    """What waits of micro-steps is in the bucket; done is said when it is; a second wait is refused."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    session = Session(mesh, "test", timedelta(seconds=30))
    buffers, said, traffic = GradientBuffers(), [], []

    def start(synchronise):
        call = SimpleNamespace(buffers=buffers, synchronise=synchronise)
        grads = [torch.full((2,), 1.0 + rank), torch.full((1, 2), 10.0)]
        handle = reduce_gradients_start(session, call, grads, axes=("dp",), scale=0.5, names=["v", "w"])
        for grad in grads:  # it has left
            grad.fill_(99.0)
        return handle

    session.trace = traffic
    assert start(synchronise=False).wait() == {"v": None, "w": None}
    assert not traffic
    handle = start(synchronise=True)
    assert handle.on_done(lambda: said.append("done"))
    found = handle.wait()
    assert {name: total.tolist() for name, total in found.items()} == {"v": [3.0, 3.0], "w": [[20.0, 20.0]]}
    assert [each.region for each in traffic] == ["v and 1 more"]
    assert len(buffers) == 0
    call = SimpleNamespace(buffers=buffers, synchronise=True)
    twice = [torch.full((2,), 1.0), torch.full((2,), 5.0)]
    found = reduce_gradients_start(session, call, twice, axes=("dp",), scale=0.5, names=["w", "w"]).wait()
    assert [total.tolist() for total in found.values()] == [[1.0, 1.0], [5.0, 5.0]]
    traffic.clear()
    try:
        handle.wait()
    except StaleStateError as error:
        said.append(error.what)
    start(synchronise=True)
    gc.collect()
    session.close()
    return said


def test_a_bucket_is_waited_for_once():
    with warnings.catch_warnings(record=True) as caught:  # here, since threads share what catches
        warnings.simplefilter("always")
        assert run_threads(2, in_a_bucket) == [["done", "gradients of v and 1 more was already waited for."]] * 2
    warned = {str(each.message) for each in caught if each.category is RuntimeWarning}
    assert "gradients of v and 1 more was started and never waited for" in warned
