"""One MoE layer, forward and backward: moefx beside the systems that people use, on an emulated cluster.

    python benchmarks/peers.py                      as root; writes results/peers.md
    python benchmarks/peers.py --quick              few rounds; writes nothing
    python benchmarks/peers.py --only simple moefx  contestants whose names begin so; writes nothing,
                                                    or the file --result of results/

All compute the same: same weights, tokens and routing, no token dropped, fp32, experts' gradients over the tokens of
all ranks, the router's gradient reduced over all ranks. Outputs and gradients are compared with a computation on one
device first; who differs is not timed. Steps are interleaved in the same processes (interleave.py), one thread per
rank, the same matmul library for all. `simple` is simple_moe.py. "communication alone" sends the rows of a step, four
exchanges one after the other; it is measured, since gloo does not reach the rate of the link. "computation alone" is
`simple` without these exchanges. Wire bytes are counted by the kernel at the link of the first node, control messages
included. Ratios are taken round by round: median and quartiles. What is fastest is chosen on odd rounds and scored on
even ones. "moefx, planned" is left to the planner, with a machine that was calibrated in the same cluster just
before; what it chose is said below. "dedup" sends a token once to a node that several of its experts are on; what rows
take between nodes with it and without, by the routing, is said below, too. No order reaches the longer of the floors: a
forward, and a backward, begins with rows of one chunk that must arrive before any expert can work, and ends with rows
of one that must come back; more chunks make these shorter, and cost messages and smaller matmuls.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster import cluster
from contestants import Contestant, Local, Problem, communication, compiled, reference, simple, worst_difference
from foreign import SYSTEMS
from interleave import Spread, Step, load, measure, ratios, wire_bytes
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.costmodel.calibrate import calibrate

HERE = Path(__file__).parent
NODES, PER_NODE, RATE = 2, 2, "200mbit"
PROBLEM = Problem(tokens=1024, width=512, inner=1024, experts=8, k=2)
TOLERANCE = 1e-5  # of the largest entry
COMMUNICATION, COMPUTATION = "communication alone", "computation alone"
POINTS = {
    "moefx": {},
    "moefx 2 chunks, optsche": {"chunks": 2, "scheduler": "optsche"},
    "moefx 2 chunks, optimal": {"chunks": 2, "scheduler": "optimal"},
    "moefx 4 chunks, optsche": {"chunks": 4, "scheduler": "optsche"},
    "moefx 4 chunks, optimal": {"chunks": 4, "scheduler": "optimal"},
    "moefx 2 chunks, pipe, optsche": {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"},
    "moefx dedup": {"alltoall": "dedup"},
    "moefx 2 chunks, dedup, optsche": {"chunks": 2, "scheduler": "optsche", "alltoall": "dedup"},
    "moefx 4 chunks, dedup, optsche": {"chunks": 4, "scheduler": "optsche", "alltoall": "dedup"},
}
PACKAGES = ("torch", "transformers", "deepspeed", "fairscale", "megatron-core")


def on_rank(arguments: argparse.Namespace) -> None:
    """One rank of the cluster: build, compare, time; the first one writes what was found to arguments.out."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if _wanted("moefx, planned", arguments.only):
        POINTS["moefx, planned"] = {"machine": calibrate(ranks_per_node=PER_NODE, quick=arguments.quick)}
    found = {routing: _race(replace(arguments.problem, routing=routing), arguments) for routing in arguments.routing}
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # foreign systems leave groups and threads behind that do not end


def _race(problem: Problem, arguments: argparse.Namespace) -> dict:
    """{"refused": {name: why}, "planned": [choice], "seconds": {name: [..]}, "bytes": {name: ..}, "differs": {name:
    ..}, "load": ..}."""
    planned: list[str] = []
    builders = _builders(problem, planned)
    expected = reference(problem, dist.get_world_size(), dist.get_rank())
    refused: dict[str, str] = {}
    differs: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for name, build in builders.items():
        if not _wanted(name, arguments.only):
            continue
        contestant, error = None, ""
        try:
            contestant = build()
            what, difference = worst_difference(contestant, expected)
            error = "" if difference <= TOLERANCE else f"its {what} is off by {difference:.1e}"
            differs[name] = difference
        except Exception as caught:
            error = " ".join(f"{type(caught).__name__}: {caught}".split())[:200]
            if arguments.verbose:
                raise
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            refused[name] = next(filter(None, errors))
        else:
            steps[name] = contestant.run
        if dist.get_rank() == 0:
            print(f"{problem.routing}: {name}: {refused.get(name, 'computes the same')}", flush=True)
    steps[COMMUNICATION] = communication(problem, dist.new_group())
    steps[COMPUTATION] = simple(problem, dist.new_group(), Local).run
    wire = {name: wire_bytes(step) for name, step in steps.items()}
    seconds = measure(steps, arguments.rounds)
    return {"refused": refused, "differs": differs, "planned": planned, "seconds": seconds, "bytes": wire,
            "load": load()}  # fmt: skip


def _wanted(name: str, only: list[str] | None) -> bool:
    return name == "simple" or only is None or any(name.startswith(each) for each in only)


def _builders(problem: Problem, planned: list[str]) -> dict[str, Callable[[], Contestant]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))

    def build_own(options: dict) -> Contestant:
        contestant, layer = compiled(problem, mesh, moefx.Options.named(**options))
        if "machine" in options:
            contestant.run()
            choice = moefx.explain(layer).programs[0].regions[0].choice
            planned.append(", ".join(f"{name} {value}" for name, value in choice.to_dict().items()))
        return contestant

    own = {name: lambda options=options: build_own(options) for name, options in POINTS.items()}
    others = {name: lambda build=build: build(problem, dist.group.WORLD) for name, build in SYSTEMS.items()}
    return {"simple": lambda: simple(problem, dist.new_group()), **own, **others}



