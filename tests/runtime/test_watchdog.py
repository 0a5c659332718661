"""A rank that is late, elsewhere or dead is named by the others, and the watchdog itself is never in the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moefx.errors import CollectiveError
from moefx.runtime import collectives as c
from moefx.runtime.session import Session
from moefx.runtime.watchdog import Silence, Watchdog, ahead
from tests.runtime.test_collectives import Step
from tests.support.ranks import RanksError, run_ranks

PERIOD_S = 0.2


def open_session(timeout_s: float) -> Session:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    session = Session(mesh, "watched", timedelta(seconds=timeout_s), watch_period_s=PERIOD_S)
    session.group("ep", "gradient")
    session.group("ep", "counts")
    c.check_header_start(session, Step(number=3), axis="ep").wait()
    return session


def reduce(session: Session, name: str) -> None:
    c.all_reduce_start(session, torch.ones(4), axes="ep", scale=1.0, name=name).wait()


def late_rank(rank: int, n: int) -> str:
    session = open_session(timeout_s=1.0)
    if rank == n - 1:
        time.sleep(4)
        return "slept"
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        reduce(session, "layers.0.moe")
    # One timeout and two looks at the store, not the backend's own, longer patience.
    assert 1.0 <= time.monotonic() - start < 5.0
    time.sleep(max(0.0, 4 - (time.monotonic() - start)))
    return str(caught.value)


def test_a_rank_that_computes_too_long_is_named() -> None:
    first, second, last = run_ranks(3, late_rank)
    assert last == "slept"
    for rank, text in enumerate((first, second)):
        assert f"Rank {rank} failed in all_reduce of layers.0.moe" in text
        assert "rank 2: not waiting for anyone (in step 3, last in check_header of the step)" in text
        other = 1 - rank
        assert f"rank {other}: waiting in all_reduce of layers.0.moe" in text or f"rank {other}: raised" in text
        assert f"at: rank {rank}, step 3, all_reduce of layers.0.moe" in text


def elsewhere_rank(rank: int, n: int) -> str:
    session = open_session(timeout_s=1.0)
    counts = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        handle = c.all_reduce_start(session, torch.ones(4), axes="ep", scale=1.0, name="layers.0.moe")
    else:
        handle = c.exchange_counts_start(session, Step(number=4), counts, axis="ep", region="layers.1.moe")
    with pytest.raises(CollectiveError) as caught:
        handle.wait()
    return str(caught.value)


def test_ranks_in_different_collectives_name_each_other() -> None:
    zero, one = run_ranks(2, elsewhere_rank)
    # Both run out of patience at about the same time: the other one waits still, or has just raised.
    assert re.search(r"rank 1: .*exchange_counts of layers.1.moe \(in step 4\)", zero)
    assert re.search(r"rank 0: .*all_reduce of layers.0.moe \(in step 3\)", one)


def dying_rank(rank: int, n: int) -> None:
    session = open_session(timeout_s=5.0)
    if rank == 1:
        os._exit(3)
    reduce(session, "layers.0.moe")


def test_a_rank_that_dies_is_named_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(3, dying_rank)
    assert time.monotonic() - start < 15
    failures = caught.value.failures
    assert "exit code 3" in failures[1]
    for rank in (0, 2):
        assert "CollectiveError" in failures[rank]
        assert "rank 1: silent since" in failures[rank]
        assert "probably dead; up to" in failures[rank]


HOST_DIES = """
    import os, sys, time, torch
    import torch.distributed as dist
    from tests.runtime.test_watchdog import open_session, reduce
    if __name__ == "__main__":
        rank, port = int(sys.argv[1]), int(sys.argv[2])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        session = open_session(timeout_s=5.0)
        if rank == 0:
            time.sleep(0.5)
            os._exit(0)
        try:
            reduce(session, "layers.0.moe")
        except Exception as error:
            print(type(error).__name__, error)
        time.sleep(0.5)
        session.close()
        dist.destroy_process_group()
        print("alive")
