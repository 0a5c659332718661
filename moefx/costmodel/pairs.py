"""What runs at the same time, measured in pairs: exchanges beside computation, and those within nodes beside others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moefx.costmodel.timing import Effort, Ranks, exchange_of, median, message_bytes, synchronize

IN_FLIGHT = 4  # exchanges of chunks that are under way at once
ROW = 512  # entries of a row


def interference_of(how: Effort, splits: Sequence[int], ranks: Ranks) -> tuple[float, float]:
    """(rate of products and copies of rows while all-to-alls run, rate of these meanwhile), 1 being undisturbed."""
    exchange = exchange_of(message_bytes(how, sum(splits))[-1] // IN_FLIGHT, splits, ranks.device)
    a, rows = torch.randn(128, 128, device=ranks.device), torch.randn(64, ROW, device=ranks.device)
    order = torch.arange(63, -1, -1, device=ranks.device)

    def compute_once() -> None:
        a @ a
        rows.index_select(0, order)

    once = median(compute_once, ranks.device, 50)

    def all_of_them() -> list[dist.Work]:
        return [exchange() for _ in range(IN_FLIGHT)]

    alone = ranks.time(lambda: [work.wait() for work in all_of_them()], how.runs)
    compute, link = [], []
    for _ in range(how.runs):
        dist.barrier()
        synchronize(ranks.device)
        start, done = time.perf_counter(), 0
        works = all_of_them()
        while not all(work.is_completed() for work in works):
            compute_once()
            synchronize(ranks.device)
            done += 1
        spent = time.perf_counter() - start
        for work in works:
            work.wait()
        compute.append(done * once / spent)
        link.append(alone / spent)
    # what is slowest has the smallest rate
    lost = ranks.slowest([1 / max(statistics.median(rates), 0.01) for rates in (compute, link)])
    return min(1.0, 1 / lost[0]), min(1.0, 1 / lost[1])


def both_links(how: Effort, ranks: Ranks) -> tuple[float, ...]:
    """How much of the shorter exchange is not hidden when one within and one between nodes run at once; then the rates
    of the first and of the second meanwhile. 0 alone where there is one link."""
    if len(ranks.groups) < 2:
        return (0.0,)
    far, first = ranks.splits("inter"), ranks.rank // ranks.per_node * ranks.per_node
    near = ranks.splits("intra")[first : first + ranks.per_node]
    inter = exchange_of(message_bytes(how, sum(far))[-1], far, ranks.device)
    intra = exchange_of(message_bytes(how, sum(near))[-1], near, ranks.device, ranks.groups["intra"])
    alone = [ranks.time(lambda call=call: call().wait(), how.runs) for call in (intra, inter)]

    def both() -> None:
        for work in (intra(), inter()):
            work.wait()

    together = ranks.time(both, how.runs)
    return rho_and_rates(*alone, together)


def rho_and_rates(intra: float, inter: float, together: float) -> tuple[float, float, float]:
    """Of exchanges that take so long alone. Both go on at one rate while both run, then the longer one alone:
    together = shorter / rate + (longer - shorter)."""
    longer, shorter = max(intra, inter), min(intra, inter)
    rho = min(1.0, max(0.0, (together - longer) / shorter))
    rate = 1 / (1 + rho)
    return rho, rate, rate


def start_cost(ranks: Ranks) -> float:
    """Seconds of this thread that an exchange takes at its start and its end. A GPU computes on meanwhile."""
    if ranks.device.type == "cuda" or ranks.size == 1:
        return 0.0
    exchange, found = exchange_of(4096, [int(rank != ranks.rank) for rank in range(ranks.size)], ranks.device), []
    for _ in range(50):
        start = time.thread_time()
        exchange().wait()
        found.append(time.thread_time() - start)
    return ranks.slowest([statistics.median(found)])[0]
