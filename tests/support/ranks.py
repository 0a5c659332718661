"""Ways to run a function on many ranks: gloo processes, threads, or one rank of a fake world.

`run_ranks` forks its processes from one server that has imported torch and transformers and captured a model already
(tests/support/warm.py), so that a run costs a fork (well under a second) instead of an import (seconds), and yet every
run starts from clean processes: whatever a test breaks, hangs or kills, the next one does not see it.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, _uninstall_threaded_pg

if not hasattr(ThreadLocalWorld, "comms"):
    ThreadLocalWorld.comms = []  # torch 2.11 asks every world for it when it ends

from tests.support.speed import roomy

PRELOAD = [
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch._functorch.compilers",
    "torch.export._trace",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.experimental",
    "moefx",
    "tests.support.families",
    "tests.support.scenarios",
    *(f"transformers.models.{m}.modeling_{m}" for m in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")),
    "tests.support.warm",
]
GRACE_S = 5.0  # after one rank has failed, how long the others may take to report their own error


class RanksError(AssertionError):
    """One rank or more failed. `failures`: rank -> its traceback, stack, or manner of death, as text."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """`[fn(rank, n, *args) for rank in range(n)]`, each in a process of its own, joined by gloo.

    `fn` and `args` must pickle (`fn` a top-level function), so must what it returns. Every rank has one torch
    thread and the default group initialised; the group is destroyed and the process reaped before this returns.
    `timeout` in seconds covers everything; ranks that have not answered by then are killed.
    Raises RanksError with the traceback of every rank that failed and the stack of every rank that hung.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        payload = pickle.dumps((fn, args, os.environ.get("MOEFX_CACHE", "off")))  # as it is now, not as it was
        ranks, pipes = [], {}
        try:
            for rank in range(n):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, n, folder, sys.path, payload, timeout, there))
                process.start()
                there.close()
                ranks.append(process)
                pipes[here] = rank
            answers, failures = _collect(ranks, pipes, timeout)
            silent = [rank for rank in range(n) if rank not in answers and rank not in failures]
            stacks = _stacks(silent, ranks, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if failures or silent:
        why = "killed: another rank had failed" if failures else f"hung: killed after {timeout:g} s"
        raise RanksError(failures | {rank: f"{why}; it was at\n{stacks[rank]}" for rank in silent})
    return [answers[rank] for rank in range(n)]


def fork_server():
    """The multiprocessing context; its server starts at the first use and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Read by OpenMP when torch is imported: a pool of threads would not survive the fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    return context


def _collect(
    ranks: list[Any], pipes: dict[Connection, int], timeout: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for the answers of all ranks; returns (rank -> value, rank -> failure), both without the silent ones."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    waiting = dict(pipes)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ranks[rank].join(GRACE_S)
                ok, value = False, f"died without an answer, exit code {ranks[rank].exitcode}"
            (answers if ok else failures)[rank] = value
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers, failures


def _stacks(silent: list[int], ranks: list[Any], folder: Path) -> dict[int, str]:
    """Where each silent rank stands, by faulthandler."""
    for rank in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(0.5 if silent else 0)
    return {rank: (folder / f"stack{rank}").read_text() if (folder / f"stack{rank}").exists() else "start"
            for rank in silent}


def _rank_main(
    rank: int, world: int, folder: str, path: list[str], payload: bytes, timeout: float, pipe: Connection
) -> None:
    """Body of one rank's process: run the payload, answer (ok, value or traceback text)."""
    with open(Path(folder) / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        sys.path[:] = path
        signal.alarm(int(timeout) + 60)  # should the parent be killed, nobody else ends this process
        torch.set_num_threads(1)
        torch.manual_seed(0)
        gc.freeze()
        try:
            fn, args, os.environ["MOEFX_CACHE"] = pickle.loads(payload)
            store = dist.FileStore(str(Path(folder) / "store"), world)
            # gloo's own timeout lies above ours, so that a hang is seen as a hang, with stacks.
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * timeout + 60)
            )
            answer = pickle.dumps((True, roomy(fn, rank, world, *args)))
            dist.barrier()  # nobody tears its connections down while a slower rank still needs them
            dist.destroy_process_group()
        except BaseException:  # the parent raises it, whatever it is
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo threads of a failed group may abort a normal exit


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A real (gloo) world of one rank in this process."""
    with tempfile.TemporaryDirectory(prefix="rank-") as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def fake_world(world: int, rank: int = 0) -> Iterator[None]:
    """This process as `rank` of a `world` without peers: collectives return at once, their values mean nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_threads(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """`[fn(rank, n, *args) for rank in range(n)]`, each in a thread of this process, on torch's threaded group.

    Exact numbers for many ranks, yet collectives are not asynchronous, and compiling must be locked by the caller.
    The first exception of a rank is raised here as RuntimeError with its text.
    """
    results: list[Any] = [None] * n

    def body(_: None) -> None:
        rank = dist.get_rank()
        results[rank] = roomy(fn, rank, n, *args)

    try:
        with _parsing_one_at_a_time():
            spawn_threads_and_init_comms(body, timeout=timeout, world_size=n)(None)
    finally:
        _uninstall_threaded_pg()
    return results


def _parsing_one_at_a_time() -> contextlib.AbstractContextManager:
    """Threads that parse at once may fail in Python 3.11, which has one counter of depth for all of them ("AST
    constructor recursion depth mismatch")."""
    original, lock = ast.parse, threading.RLock()

    def parse(*args: Any, **kwargs: Any) -> ast.AST:
        with lock:
            return original(*args, **kwargs)

    return mock.patch.object(ast, "parse", parse)
