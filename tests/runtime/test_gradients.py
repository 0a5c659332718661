"""Gradients that wait: what is reduced in one way adds up, whatever else waits for the same parameter."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh

from moefx.runtime.gradients import GradientBuffers, reduce_gradient_start, reduce_waiting
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
