"""On CUDA what computation waits for has streams of high priority. Nothing runs on a device here: torch's constructors
are replaced, and what they are given is looked at."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefx.runtime.groups import GroupSet, MeshView
from moefx.runtime.streams import HOST_READS, CudaStreams

VIEW = MeshView(("dp", "ep"), (2, 2), (0, 0), (0, 1, 2, 3), "cuda")
TIMEOUT = timedelta(seconds=30)


class Options:
    """Takes what torch's of NCCL does."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


@pytest.fixture
def made(monkeypatch):
    """{purpose: the options of its group}."""
    found = {}

    def helper(size, rank, ranks, backend, store, name, backend_options=None, timeout=None, group_desc=None):
        assert timeout == TIMEOUT
        assert backend_options is None or backend_options._timeout == timeout, "torch would warn"
        found[name.split("/")[1]] = backend, backend_options
        return object(), store

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    yield found
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_groups(made, backend):
    groups = GroupSet(VIEW, "label", TIMEOUT)
    groups._backend = backend
    for purpose in ("tokens", "rows", "parts", "counts", "gradient", "shards", "weights", "copies"):
        groups.get(("ep",), purpose)
    assert {each for each, _ in made.values()} == {backend}
    urgent = {purpose for purpose, (_, options) in made.items() if options and options.is_high_priority_stream}
    assert urgent == ({"tokens", "rows", "parts", "counts"} if backend == "nccl" else set())


def test_the_options_are_those_that_torch_has():
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    assert distributed_c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True).is_high_priority_stream


def test_lanes(monkeypatch):
    """What the host reads comes first; copies of saved values do not."""
    given = []

    def stream(priority=0):
        given.append(priority)
        return SimpleNamespace(wait_stream=lambda other: None)

    event = SimpleNamespace(record=lambda stream: None)
    for name, fake in (("Stream", stream), ("current_stream", lambda: None), ("Event", lambda: event),
                       ("stream", lambda other: nullcontext())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    streams = CudaStreams()
    for lane in (HOST_READS, "d2h", HOST_READS):
        streams.begin(lane, lambda: None)
    assert given == [-1, 0]
