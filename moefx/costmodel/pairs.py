"""What runs at the same time, measured in pairs: exchanges and copies beside computation, and beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from moefx.costmodel.tasks import COMPUTE
from moefx.costmodel.timing import Effort, Handle, Ranks, copy_of, exchange_of, message_bytes, synchronize

IN_FLIGHT = 4  # exchanges of chunks that are under way at once
ROW = 512  # entries of a row


def interference_of(how: Effort, splits: Sequence[int], ranks: Ranks) -> tuple[float, float]:
    """(rate of products and copies of rows while all-to-alls run, rate of these meanwhile), 1 being undisturbed."""
    exchange = exchange_of(message_bytes(how, sum(splits))[-1] // IN_FLIGHT, splits, ranks.device)

    def watched() -> Handle:
        work = exchange()
        work.get_future()  # gloo's sends and receives say that they are over to somebody who waits
        return work

    return _beside_computation(how, watched, ranks)


def copies_beside(how: Effort, direction: str, ranks: Ranks) -> dict[tuple[str, str], float]:
    """Rates of copies to the host ("d2h") or back ("h2d") and of what runs beside them: computation, and all-to-alls
    over each link."""
    found = {}
    with ThreadPoolExecutor(1) as worker:
        nbytes = max(how.message_bytes)
        copy = copy_of(nbytes // IN_FLIGHT, direction, ranks.device, worker)
        found[COMPUTE, direction], found[direction, COMPUTE] = _beside_computation(how, copy, ranks)
        whole = copy_of(nbytes, direction, ranks.device, worker)
        for link in ranks.groups:
            splits = ranks.splits(link)
            exchange = exchange_of(message_bytes(how, sum(splits))[-1], splits, ranks.device)
            _, *rates = _together(how, exchange, whole, ranks)
            found[link, direction], found[direction, link] = rates
    return found


def _beside_computation(how: Effort, begin: Callable[[], Handle], ranks: Ranks) -> tuple[float, float]:
    """(rate of computation, rate of what is begun several times), while both run. The mean of the ranks: those that
    share a core take turns in being slow."""
    a, rows = torch.randn(128, 128, device=ranks.device), torch.randn(64, ROW, device=ranks.device)
    order = torch.arange(63, -1, -1, device=ranks.device)

    def computed(start: float, is_over: Callable[[], bool]) -> tuple[float, float]:
        """(how often in a second, seconds in all). Once at least: a rank that waits for a core may be late."""
        done = 0
        while not done or not is_over():
            a @ a
            rows.index_select(0, order)
            synchronize(ranks.device)
            done += 1
        spent = time.perf_counter() - start
        return done / spent, spent

    def begun() -> list[Handle]:
        return [begin() for _ in range(IN_FLIGHT)]

    def now() -> float:
        """When all ranks are here."""
        if ranks.size > 1:
            dist.barrier()
        synchronize(ranks.device)
        return time.perf_counter()

    alone = ranks.time(lambda: [work.wait() for work in begun()], how.runs)
    compute, other = [], []
    for _ in range(how.runs):
        start = now()
        undisturbed, _ = computed(start, lambda until=start + alone: time.perf_counter() >= until)
        start = now()
        works = begun()
        disturbed, spent = computed(start, lambda works=works: all(work.is_completed() for work in works))
        for work in works:
            work.wait()
        compute.append(disturbed / undisturbed)
        other.append(alone / spent)
    means = ranks.mean([statistics.median(rates) for rates in (compute, other)])
    mine, others = (min(1.0, max(0.01, rate)) for rate in means)
    return mine, others


def both_links(how: Effort, ranks: Ranks) -> tuple[float, ...]:
    """How much of the shorter exchange is not hidden when one within and one between nodes run at once; then the rates
    of the first and of the second meanwhile. 0 alone where there is one link."""
    if len(ranks.groups) < 2:
        return (0.0,)
    far, first = ranks.splits("inter"), ranks.rank // ranks.per_node * ranks.per_node
    near = ranks.splits("intra")[first : first + ranks.per_node]
    inter = exchange_of(message_bytes(how, sum(far))[-1], far, ranks.device)
    intra = exchange_of(message_bytes(how, sum(near))[-1], near, ranks.device, ranks.groups["intra"])
    return _together(how, intra, inter, ranks)


def _together(
    how: Effort, one: Callable[[], Handle], other: Callable[[], Handle], ranks: Ranks
) -> tuple[float, float, float]:
    """`rho_and_rates` of two that are begun at once."""
    alone = [ranks.time(lambda call=call: call().wait(), how.runs) for call in (one, other)]

    def both() -> None:
        for work in (one(), other()):
            work.wait()

    return rho_and_rates(*alone, ranks.time(both, how.runs))


def rho_and_rates(one: float, other: float, together: float) -> tuple[float, float, float]:
    """Of two that take so long alone. Both go on at one rate while both run, then the longer one alone:
    together = shorter / rate + (longer - shorter)."""
    longer, shorter = max(one, other), min(one, other)
    rho = min(1.0, max(0.0, (together - longer) / shorter))
    rate = 1 / (1 + rho)
    return rho, rate, rate


def start_cost(how: Effort, ranks: Ranks) -> float:
    """Seconds of this thread that an exchange takes at its start and its end, in the wake of others, whose progress it
    disturbs and is disturbed by. A GPU computes on meanwhile."""
    if ranks.device.type == "cuda" or ranks.size == 1:
        return 0.0
    splits, found = [int(rank != ranks.rank) for rank in range(ranks.size)], []
    large = exchange_of(message_bytes(how, sum(splits))[-1] // IN_FLIGHT, splits, ranks.device)
    small = exchange_of(4096, splits, ranks.device)
    for _ in range(20):
        dist.barrier()
        works, start = [large()], time.perf_counter()
        works += [small() for _ in range(IN_FLIGHT)]
        started, start = time.perf_counter() - start, time.thread_time()
        for work in works:
            work.wait()
        found.append((started + time.thread_time() - start) / IN_FLIGHT)
    return ranks.slowest([statistics.median(found)])[0]