# -- the report ----------------------------------------------------------------------------------------------------


def rows_between_nodes(p: Problem) -> dict[str, int]:
    """Bytes that the first of two nodes sends in a step for rows, and with "dedup" for their ids, weights and gradients
    of weights, by what the routers choose."""
    nodes = [[F.linear(p.inputs(rank)[0], p.weights()[0]).topk(p.k).indices // (p.experts // NODES)
              for rank in range(node * PER_NODE, (node + 1) * PER_NODE)] for node in range(NODES)]  # fmt: skip
    other = [torch.cat(chosen) != node for node, chosen in enumerate(nodes)]
    pairs, tokens = (sum(int(found.sum()) for found in each) for each in (other, [at.any(1) for at in other]))
    own, row, of_choices = int(other[0].any(1).sum()), p.width * 4, p.k * 4
    return {"direct": 2 * pairs * row, "dedup": 2 * tokens * row + (tokens + own) * of_choices}


def report(found: dict, rounds: int, p: Problem) -> str:
    lines = ["# One MoE layer beside other systems, on an emulated cluster", ""]
    command = " ".join(["python benchmarks/peers.py", *sys.argv[1:]])
    lines += [f"Written by `{command}`, {datetime.date.today().isoformat()}: {_versions()}.", ""]
    lines += [f"T={p.tokens} tokens per rank, M={p.width}, H={p.inner} (SwiGLU), E={p.experts}, k={p.k}, fp32; {NODES} "
              f"nodes of {PER_NODE} ranks, {RATE} between nodes; {rounds} rounds.", ""]  # fmt: skip
    lines += [__doc__.split("\n\n", 2)[2].strip(), ""]
    for routing, race in found.items():
        lines += [f"## {routing.capitalize()} routing", "", f"Load: {race['load']}.", "", _table(race), ""]
        lines += [f"- {name} was not timed: {why}" for name, why in race["refused"].items()]
        lines += [_verdict(race), *(f"Planned: {choice}." for choice in race["planned"])]
        sent = rows_between_nodes(replace(p, routing=routing))
        lines += [f"By the routing rows take {sent['direct'] / 1e6:.2f} MB between nodes, with dedup "
                  f"{sent['dedup'] / 1e6:.2f} MB; the rest is the router's gradient and control messages.", ""]
    return "\n".join(lines)


def _versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def _table(race: dict) -> str:
    seconds = race["seconds"]
    rows = ["| who | ms a step | of `simple` | MB on the wire | largest difference |", "|---" * 5 + "|"]
    for name in seconds:
        ms = Spread.of([1e3 * each for each in seconds[name]]).text(0)
        differs = f"{race['differs'][name]:.1e}" if name in race["differs"] else ""
        share = ratios(seconds, name, "simple").text(3)
        rows.append(f"| {name} | {ms} | {share} | {race['bytes'][name] / 1e6:.2f} | {differs} |")
    return "\n".join(rows)


def _verdict(race: dict) -> str:
    seconds = race["seconds"]
    longer = [max(pair) for pair in zip(seconds[COMMUNICATION], seconds[COMPUTATION])]
    limits = {**seconds, "the longer": longer}
    share = ratios(seconds, COMMUNICATION, "simple")
    text = (f"Communication alone is {share.median:.0%} of `simple`; a step as long as the longer of communication and "
            f"computation alone would be {1 / ratios(limits, 'the longer', 'simple').median:.2f} times as fast as "
            "`simple`.")  # fmt: skip
    own = [name for name in seconds if name.startswith("moefx")]
    others = [name for name in seconds if name in SYSTEMS]
    if own:
        odd, even = ({name: found[first::2] for name, found in limits.items()} for first in (0, 1))
        best = _fastest(own, odd)
        text += (f" The point of moefx that was fastest on odd rounds, {best}, is on even ones "
                 f"{1 / ratios(even, best, 'simple').median:.2f} times as fast as `simple` and takes "
                 f"{ratios(even, best, 'the longer').median:.2f} of that limit.")  # fmt: skip
        if others:
            other = _fastest(others, odd)
            text += f" It takes {ratios(even, best, other).text()} of the time of {other}, the fastest other system."
    return text


def _fastest(names: list[str], seconds: dict) -> str:
    return min(names, key=lambda name: ratios(seconds, name, "simple").median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, balanced routing")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--routing", nargs="*", default=["balanced", "skewed"])
    parser.add_argument("--only", nargs="*", help="contestants whose names begin so; nothing is written")
    parser.add_argument("--verbose", action="store_true", help="stop at the first contestant that fails")
    parser.add_argument("--change", type=json.loads, default={}, help="other fields of the problem, as JSON")
    parser.add_argument("--result", help="file in results/, of what --quick, --only and --change leave")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # given to the ranks
    arguments = parser.parse_args()
    arguments.problem = replace(PROBLEM, **arguments.change)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 8)
    if arguments.quick:
        arguments.routing = ["balanced"]
    if arguments.out:
        on_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, cluster("peers", NODES, RATE) as nodes:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
        status = nodes.run(command, PER_NODE, timeout_s=1500)
        if status:
            sys.exit(status)
        text = report(json.loads(out.read_text()), arguments.rounds, arguments.problem)
    print(text)
    is_whole = not arguments.quick and arguments.only is None and not arguments.change
    if is_whole or arguments.result:
        (HERE / "results" / (arguments.result or "peers.md")).write_text(text)


if __name__ == "__main__":
    main()
