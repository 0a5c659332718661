"""How much of the copies to the host's memory and back is hidden behind matrix products.

    python benchmarks/offload.py [--cuda] [--out benchmarks/results/offload_cpu.md]

Several tensors of one size go out, or come back, or both, while products take about as long. Hidden is
(work + copies - both together) / min(work, copies) of medians: 1 means that the shorter of the two costs nothing. On
CPU products have one thread and copies another: leave a core free. On CUDA times are of events, and include the waits.
Every copy is compared with what was sent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from moefx.features.offload.runtime import Engines, to_device_start, to_host_start  # noqa: E402
from moefx.runtime.streams import CudaStreams  # noqa: E402

COPIES, ROUNDS = 4, 9
MIB = (1, 4, 16, 64)


class Session:
    """What the copies need of a session."""

    def __init__(self, device: str) -> None:
        self.device, self.timeout = torch.device(device), timedelta(seconds=60)
        self.streams = CudaStreams() if device == "cuda" else None
        self.engines = Engines(self)

    def held(self, kind: type[Engines]) -> Engines:
        return self.engines

    def record(self, *args: object) -> None:
        pass

    def where(self, doing: str) -> str:
        return doing


def clock(device: str, run: Callable[[], object]) -> float:
    """Milliseconds."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measured(device: str, *runs: Callable[[], object]) -> list[float]:
    """Medians, taken in turns."""
    for run in runs:
        clock(device, run)
    rounds = [[clock(device, run) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(each) for each in zip(*rounds)]


def products(device: str, milliseconds: float) -> Callable[[], None]:
    """Products that take about so long."""
    size = 256 if device == "cpu" else 2048
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)
    (one,) = measured(device, lambda: [torch.mm(a, b, out=out) for _ in range(8)])
    count = max(1, round(8 * milliseconds / one))
    return lambda: [torch.mm(a, b, out=out) for _ in range(count)]


def rows(device: str, mib: int) -> list[tuple[str, float, float, float]]:
    """(direction, work, copies, both together) for tensors of this size."""
    session = Session(device)
    sent = [torch.randn(mib * 2**18, device=device) for _ in range(COPIES)]
    parked = [to_host_start(session, x, region="").wait() for x in sent]
    for x, h in zip(sent, parked):
        assert torch.equal(to_device_start(session, h, region="").wait(), x), "a copy differs"

    def out() -> list:
        return [to_host_start(session, x, region="") for x in sent]

    def back() -> list:
        return [to_device_start(session, h, region="") for h in parked]

    found = []
    for name, begin in (("out", out), ("back", back), ("both", lambda: [*out(), *back()])):

        def copies(begin: Callable[[], list] = begin) -> None:
            for handle in begin():
                handle.wait()

        (alone,) = measured(device, copies)
        work = products(device, alone)

        def both(begin: Callable[[], list] = begin, work: Callable[[], None] = work) -> None:
            handles = begin()
            work()
            for handle in handles:
                handle.wait()

        found.append((name, *measured(device, work, copies, both)))
    session.engines.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if options.cuda else "cpu"
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.cuda else "CPU, one thread for products and one for each direction"
    lines = [f"# Copies behind products: {where}, torch {torch.__version__}", "",
             f"{COPIES} tensors at a time, medians of {ROUNDS}; `python benchmarks/offload.py`.", "",
             "| tensor | direction | products ms | copies ms | together ms | GB/s alone | hidden |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for mib in MIB:
        for name, work, copies, both in rows(device, mib):
            moved = COPIES * mib * 2**20 * (2 if name == "both" else 1)
            hidden = (work + copies - both) / min(work, copies)
            lines.append(f"| {mib} MiB | {name} | {work:.2f} | {copies:.2f} | {both:.2f} | "
                         f"{moved / copies / 1e6:.1f} | {hidden:.0%} |")  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
