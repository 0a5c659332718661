"""What it costs to keep less for the backward, on an emulated cluster.

    python benchmarks/restoring.py    as root; writes results/restoring.md

One MoE layer behind a norm, forward and backward, fp32, one thread per rank, experts over all ranks. Every contestant
is the same layer in n chunks by OptSche; `Options.keep` differs. They are interleaved in the same processes
(interleave.py); ratios to "eager" with as many chunks are taken round by round: median and quartiles. Outputs are
compared first; gradients are the matter of tests.

MiB: the step's peak beyond parameters, their gradients and the input, on the fuller rank, measured at every operator
(tests/support/peaks.py) in a step of its own; what waits in the host's memory is not in it. less: than "eager" in as
many chunks. With as many ranks as cores, computation is real, and no core is free for copies.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import cluster
from interleave import Spread, load, measure, ratios
from memory import Work, inputs, plain, step
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.peaks import measured

HERE = Path(__file__).parent
NAME = "restoring"  # of the cluster
KEEPS = ("eager", "lean", *(f"mpipemoe-s{number}" for number in range(1, 5)))


@dataclass(frozen=True)
class Launch:
    """rate: between nodes. chunks: of every contestant."""

    rate: str
    chunks: int
    work: tuple[int, ...] = (2048, 256, 256, 8, 2)  # tokens of a rank, width, inner, experts, top-k
    nodes: int = 2
    per_node: int = 1

    @property
    def title(self) -> str:
        tokens, width, inner, experts, k = self.work
        ranks = self.nodes * self.per_node
        return (f"{ranks} ranks on {self.nodes} nodes, {self.rate} between them, {self.chunks} chunks: "
                f"T={tokens}, M={width}, H={inner}, E={experts}, k={k}")  # fmt: skip


LAUNCHES = (Launch("100mbit", 8), Launch("400mbit", 8), Launch("100mbit", 4))


def on_rank(launch: Launch, rounds: int, out: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = launch.nodes * launch.per_node
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    work = Work(*launch.work, layers=1, routing="balanced")
    x = inputs(work, dist.get_rank())
    steps, peaks, wanted = {}, {}, None
    for keep in KEEPS:
        layer = moefx.compile(plain(work), mesh, chunks=launch.chunks, scheduler="optsche", keep=keep,
                              ranks_per_node=launch.per_node, verify=0)  # fmt: skip

        def run(layer=layer) -> torch.Tensor:
            layer.zero_grad(set_to_none=True)
            return step(layer, x)

        found = run()
        wanted = found if wanted is None else wanted
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), f"{keep}: its output is off"
        gradients = sum(p.grad.to_local().numel() * p.grad.element_size() for p in layer.parameters())
        most = torch.tensor(max(measured(layer, x).values()) - gradients)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        steps[keep], peaks[keep] = run, float(most)
        if dist.get_rank() == 0:
            print(launch.title, keep, flush=True)
    seconds = measure(steps, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"launch": asdict(launch), "seconds": seconds, "peaks": peaks, "load": load()}))
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def section(of: dict) -> str:
    launch = of["launch"] | {"work": tuple(of["launch"]["work"])}
    lines = [f"## {Launch(**launch).title}", "", f"Load: {of['load']}.", "",
             "| keep | ms a step | time of eager | MiB | less |", "|---" * 5 + "|"]  # fmt: skip
    for keep, times in of["seconds"].items():
        ms, ratio = Spread.of([1e3 * s for s in times]).text(0), ratios(of["seconds"], keep, "eager").text(3)
        peak = of["peaks"][keep]
        lines.append(f"| {keep} | {ms} | {ratio} | {peak / 2**20:.1f} | {1 - peak / of['peaks']['eager']:.0%} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(LAUNCHES)), help="numbers of the launches")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which launch, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        given = json.loads(arguments.rank_of)
        on_rank(Launch(**given | {"work": tuple(given["work"])}), arguments.rounds, Path(arguments.out))
        return
    head = ["# Time and memory of what is kept", "",
            f"Written by `python {' '.join(sys.argv)}`, {datetime.date.today()}: torch {torch.__version__}, "
            f"{arguments.rounds} rounds.", "", __doc__.split("\n\n", 2)[2].strip(), ""]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        for number in arguments.only:
            launch = LAUNCHES[number]
            given = ["--rank-of", json.dumps(asdict(launch)), "--out", str(out)]
            with cluster(NAME, launch.nodes, launch.rate) as nodes:
                status = nodes.run([sys.executable, __file__, *sys.argv[1:], *given], launch.per_node, timeout_s=900)
            head.append(f"{launch.title}: not measured, status {status}" if status
                        else section(json.loads(out.read_text())))  # fmt: skip
            (HERE / "results" / "restoring.md").write_text("\n".join(head))
    print("\n".join(head))


if __name__ == "__main__":
    main()