"""


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    return store.port


def test_a_lost_store_degrades_to_what_is_known_locally(tmp_path: object) -> None:
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(HOST_DIES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    try:
        out, _ = ranks[1].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == 0
    assert "CollectiveError Rank 1 failed in all_reduce of layers.0.moe" in out
    assert "nothing is known of the other ranks: the store" in out
    assert out.rstrip().endswith("alive")


FORGOTTEN = """
    import torch.distributed as dist
    from moefx.runtime.watchdog import Silence, Watchdog, ahead
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    watchdog = Watchdog(store, "key", 0, period_s=0.01)
    print(watchdog.report([0]))
"""


def test_an_unclosed_watchdog_neither_holds_nor_aborts_the_interpreter() -> None:
    runs = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(FORGOTTEN)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 0, errors


def two_watchdogs() -> tuple[Watchdog, Watchdog]:
    store = dist.HashStore()
    return Watchdog(store, "k", 0, period_s=0.05), Watchdog(store, "k", 1, period_s=0.05)


def test_states_are_told_apart() -> None:
    zero, one = two_watchdogs()
    assert zero.report([0, 1, 2]) == [
        "rank 1: not waiting for anyone (before its first step, last in nothing)",
        "rank 2: never reported (not started, or dead before its session began)",
    ]
    one.set_step(7)
    with one.waiting("all_to_all of m"):
        assert zero.report([0, 1]) == ["rank 1: waiting in all_to_all of m (in step 7)"]
    one.fail("all_to_all of m")
    assert zero.report([1]) == ["rank 1: raised an error: all_to_all of m (in step 7)"]
    one.close()
    one.close()
    assert zero.report([1]) == ["rank 1: raised an error: all_to_all of m (in step 7)"]
    zero.close()
    assert zero.report([1])[0].startswith("nothing is known")


def test_who_is_ahead_is_told_from_calls_begun() -> None:
    zero, one = two_watchdogs()
    assert ahead(zero.states([0, 1, 2]), zero.calls) == []
    one.begin_call()
    time.sleep(0.3)  # until it is published
    assert ahead(zero.states([0, 1, 2]), zero.calls) == [1]
    assert ahead(one.states([0, 1, 2]), one.calls) == []
    zero.begin_call()
    assert ahead(zero.states([0, 1, 2]), zero.calls) == []
    for dog in (zero, one):
        dog.close()
    assert zero.states([1]) == {}


def test_who_is_silent_is_dead_and_who_ended_its_session_is_not() -> None:
    silence, states = Silence(), {0: {"beat": 1, "status": "running"}, 1: {"beat": 1, "status": "closed its session"}}
    assert [silence.of(states) for _ in range(4)] == [[], [], [], [0]]
    states[0] = {"beat": 2, "status": "running"}
    assert silence.of(states) == []


def test_equal_states_share_a_line_and_the_odd_one_comes_first() -> None:
    store = dist.HashStore()
    dogs = [Watchdog(store, "k", rank, period_s=0.05) for rank in range(5)]
    dogs[3].set_step(2)
    try:
        lines = dogs[0].report(range(5))
    finally:
        for dog in dogs:
            dog.close()
    assert lines == [
        "rank 3: not waiting for anyone (in step 2, last in nothing)",
        "ranks 1, 2, 4: not waiting for anyone (before its first step, last in nothing)",
    ]


def test_close_ends_the_thread_and_says_so() -> None:
    zero, one = two_watchdogs()
    one.close()
    assert zero.report([1]) == ["rank 1: closed its session (before its first step)"]
    zero.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "moefx k"]


def test_a_wait_costs_microseconds() -> None:
    dog = Watchdog(None, "k", 0)
    start = time.perf_counter()
    for _ in range(1000):
        with dog.waiting("x"):
            pass
    assert (time.perf_counter() - start) / 1000 < 1e-4
