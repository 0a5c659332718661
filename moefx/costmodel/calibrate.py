"""Measure the machine at hand: matmuls, memory, launches, copies and, if there are several ranks, collectives.

Under `torchrun` all ranks measure at the same time and the slowest counts, so what they share is shared as in training;
all ranks get the same `Machine`. Collectives are measured within a node and between the ranks of equal place on their
nodes, whole nodes at once: a network card is loaded by all of its ranks. An all-to-all between nodes is measured twice,
since connections share a card otherwise than bytes do: every rank with all ranks of other nodes, and as said above.
What runs at the same time is measured in pairs, as a program has it: exchanges of several chunks under way beside
products and copies of rows, exchanges within and between nodes beside one another, and copies to and from the host
beside all of these.

Ranks may share a core, too, and take turns on it: what computes is timed over many turns.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moefx import progress
from moefx.costmodel.amounts import Kind
from moefx.costmodel.curves import AlphaBeta, GemmModel, Segment
from moefx.costmodel.fit import fit_alpha_beta, fit_gemm
from moefx.costmodel.machine import ROUNDS, Key, Machine, Provenance
from moefx.costmodel.pairs import ROW, both_links, copies_beside, interference_of, start_cost
from moefx.costmodel.tasks import COMPUTE
from moefx.costmodel.timing import Effort, Ranks, exchange_of, median, message_bytes
from moefx.ir.op import Stage
from moefx.transport.codecs import codec_names, decode, encode
from moefx.transport.p2p import all_gather_several, all_to_all

WIDTHS = ((64, 512), (512, 512), (1024, 512), (512, 1024), (2048, 512))  # narrow, square, wide
SHAPES = [(m, n, k) for m in (16, 64, 256, 1024, 4096) for n, k in WIDTHS]  # m: a chunk's rows, few to many
QUICK_SHAPES = [(m, n, k) for m in (16, 128, 512) for n, k in ((64, 256), (256, 256), (256, 512), (1024, 512))]
WGRADS = [(m, n, k) for k in (16, 64, 256, 1024) for m, n in ((512, 512), (1024, 512), (2048, 512))]  # k: these rows
QUICK_WGRADS = [(m, n, k) for m, n in ((256, 256), (1024, 256)) for k in (16, 64, 256)]
WEIGHTS_BYTES = 2**26  # more than caches hold: between two uses of an expert's weights come those of all others
MESSAGE_BYTES = [2**power for power in range(10, 25, 2)] + [2**23]
QUICK_MESSAGE_BYTES = [2**power for power in range(10, 23, 2)]
PIECE_BYTES, EXPERTS = 2**22, 4  # of a chunk, for elementwise ops: its rows, and pieces that are joined
COPY_BYTES = [2**power for power in range(10, 26, 2)]
CODEC_BYTES = (2**15, 2**22)


def effort(device: torch.device, quick: bool) -> Effort:
    if quick:
        return Effort(QUICK_SHAPES, QUICK_WGRADS, QUICK_MESSAGE_BYTES, 5, 2**24, ["float32"])
    if device.type == "cuda":
        return Effort(SHAPES, WGRADS, MESSAGE_BYTES, 15, 2**29, ["float32", "bfloat16", "float16"], CODEC_BYTES)
    return Effort(SHAPES, WGRADS, MESSAGE_BYTES, 7, 2**26, ["float32", "bfloat16"], CODEC_BYTES)


@progress.task("measuring this machine")
def calibrate(*, name: str = "here", quick: bool = False, device: str | torch.device | None = None,
              ranks_per_node: int | None = None) -> Machine:
    """Measure, on all ranks of the default process group if there is one. The result is the same on all of them.

    ranks_per_node: torchrun's LOCAL_WORLD_SIZE by default, else one node is assumed. Raises MoefxError where the ranks
    do not fill their nodes.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ranks = Ranks(device, ranks_per_node)
    how = effort(device, quick)
    progress.step("launches of kernels")
    launch = ranks.slowest([measure_launch(device)])[0]
    progress.step("matrix products")
    gemm = {dtype: _gemm(how, dtype, launch, ranks) for dtype in how.dtypes}
    progress.step("memory")
    memory, rows = (2 * how.memory_bytes / seconds for seconds in ranks.slowest(
        [_memory_time(how, device), _rows_time(how, device)]))  # fmt: skip
    copies = {direction: _copies(how, direction, ranks) for direction in ("d2h", "h2d")}
    collectives: dict[Key, AlphaBeta] = {}
    interference: dict[tuple[str, str], float] = {}
    for link, group in ranks.groups.items():
        progress.step(f"collectives {link}-node")
        for collective in ROUNDS:
            collectives[collective, link, "ring"] = _ring(how, collective, group, ranks)
        collectives["all_to_all", link, "direct"] = _all_to_all(how, ranks.splits(link), ranks)
        if link == "inter" and ranks.per_node > 1:
            aligned = [int(place != ranks.rank // ranks.per_node) for place in range(ranks.size // ranks.per_node)]
            collectives["all_to_all", link, "2dh"] = _all_to_all(how, aligned, ranks, group)
        rates = interference_of(how, ranks.splits(link), ranks)
        interference[COMPUTE, link], interference[link, COMPUTE] = rates
    progress.step("computation beside copies and exchanges")
    for direction in copies:
        interference |= copies_beside(how, direction, ranks)
    rho, *rates = both_links(how, ranks)
    if rates:
        interference["intra", "inter"], interference["inter", "intra"] = rates
    found = Machine(
        name=name,
        provenance=Provenance("measured", _fingerprint(ranks, quick), datetime.date.today().isoformat()),
        gemm=gemm,
        memory_bytes_per_s=memory,
        launch_s=launch,
        collectives=collectives,
        copies=copies,
        ranks_per_node=ranks.per_node,
        pipe_rho=rho,
        interference=interference,
        rows_bytes_per_s=rows,
        start_s=start_cost(how, ranks),
        codecs=_codecs(how, ranks),
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


def measure_launch(device: torch.device, ops: int = 1000) -> float:
    """Seconds that the host needs to issue one op, in the way that programs do."""
    x, add = torch.zeros(1, device=device), torch.ops.aten.add.Tensor

    def issue() -> None:
        for _ in range(ops):
            add(x, 1)

    return median(issue, device, 5) / ops


def _gemm(how: Effort, dtype: str, launch: float, ranks: Ranks) -> GemmModel:
    """Of rows and weights, and of gradients of weights, which chunks add to those of the chunks before."""
    seconds = []
    for m, n, k in how.shapes:
        a, turns = torch.randn(m, k, device=ranks.device, dtype=getattr(torch, dtype)), _weights(k, n, dtype, ranks)
        seconds.append(median(lambda a=a, turns=turns: a @ next(turns), ranks.device, how.runs))
    for m, n, k in how.wgrads:
        a, b = (torch.randn(k, width, device=ranks.device, dtype=getattr(torch, dtype)) for width in (m, n))
        turns = _weights(m, n, dtype, ranks)
        seconds.append(median(lambda a=a, b=b, turns=turns: next(turns).addmm_(a.t(), b), ranks.device, how.runs))
    return fit_gemm([*how.shapes, *how.wgrads], ranks.slowest(seconds), launch)


def _weights(rows: int, columns: int, dtype: str, ranks: Ranks) -> Iterator[Tensor]:
    """Of one expert after the other, round and round."""
    count = math.ceil(WEIGHTS_BYTES / (rows * columns * getattr(torch, dtype).itemsize))
    return itertools.cycle(torch.randn(count, rows, columns, device=ranks.device, dtype=getattr(torch, dtype)))


def _memory_time(how: Effort, device: torch.device) -> float:
    """Seconds to read and write `memory_bytes` once each, as programs do between exchanges: an activation, a product, a
    join and a sum over the experts of a token, each into memory that it asks for. On CPU, in pieces of a chunk's size:
    an activation takes longer there than a copy."""
    rows = how.memory_bytes // (4 * ROW)
    size = rows if device.type == "cuda" else min(rows, PIECE_BYTES // (4 * ROW))
    pieces = torch.ones(rows, ROW, device=device).split(size)

    def run() -> None:
        for piece in pieces:
            product = torch.nn.functional.silu(piece) * piece
            torch.cat(product.chunk(EXPERTS)).view(-1, 2, ROW).sum(1)

    moved = 2 + 3 + 2 + 1.5  # times what a piece has
    return 2 / moved * median(run, device, how.runs)


def _rows_time(how: Effort, device: torch.device) -> float:
    """The same of rows in an order of no kind."""
    source = torch.ones(how.memory_bytes // (4 * ROW), ROW, device=device)
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.empty_like(source)
    return median(lambda: torch.index_select(source, 0, order, out=target), device, how.runs)


def _copies(how: Effort, direction: str, ranks: Ranks) -> AlphaBeta:
    """Between device and pinned host memory; without a device, within the host."""
    pinned = ranks.device.type == "cuda"
    seconds = []
    for nbytes in COPY_BYTES:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
        source, target = (there, host) if direction == "d2h" else (host, there)
        seconds.append(median(lambda s=source, t=target: t.copy_(s), ranks.device, how.runs))
    return fit_alpha_beta(COPY_BYTES, ranks.slowest(seconds))


def _codecs(how: Effort, ranks: Ranks) -> dict[str, AlphaBeta]:
    """A line through both sizes, for every codec."""
    found = {}
    for name in codec_names() if how.codec_bytes else ():
        encoding, decoding = [], []
        for nbytes in how.codec_bytes:
            rows = torch.ones(nbytes // (4 * ROW), ROW, device=ranks.device)
            payload = encode(rows, name)
            encoding.append(median(lambda rows=rows, name=name: encode(rows, name), ranks.device, how.runs))
            decoding.append(median(lambda payload=payload, name=name: decode(payload, name, ROW, torch.float32),
                                   ranks.device, how.runs))  # fmt: skip
        for stage, seconds in ((Stage.COMPRESS, encoding), (Stage.DECOMPRESS, decoding)):
            (small, large), (first, second) = ranks.slowest(seconds), how.codec_bytes
            beta = max(0.0, large - small) / (second - first)
            found[f"{stage.value}/{name}"] = AlphaBeta((Segment(max(0.0, small - beta * first), beta),), 0.0)
    return found


def _ring(how: Effort, collective: str, group: dist.ProcessGroup, ranks: Ranks) -> AlphaBeta:
    """Time per message over its size: n-1 messages to the others, or twice as many for an all-reduce."""
    n = dist.get_world_size(group)
    messages, sizes = ROUNDS[collective] * (n - 1), message_bytes(how, n)
    calls = [_call(collective, nbytes, group, ranks.device) for nbytes in sizes]
    seconds = ranks.times(calls, how.runs)
    return fit_alpha_beta(sizes, [each / messages for each in seconds])


def _all_to_all(how: Effort, splits: Sequence[int], ranks: Ranks,
                group: dist.ProcessGroup | None = None) -> AlphaBeta:  # fmt: skip
    """Time per message over its size, one to each rank of `splits`."""
    sizes = message_bytes(how, sum(splits))
    calls = [exchange_of(nbytes, splits, ranks.device, group) for nbytes in sizes]
    seconds = ranks.times([lambda call=call: call().wait() for call in calls], how.runs)
    return fit_alpha_beta(sizes, [each / sum(splits) for each in seconds])


def _call(collective: str, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One call whose messages have `nbytes` each, done as the runtime does it: parts are sent to their rank and summed
    there."""
    n = dist.get_world_size(group)
    whole, received = torch.ones(n, nbytes // 4, device=device), torch.empty(n, nbytes // 4, device=device)
    part = torch.ones(nbytes // 4, device=device)

    def reduce_scatter() -> None:
        all_to_all(received, whole, [1] * n, [1] * n, group).wait()
        received.sum(0)

    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather_several([whole.view(-1)], [part], group).wait(),
        "reduce_scatter": reduce_scatter,
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return calls[collective]


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
    lines.append(f"memory: {machine.memory_bytes_per_s / 1e9:.2f} GB/s; rows in another order: "
                 f"{machine.bytes_per_s(Kind.ROWS) / 1e9:.2f} GB/s; launch: {machine.launch_s * 1e6:.2f} us; "
                 f"start of an exchange: {machine.start_s * 1e6:.1f} us")
    curves = {"/".join(key): curve for key, curve in machine.collectives.items()}
    curves |= {**machine.copies, **machine.codecs}
    for key, curve in curves.items():
        last = curve.segments[-1]
        rate = 1 / last.beta_s_per_byte / 1e9 if last.beta_s_per_byte else math.inf
        lines.append(f"{key}: {curve.segments[0].alpha_s * 1e6:.1f} us per message, {rate:.3f} GB/s in the end, "
                     f"{len(curve.segments)} segments, {_error(curve.mape)}")
    lines += [f"{a} runs at {rate:.2f} while {b} does" for (a, b), rate in machine.interference.items()]
    return "\n".join(lines)


def _error(mape: float | None) -> str:
    return "not measured" if mape is None else f"off by {mape:.1%}"
