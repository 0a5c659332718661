"""An all-to-all over gloo, as moefx does it (transport/p2p.py) and as gloo itself does, on an emulated cluster.

    python benchmarks/exchanges.py            as root; writes results/exchanges.md
    python benchmarks/exchanges.py --quick    one cluster, 5 rounds; writes nothing

Every rank sends as much to every rank. Both ways are interleaved in the same processes, once alone and four under way
at once; seconds are those of the slowest rank, over what the link between nodes needs for these bytes in one direction
at its full rate: 1.00 is the best there is. Median and quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import bits_per_s
from interleave import Spread, Step, measure
from layers import begin, on_cluster

from moefx.transport.p2p import all_to_all

HERE = Path(__file__).parent
KIB = (64, 256, 1024, 4096)  # that a rank sends to each other rank


@dataclass(frozen=True)
class Launch:
    per_node: int
    rate: str = "400mbit"
    nodes: int = 2

    @property
    def title(self) -> str:
        return f"{self.nodes} nodes of {self.per_node}, {self.rate} between them"


LAUNCHES = (Launch(1), Launch(2))


def of_gloo(output: torch.Tensor, source: torch.Tensor, rows: list[int], group: None) -> dist.Work:
    return dist.all_to_all_single(output, source, rows, rows, group=group, async_op=True)


def of_moefx(output: torch.Tensor, source: torch.Tensor, rows: list[int], group: None) -> dist.Work:
    return all_to_all(output, source, rows, rows, group)


def step_of(way: Callable, kib: int, under_way: int) -> Step:
    n = dist.get_world_size()
    rows = [kib * 256] * n
    buffers = [(torch.empty(sum(rows)), torch.ones(sum(rows))) for _ in range(under_way)]

    def run() -> None:
        for work in [way(output, source, rows, None) for output, source in buffers]:
            work.wait()

    return run


def on_rank(launch: Launch, rounds: int, out: Path) -> None:
    begin()
    wire = {kib: launch.per_node**2 * (launch.nodes - 1) * kib * 8192 / bits_per_s(launch.rate) for kib in KIB}
    found = {}
    for kib in KIB:
        steps = {(name, count): step_of(way, kib, count) for count in (1, 4)
                 for name, way in (("gloo", of_gloo), ("moefx", of_moefx))}  # fmt: skip
        for (name, count), seconds in measure(steps, rounds, warm_up=2).items():
            found[f"{kib} {name} {count}"] = [each / wire[kib] / count for each in seconds]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def table(launch: Launch, found: dict[str, list[float]]) -> list[str]:
    lines = ["", f"## {launch.title}", "", "| KiB to each rank | gloo | moefx | four at once: gloo | moefx |",
             "|---" * 5 + "|"]  # fmt: skip
    for kib in KIB:
        cells = [Spread.of(found[f"{kib} {name} {count}"]).text() for count in (1, 4) for name in ("gloo", "moefx")]
        lines.append(f"| {kib} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 15
    if arguments.rank_of:
        on_rank(Launch(**json.loads(arguments.rank_of)), rounds, Path(arguments.out))
        return
    lines = ["# All-to-alls over gloo", "",
             f"Written by `{' '.join(['python benchmarks/exchanges.py', *sys.argv[1:]])}`, "
             f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {rounds} rounds.", "",
             __doc__.split("\n\n", 2)[2].strip()]  # fmt: skip
    for launch in LAUNCHES[: 1 if arguments.quick else None]:
        found, wrong = on_cluster(__file__, launch, sys.argv[1:], 300)
        if not found:
            sys.exit(wrong)
        lines += table(launch, found)
    print("\n".join(lines))
    if not arguments.quick:
        (HERE / "results" / "exchanges.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
