"""Measure the machine at hand: matmuls, memory, launches, copies and, if there are several ranks, collectives.

Under `torchrun` all ranks measure at the same time and the slowest counts, so what they share is shared as in training;
all ranks get the same `Machine`. Collectives are measured within a node and between the ranks of equal place on their
nodes, whole nodes at once: a network card is loaded by all of its ranks. An all-to-all between nodes is measured twice,
since connections share a card otherwise than bytes do: every rank with all ranks of other nodes, and as said above.

Ranks may share a core, too, and take turns on it: what computes is timed over many turns.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moefx._torch_compat import all_gather_flat
from moefx.costmodel.curves import AlphaBeta, GemmModel
from moefx.costmodel.fit import fit_alpha_beta, fit_gemm
from moefx.costmodel.machine import ROUNDS, Key, Machine, Provenance
from moefx.costmodel.tasks import COMPUTE
from moefx.errors import MoefxError

WIDTHS = ((64, 512), (512, 512), (1024, 512), (512, 1024), (2048, 512))  # narrow, square, wide
SHAPES = [(m, n, k) for m in (16, 64, 256, 1024, 4096) for n, k in WIDTHS]  # m: a chunk's rows, few to many
QUICK_SHAPES = [(m, n, k) for m in (16, 128, 512) for n, k in ((64, 256), (256, 256), (256, 512))]
MESSAGE_BYTES = [2**power for power in range(10, 25, 2)] + [2**23]
QUICK_MESSAGE_BYTES = [2**power for power in range(10, 23, 2)]
MAX_BYTES = 2**29  # of all messages that a rank sends at once
BATCH_S = 0.03
COPY_BYTES = [2**power for power in range(10, 26, 2)]


@dataclass(frozen=True)
class Effort:
    """How long to measure: what sizes, and how many runs of each (the median counts)."""

    shapes: Sequence[tuple[int, int, int]]
    message_bytes: Sequence[int]
    runs: int
    memory_bytes: int
    dtypes: Sequence[str]


def effort(device: torch.device, quick: bool) -> Effort:
    if quick:
        return Effort(QUICK_SHAPES, QUICK_MESSAGE_BYTES, 5, 2**24, ["float32"])
    if device.type == "cuda":
        return Effort(SHAPES, MESSAGE_BYTES, 15, 2**29, ["float32", "bfloat16", "float16"])
    return Effort(SHAPES, MESSAGE_BYTES, 7, 2**26, ["float32", "bfloat16"])


def calibrate(*, name: str = "here", quick: bool = False, device: str | torch.device | None = None,
              ranks_per_node: int | None = None) -> Machine:
    """Measure, on all ranks of the default process group if there is one. The result is the same on all of them.

    ranks_per_node: torchrun's LOCAL_WORLD_SIZE by default, else one node is assumed. Raises MoefxError where the ranks
    do not fill their nodes.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ranks = Ranks(device, ranks_per_node)
    how = effort(device, quick)
    launch = ranks.slowest([measure_launch(device)])[0]
    gemm = {dtype: _gemm(how, dtype, launch, ranks) for dtype in how.dtypes}
    memory = 2 * how.memory_bytes / ranks.slowest([_copy_time(how, device)])[0]
    copies = {direction: _copies(how, direction, ranks) for direction in ("d2h", "h2d")}
    collectives: dict[Key, AlphaBeta] = {}
    interference: dict[tuple[str, str], float] = {}
    for link, group in ranks.groups.items():
        for collective in ROUNDS:
            collectives[collective, link, "ring"] = _ring(how, collective, group, ranks)
        collectives["all_to_all", link, "direct"] = _all_to_all(how, ranks.splits(link), ranks)
        if link == "inter" and ranks.per_node > 1:
            collectives["all_to_all", link, "2dh"] = _all_to_all(how, ranks.splits(link, aligned=True), ranks)
        rates = _interference(how, ranks.splits(link), ranks)
        interference[COMPUTE, link], interference[link, COMPUTE] = rates
    found = Machine(
        name=name,
        provenance=Provenance("measured", _fingerprint(ranks, quick), datetime.date.today().isoformat()),
        gemm=gemm,
        memory_bytes_per_s=memory,
        launch_s=launch,
        collectives=collectives,
        copies=copies,
        ranks_per_node=ranks.per_node,
        pipe_rho=_pipe_rho(how, ranks),
        interference=interference,
    )
    return Machine.from_json(ranks.from_first(found.to_json()))


