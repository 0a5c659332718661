"""How calibration times things: ranks that measure together, medians, exchanges."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from moefx.errors import MoefxError
from moefx.transport.p2p import all_to_all

MAX_BYTES = 2**29  # of all messages that a rank sends at once
BATCH_S = 0.03
COMPUTED_S, TURNS = 0.005, 4  # between two exchanges, as long as the experts of a chunk; so often


@dataclass(frozen=True)
class Effort:
    """How long to measure: what sizes, and how many runs of each (the median counts). shapes, wgrads: (m, n, k) of rows
    times weights, and of gradients of weights. codec_bytes: two sizes of the
    rows that codecs are given; none: they are not measured."""

    shapes: Sequence[tuple[int, int, int]]
    wgrads: Sequence[tuple[int, int, int]]
    message_bytes: Sequence[int]
    runs: int
    memory_bytes: int
    dtypes: Sequence[str]
    codec_bytes: tuple[int, ...] = ()


class Ranks:
    """This rank among the others: what is slowest, what the first one says, and who shares which link."""

    def __init__(self, device: torch.device, per_node: int | None) -> None:
        self.device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.per_node = per_node or int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if self.size % self.per_node:
            raise MoefxError(f"{self.size} ranks do not fill nodes of {self.per_node}", hint="set --ranks-per-node")
        self.groups = self._links()

    def _links(self) -> dict[str, dist.ProcessGroup]:
        """Own group per link; every rank makes every group, in one order."""
        nodes = [list(range(first, first + self.per_node)) for first in range(0, self.size, self.per_node)]
        places = [list(range(first, self.size, self.per_node)) for first in range(self.per_node)]
        found = {}
        for link, members in (("intra", nodes), ("inter", places)):
            for group in members if len(members[0]) > 1 else ():
                made = dist.new_group(group)
                if self.rank in group:
                    found[link] = made
        return found

    def splits(self, link: str, *, aligned: bool = False) -> list[int]:
        """Whom this rank sends to over a link in an all-to-all of all ranks, [size] of 1 or 0. aligned: of other nodes
        only the rank of equal place."""
        node, place = divmod(self.rank, self.per_node)
        others = [divmod(peer, self.per_node) for peer in range(self.size)]
        if link == "intra":
            return [int(its_node == node and its_place != place) for its_node, its_place in others]
        return [int(its_node != node and (not aligned or its_place == place)) for its_node, its_place in others]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Element by element the largest of all ranks."""
        return self._reduced(seconds, dist.ReduceOp.MAX)

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Element by element the mean of all ranks."""
        return [total / self.size for total in self._reduced(figures, dist.ReduceOp.SUM)]

    def _reduced(self, figures: Sequence[float], how: dist.ReduceOp) -> list[float]:
        if self.size == 1:
            return list(figures)
        both = torch.tensor(figures, dtype=torch.float64, device=self.device)
        dist.all_reduce(both, how)
        return both.tolist()

    def from_first(self, text: str) -> str:
        found = [text]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0, device=self.device)
        return found[0]

    def time(self, run: Callable[[], object], runs: int) -> float:
        """Median seconds of `run`, which all ranks begin together; the slowest rank's."""
        found = []
        for _ in range(runs + 1):
            if self.size > 1:
                dist.barrier()
            found.append(once(run, self.device))
        return self.slowest([statistics.median(found[1:])])[0]  # the first one warms up


    def times(self, calls: Sequence[Callable[[], object]], runs: int) -> list[float]:
        """Median seconds of collectives of growing sizes. None is quicker than the smallest one is where ranks come
        from computation: one that shares its core is late, and what it sends waits for a turn on the core."""
        least = self._behind_computation(calls[0], runs)
        return [max(least, self.time(call, runs)) for call in calls]

    def _behind_computation(self, run: Callable[[], object], runs: int) -> float:
        """Median seconds that a collective adds to computation."""
        a, b = torch.ones(512, 512, device=self.device), torch.ones(512, 1024, device=self.device)
        (product,) = self.slowest([median(lambda: a @ b, self.device, 3)])
        products = math.ceil(COMPUTED_S / product)

        def computed(behind: Callable[[], object]) -> float:
            def step() -> None:
                for _ in range(TURNS):
                    for _ in range(products):
                        a @ b
                    behind()

            if self.size > 1:
                dist.barrier()
            return once(step, self.device)

        plain, both = zip(*((computed(lambda: None), computed(run)) for _ in range(runs)))
        more = [(with_it - without) / TURNS for with_it, without in zip(self.slowest(both), self.slowest(plain))]
        return max(0.0, statistics.median(more))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def median(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median seconds of several batches after a run that warms up. A batch is many turns on a shared core long, and
    the mean of its runs; there are fewer of long ones."""
    batch = math.ceil(BATCH_S / max(once(run, device), 1e-6))
    means = [statistics.mean(once(run, device) for _ in range(batch))]
    runs = max(3, min(runs, int(0.3 / (batch * means[0]))))
    return statistics.median([*means, *(statistics.mean(once(run, device) for _ in range(batch))
                                        for _ in range(runs - 1))])  # fmt: skip


def message_bytes(how: Effort, messages: int) -> list[int]:
    """The sizes to measure: smaller ones where there are so many messages that they would fill the memory."""
    most = messages * max(how.message_bytes)
    shrink = 2 ** max(0, math.ceil(math.log2(most / MAX_BYTES)))
    return [max(4, nbytes // shrink) for nbytes in how.message_bytes]


def exchange_of(nbytes: int, splits: Sequence[int], device: torch.device,
              group: dist.ProcessGroup | None = None) -> Callable[[], dist.Work]:  # fmt: skip
    """An all-to-all that sends `nbytes` to each rank of `splits`."""
    rows = [count * (nbytes // 4) for count in splits]
    whole = torch.ones(sum(rows), device=device)
    out = torch.empty_like(whole)
    return lambda: all_to_all(out, whole, rows, rows, group)


class Handle(Protocol):
    """What was begun and goes on beside this thread, and beside what else the device does."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass(frozen=True)
class _Copy:
    is_completed: Callable[[], bool]
    wait: Callable[[], object]


def copy_of(nbytes: int, direction: str, device: torch.device, worker: Executor) -> Callable[[], Handle]:
    """A copy from the device to pinned memory of the host ("d2h"), or back ("h2d"): on a stream of its own, or without
    a GPU by `worker`."""
    on_gpu = device.type == "cuda"
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    source, target = (there, host) if direction == "d2h" else (host, there)
    stream = torch.cuda.Stream(device) if on_gpu else None

    def begin() -> _Copy:
        if stream is None:
            done = worker.submit(target.copy_, source)
            return _Copy(done.done, done.result)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _Copy(event.query, event.synchronize)

    return begin
