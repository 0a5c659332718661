"""Gradients that wait: what is reduced in one way adds up, whatever else waits for the same parameter."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh

from moefx.errors import StaleStateError
from moefx.runtime.gradients import Buckets, GradientBuffers, reduce_gradient_start, reduce_waiting
from moefx.runtime.session import Session
from tests.support.ranks import run_threads


def two_ways(rank: int, world: int) -> tuple[list, list, int]:
    """Micro-steps of programs that reduce `w` in two ways; the last one synchronises in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    session = Session(mesh, "test", timedelta(seconds=30))
    buffers = GradientBuffers()

    def step(value: float, axes: tuple[str, ...], scale: float, synchronise: bool = False):
        call = SimpleNamespace(buffers=buffers, buckets=Buckets(), synchronise=synchronise)
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
        call = SimpleNamespace(buffers=GradientBuffers(), buckets=Buckets(), synchronise=True)
        held = [grad.clone() for _, _, grad in given]
        handles = [reduce_gradient_start(session, call, grad, axes=axes, scale=0.25, name=name, owned=place % 2 == 0)
                   for place, ((name, axes, _), grad) in enumerate(zip(given, held))]  # fmt: skip
        for grad in held[1::2]:  # nobody's but the caller's, who writes to it
            grad.fill_(9.0)
        totals = {place: handles[place].wait() for place in (6, *(p for p in range(len(handles)) if p != 6))}
        found.append([totals[place] for place in range(len(handles))])
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


def sent_late(rank: int, world: int) -> list[str]:
    """What waits of micro-steps is in the bucket; done is said when it is; a second wait is refused."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    session = Session(mesh, "test", timedelta(seconds=30))
    buffers, said = GradientBuffers(), []

    def start(call, name, value):
        grad = torch.full((2,), value)
        return reduce_gradient_start(session, call, grad, axes=("dp",), scale=0.5, name=name, owned=True)

    def step(synchronise):
        call = SimpleNamespace(buffers=buffers, buckets=Buckets(), synchronise=synchronise)
        return start(call, "v", 1.0 + rank), start(call, "w", 10.0)

    assert [handle.wait() for handle in step(False)] == [None, None]
    first, second = step(True)
    assert first.on_done(lambda: said.append("first"))
    assert not said, "it has not begun"
    assert second.wait().tolist() == [20.0, 20.0]
    assert first.wait().tolist() == [3.0, 3.0]
    assert said == ["first"]
    try:
        first.wait()
    except StaleStateError as error:
        said.append(error.what)
    step(True)
    gc.collect()
    session.close()
    return said


def test_a_bucket_is_waited_for_once():
    with warnings.catch_warnings(record=True) as caught:  # here, since threads share what catches
        warnings.simplefilter("always")
        assert run_threads(2, sent_late) == [["first", "gradient of v was already waited for."]] * 2
    warned = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert sorted(warned) == [f"gradient of {name} was started and never waited for" for name in "vvww"]
