"""Copies to the host's memory and back: values, strides, who owns what until when, the pool, failures, threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefx.errors import OffloadError, StaleStateError, UnsupportedUse
from moefx.features.offload.runtime import Engines, Parked, Pool, ThreadCopy, to_device_start, to_host_start
from moefx.runtime.streams import CudaStreams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Session:
    """What the two calls need of a session."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.timeout = torch.device(device), timedelta(seconds=20)
        self.streams = CudaStreams() if device == "cuda" else None
        self.engines, self.trace = Engines(self), []

    def held(self, kind) -> Engines:
        return self.engines

    def record(self, kind, axes, region, num_bytes) -> None:
        self.trace.append((kind, axes, region, num_bytes))

    def where(self, doing) -> str:
        return f"rank 3, step 7, {doing}"


@pytest.fixture(params=DEVICES)
def session(request):
    found = Session(request.param)
    yield found
    found.engines.close()


def out(session, x):
    return to_host_start(session, x, region="the layer")


def back(session, parked):
    return to_device_start(session, parked, region="the layer")


VALUES = {
    "rows": lambda: torch.randn(37, 16),
    "transposed": lambda: torch.randn(5, 7).t(),
    "a part": lambda: torch.randn(9, 12)[2:7, 3:8],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "nothing": lambda: torch.randn(0, 8),
    "a number": lambda: torch.tensor(2.5),
    "bf16": lambda: torch.randn(3, 5).bfloat16(),
    "bool": lambda: torch.randn(3, 5) > 0,
    "int64": lambda: torch.arange(12).view(3, 4),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_comes_back_as_a_clone_would_be(session, name):
    x = VALUES[name]().to(session.device)
    given = x.clone()
    found = back(session, out(session, x).wait()).wait()
    assert torch.equal(found, given)
    assert (found.dtype, found.stride(), found.device) == (given.dtype, given.stride(), x.device)
    assert found.data_ptr() != x.data_ptr() or not x.numel()
    nbytes = x.numel() * x.element_size()
    assert session.trace == [("to_host", (), "the layer", nbytes), ("to_device", (), "the layer", nbytes)]


def test_many_in_flight_come_back_in_any_order(session):
    values = [torch.randn(100 + i, 8, device=session.device) for i in range(12)]
    parked = [handle.wait() for handle in [out(session, x) for x in values]]
    assert session.engines.pool.in_use >= sum(4 * x.numel() for x in values)
    for place in (7, 0, 11, 3, 1, 2, 10, 9, 8, 6, 5, 4):
        assert torch.equal(back(session, parked[place]).wait(), values[place])
    del parked
    assert session.engines.pool.is_idle()


def gate():
    """(context in which copies of threads wait, what lets them go)."""
    opened, run = threading.Event(), ThreadCopy.run

    def held(self):
        assert opened.wait(20)
        run(self)

    return mock.patch.object(ThreadCopy, "run", held), opened.set


def test_what_is_read_stays_until_the_wait_and_no_longer():
    session, x = Session(), torch.randn(1000)
    source = weakref.ref(x)
    held, go = gate()
    with held:
        handle = out(session, x)
        del x
        assert source() is not None
        go()
        parked = handle.wait()
    assert source() is None, "the source outlives the wait"
    with pytest.raises(StaleStateError, match="already waited for"):
        handle.wait()
    handle = back(session, parked)
    del parked
    assert not session.engines.pool.is_idle()
    handle.wait()
    assert session.engines.pool.is_idle()
    session.engines.close()


def test_a_copy_that_nobody_waits_for_ends_and_gives_its_buffer_back_then():
    session, x = Session(), torch.ones(1000)
    held, go = gate()
    with held:
        for handle in (out(session, x), out(session, x)):
            del handle
        assert not session.engines.pool.is_idle(), "the buffer was free while the copy ran"
        go()
        session.engines.close()
    assert session.engines.pool.is_idle()


def test_copies_run_beside_the_caller():
    """And beside those of the other direction."""
    session = Session()
    parked = out(session, torch.ones(8)).wait()
    opened, run = threading.Event(), ThreadCopy.run
    with mock.patch.object(ThreadCopy, "run", lambda self: (opened.wait(20), run(self))):
        first = out(session, torch.zeros(8))
    with mock.patch.object(ThreadCopy, "run", lambda self: (opened.set(), run(self))):
        assert back(session, parked).wait().sum() == 8
    assert first.wait().host.sum() == 0
    session.engines.close()


# ---- the pool


def test_buffers_are_used_again_also_for_sizes_that_vary():
    pool = Pool(None)
    for n in (10_000, 9_950, 9_990, 10_000):
        parked = [Parked(4 * n, pool), Parked(2 * n, pool)]
        del parked
    assert pool.is_idle()
    assert pool.held <= 1.13 * 4 * 15_000


def test_the_pool_holds_no_more_than_was_in_use_at_once():
    pool = Pool(None)
    for n in (1_000_000, 100, 300_000, 5_000, 2_000_000):
        parked = Parked(n, pool)
        del parked
        assert pool.is_idle()
        assert pool.held <= pool.most
    assert pool.most <= 2_000_000 * 1.13


def test_a_host_without_memory_is_named():
    session = Session()
    with pytest.raises(OffloadError, match=f"the host has no {2**62} bytes for a saved value, beside 0"):
        Parked(2**62, session.engines.pool)
    assert session.engines.pool.is_idle()


# ---- what CUDA is told


class Stream:
    """Notes what it is told. So do its events, which are done when a test says so."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        self.name, self.log = f"the end of {stream.name}", stream.log
        self.log.append(self.name)

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


@pytest.fixture
def streams():
    """(a session that copies by streams, their log)."""
    log: list[str] = []
    made = iter(("out", "back"))
    session = Session("cuda")
    session.device = torch.device("cpu")
    session.streams.host_memory = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    with mock.patch.multiple(
        torch.cuda, Event=Event, Stream=lambda priority=0: Stream(next(made), log),
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda: Stream("compute", log)):  # fmt: skip
        yield session, log


def test_streams_wait_for_one_another(streams):
    session, log = streams
    x = torch.arange(6.0)
    assert torch.equal(back(session, out(session, x).wait()).wait(), x)
    assert log == ["out waits for compute", "the end of out", "compute waits for the end of out",
                   "back waits for compute", "back waits for the end of out", "the end of back",
                   "compute waits for the end of back"]  # fmt: skip


def test_a_buffer_is_used_again_when_the_device_is_done_with_it(streams):
    session, log = streams
    pool, x = session.engines.pool, torch.ones(2000)
    parked = out(session, x).wait()
    handle = back(session, parked)
    event = parked.done
    del parked, handle
    assert log[-1] == "the host waits for the end of back", "its memory on the device is free, and written to"
    assert pool.is_idle()
    again = out(session, x)
    assert pool.held == 2 * 8192
    event.event.done = True
    del again
    out(session, x)
    assert pool.held == 2 * 8192


# ---- failures and ends


def test_a_copy_that_failed_is_named_at_its_wait_and_leaks_nothing():
    session, x = Session(), torch.ones(8)
    with mock.patch.object(torch.Tensor, "copy_", side_effect=RuntimeError("bad memory")):
        handle = out(session, x)
        with pytest.raises(OffloadError) as caught:
            handle.wait()
    assert str(caught.value).startswith("the copy to the host of a value of the layer failed: RuntimeError: bad memory")
    assert "rank 3, step 7" in str(caught.value)
    del caught, handle
    assert session.engines.pool.is_idle()
    assert out(session, x).wait().host.sum() == 8, "the thread goes on"
    session.engines.close()


def test_a_copy_that_takes_too_long_is_named():
    session = Session()
    session.timeout = timedelta(milliseconds=20)
    held, go = gate()
    with held:
        with pytest.raises(OffloadError, match="TimeoutError: it takes too long"):
            out(session, torch.ones(8)).wait()
        go()
        session.engines.close()


class Made(TorchDispatchMode):
    """Bytes of the largest tensors that ops make on this thread."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(out) if torch.is_tensor(each)]
        self.most = max([self.most, *(each.untyped_storage().nbytes() for each in tensors)])
        return out


def test_what_waits_is_not_of_the_step_s_memory():
    session, x = Session(), torch.randn(1000)
    with Made() as made:
        parked = out(session, x).wait()
    assert made.most == 0
    with Made() as made:
        back(session, parked).wait()
    assert made.most == 4000
    session.engines.close()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moefx d2h")]


def test_threads_are_daemons_and_end_with_their_session():
    before = len(names())
    session = Session()
    out(session, torch.ones(8)).wait()
    assert len(names()) == before + 1
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("moefx d2h"))
    session.engines.close()
    session.engines.close()
    assert len(names()) == before
    with pytest.raises(UnsupportedUse, match="closed"):
        out(session, torch.ones(8))
    session = Session()
    out(session, torch.ones(8)).wait()
    (thread,) = (t for t in threading.enumerate() if t is session.engines._lanes["d2h"]._thread)
    del session
    gc.collect()
    thread.join(5)
    assert not thread.is_alive(), "a session that is gone leaves its thread behind"