def write(machine: Machine, path: str | Path) -> None:
    """Write the file once, by rank 0, and whole or not at all."""
    path = Path(path)
    if not dist.is_initialized() or dist.get_rank() == 0:
        draft = path.with_name(f".{path.name}.part")
        machine.save(draft)
        draft.replace(path)
    if dist.is_initialized():
        dist.barrier()


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
        if self.size == 1:
            return list(seconds)
        both = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
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
            found.append(_once(run, self.device))
        return self.slowest([statistics.median(found[1:])])[0]  # the first one warms up


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _once(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _median(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median seconds of several batches after a run that warms up. A batch is many turns on a shared core long, and
    the mean of its runs; there are fewer of long ones."""
    batch = math.ceil(BATCH_S / max(_once(run, device), 1e-6))
    means = [statistics.mean(_once(run, device) for _ in range(batch))]
    runs = max(3, min(runs, int(0.3 / (batch * means[0]))))
    return statistics.median([*means, *(statistics.mean(_once(run, device) for _ in range(batch))
                                        for _ in range(runs - 1))])  # fmt: skip


def measure_launch(device: torch.device, ops: int = 1000) -> float:
    """Seconds that the host needs to issue one op."""
    x = torch.zeros(1, device=device)

    def issue() -> None:
        for _ in range(ops):
            x.add_(1)

    return _median(issue, device, 5) / ops


def _gemm(how: Effort, dtype: str, launch: float, ranks: Ranks) -> GemmModel:
    seconds = []
    for m, n, k in how.shapes:
        a = torch.randn(m, k, device=ranks.device, dtype=getattr(torch, dtype))
        b = torch.randn(k, n, device=ranks.device, dtype=getattr(torch, dtype))
        seconds.append(_median(lambda a=a, b=b: a @ b, ranks.device, how.runs))
    return fit_gemm(how.shapes, ranks.slowest(seconds), launch)


def _copy_time(how: Effort, device: torch.device) -> float:
    """Seconds to read and write `memory_bytes` once each."""
    source = torch.ones(how.memory_bytes // 4, device=device)
    target = torch.empty_like(source)
    return _median(lambda: torch.mul(source, 2, out=target), device, how.runs)


def _copies(how: Effort, direction: str, ranks: Ranks) -> AlphaBeta:
    """Between device and pinned host memory; without a device, within the host."""
    pinned = ranks.device.type == "cuda"
    seconds = []
    for nbytes in COPY_BYTES:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
        source, target = (there, host) if direction == "d2h" else (host, there)
        seconds.append(_median(lambda s=source, t=target: t.copy_(s), ranks.device, how.runs))
    return fit_alpha_beta(COPY_BYTES, ranks.slowest(seconds))


def _ring(how: Effort, collective: str, group: dist.ProcessGroup, ranks: Ranks) -> AlphaBeta:
    """Time per message over its size: n-1 messages to the others, or twice as many for an all-reduce."""
    n = dist.get_world_size(group)
    messages, sizes = ROUNDS[collective] * (n - 1), _message_bytes(how, n)
    seconds = [ranks.time(_call(collective, nbytes, group, ranks.device), how.runs) for nbytes in sizes]
    return fit_alpha_beta(sizes, [each / messages for each in seconds])


def _all_to_all(how: Effort, splits: Sequence[int], ranks: Ranks) -> AlphaBeta:
    """Time per message over its size, one to each rank of `splits`."""
    sizes = _message_bytes(how, sum(splits))
    calls = [_exchange(nbytes, splits, ranks.device) for nbytes in sizes]
    seconds = [ranks.time(lambda call=call: call().wait(), how.runs) for call in calls]
    return fit_alpha_beta(sizes, [each / sum(splits) for each in seconds])


def _message_bytes(how: Effort, messages: int) -> list[int]:
    """The sizes to measure: smaller ones where there are so many messages that they would fill the memory."""
    most = messages * max(how.message_bytes)
    shrink = 2 ** max(0, math.ceil(math.log2(most / MAX_BYTES)))
    return [max(4, nbytes // shrink) for nbytes in how.message_bytes]


def _call(collective: str, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One call whose messages have `nbytes` each."""
    n = dist.get_world_size(group)
    whole = torch.ones(n * nbytes // 4, device=device)
    part = torch.ones(nbytes // 4, device=device)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name until 2.12
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather_flat(whole, part, group).wait(),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return calls[collective]


def _exchange(nbytes: int, splits: Sequence[int], device: torch.device,
              group: dist.ProcessGroup | None = None) -> Callable[[], dist.Work]:  # fmt: skip
    """An all-to-all that sends `nbytes` to each rank of `splits`."""
    rows = [count * (nbytes // 4) for count in splits]
    whole = torch.ones(sum(rows), device=device)
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole, rows, rows, group=group, async_op=True)


def _interference(how: Effort, splits: Sequence[int], ranks: Ranks) -> tuple[float, float]:
    """(rate of matmuls while an all-to-all runs, rate of the all-to-all meanwhile), 1 being undisturbed."""
    exchange = _exchange(_message_bytes(how, sum(splits))[-1], splits, ranks.device)
    a = torch.randn(128, 128, device=ranks.device)
    product = _median(lambda: a @ a, ranks.device, 50)
    alone = ranks.time(lambda: exchange().wait(), how.runs)
    compute, link = [], []
    for _ in range(how.runs):
        dist.barrier()
        _synchronize(ranks.device)
        start, done = time.perf_counter(), 0
        work = exchange()
        while not work.is_completed():
            a @ a
            _synchronize(ranks.device)
            done += 1
        spent = time.perf_counter() - start
        work.wait()
        compute.append(done * product / spent)
        link.append(alone / spent)
    # what is slowest has the smallest rate
    lost = ranks.slowest([1 / max(statistics.median(rates), 0.01) for rates in (compute, link)])
    return min(1.0, 1 / lost[0]), min(1.0, 1 / lost[1])


def _pipe_rho(how: Effort, ranks: Ranks) -> float:
    """How much of the shorter exchange is not hidden when one within and one between nodes run at once."""
    if len(ranks.groups) < 2:
        return 0.0
    far, first = ranks.splits("inter"), ranks.rank // ranks.per_node * ranks.per_node
    near = ranks.splits("intra")[first : first + ranks.per_node]
    inter = _exchange(_message_bytes(how, sum(far))[-1], far, ranks.device)
    intra = _exchange(_message_bytes(how, sum(near))[-1], near, ranks.device, ranks.groups["intra"])
    alone = [ranks.time(lambda call=call: call().wait(), how.runs) for call in (intra, inter)]

    def both() -> None:
        for work in (intra(), inter()):
            work.wait()

    together = ranks.time(both, how.runs)
    return min(1.0, max(0.0, (together - max(alone)) / min(alone)))


def _fingerprint(ranks: Ranks, quick: bool) -> str:
    """What the figures belong to, without names of hosts or paths."""
    cpu, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        cpu = next((line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines()
                    if line.startswith("model name")), cpu)
    parts = [cpu, f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    if ranks.device.type == "cuda":
        parts.append(f"{torch.cuda.get_device_name(ranks.device)}, CUDA {torch.version.cuda}")
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    parts.append(f"{ranks.size} ranks, {ranks.per_node} per node, {backend}")
    return ", ".join([*parts, *(["quick"] if quick else [])])


def report(machine: Machine) -> str:
    """What was measured and how well the fits agree with it, a line each."""
    lines = [f"{machine.name}: {machine.provenance.text} ({machine.provenance.kind}, {machine.provenance.date})"]
    for dtype, model in machine.gemm.items():
        halves = f"half rate at m={model.m_half:.0f}, n={model.n_half:.0f}, k={model.k_half:.0f}"
        lines.append(f"matmul {dtype}: {model.peak_flops_per_s / 1e9:.1f} GFLOP/s, {halves}, {_error(model.mape)}")
    lines.append(f"memory: {machine.memory_bytes_per_s / 1e9:.2f} GB/s; launch: {machine.launch_s * 1e6:.2f} us")
    curves = {**{"/".join(key): curve for key, curve in machine.collectives.items()}, **machine.copies}
    for key, curve in curves.items():
        last = curve.segments[-1]
        rate = 1 / last.beta_s_per_byte / 1e9 if last.beta_s_per_byte else math.inf
        lines.append(f"{key}: {curve.segments[0].alpha_s * 1e6:.1f} us per message, {rate:.3f} GB/s in the end, "
                     f"{len(curve.segments)} segments, {_error(curve.mape)}")
    lines += [f"{a} runs at {rate:.2f} while {b} does" for (a, b), rate in machine.interference.items()]
    return "\n".join(lines)


def _error(mape: float | None) -> str:
    return "not measured" if mape is None else f"off by {mape:.1%}"
