"""One MoE layer under skewed routing, forward and backward: who holds which expert, on an emulated cluster.

    python benchmarks/skew.py                     as root; all launches; writes results/skew.md
    python benchmarks/skew.py --only 0            launches by number; writes results/skew.md and says so
    python benchmarks/skew.py --quick             few rounds, two routings; writes nothing

Experts are chosen with Zipf's probabilities (exponent 0 to 2, the experts in an order drawn once), or by all tokens the
same ones. Every step has another batch, drawn with the same probabilities, of as many as there are rounds and warm-up
steps, so that a prediction from earlier steps has its error; all contestants see the same batches in the same order.
"plain" is moefx without placement; "hecate", "balanced", "exact" and "auto" are its policies, with two spare slots a
rank; "even" is "plain" under balanced routing: what the layer would take if the router were fair. `simple` is
simple_moe.py, the others are systems that people use (foreign.py), on the first batch. Where matmuls are real, there
are as many ranks as the machine has cores for twice over, one thread each, and outputs are compared with one device
first; with more ranks the experts' matmuls take wall time alone, at the rate that is said, and moefx is there alone.
Steps are interleaved in the same processes (interleave.py). Ratios are taken round by round: median and quartiles.
Load is the largest number of rows of a rank over the mean. All exchange directly, whole regions, so that placement
alone differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import Problem, simple
from foreign import SYSTEMS
from interleave import Spread, Step, load, measure, ratios, wire_bytes
from layers import (
    TOLERANCE,
    begin,
    eager_output,
    layer_of,
    machine_here,
    mesh_of,
    off_by,
    on_cluster,
    say,
    step_through,
)
from overlap import emulate

from moefx.costmodel.curves import GemmModel

HERE = Path(__file__).parent
PLAIN, EVEN = "plain", "even"
POLICIES = ("hecate", "balanced", "exact", "auto")
ROUTINGS = ("zipf 0", "zipf 0.5", "zipf 1.0", "zipf 1.5", "zipf 2.0", "one")
WARM_UP = 6  # steps: the window of loads is full then


@dataclass(frozen=True)
class Launch:
    """emulated: GFLOP/s of the experts' matmuls, which then take wall time alone; 0: they are real."""

    per_node: int
    nodes: int = 2
    rate: str = "400mbit"
    experts: int = 16
    tokens: int = 1024
    width: int = 256
    inner: int = 512
    emulated: float = 0.0

    @property
    def title(self) -> str:
        how = f", experts' matmuls emulated at {self.emulated:g} GFLOP/s" if self.emulated else ""
        return (f"{self.nodes} nodes of {self.per_node} ranks, {self.rate} between nodes, T={self.tokens} tokens a "
                f"rank, M={self.width}, H={self.inner} (SwiGLU), E={self.experts}, k=2{how}")  # fmt: skip

    def problem(self, routing: str) -> Problem:
        return Problem(self.tokens, self.width, self.inner, self.experts, 2, routing)


LAUNCHES = (Launch(2), Launch(2, emulated=10.0), Launch(4, emulated=10.0))


# -- on every rank -------------------------------------------------------------------------------------------------


def on_rank(launch: Launch, routings: list[str], names: list[str], rounds: int, out: Path) -> None:
    begin()
    machine = machine_here(launch.per_node)
    if launch.emulated:
        emulate(1e9 * launch.emulated)
        machine = replace(machine, gemm={"float32": GemmModel(1e9 * launch.emulated)})
    layers = {name: _compiled(launch, machine, name) for name in (PLAIN, *POLICIES) if name in names}
    found = {}
    for routing in routings:
        problem = launch.problem(routing)
        steps = {name: step_through(layer, problem, WARM_UP + rounds) for name, layer in layers.items()}
        if EVEN in names:
            steps[EVEN] = step_through(layers[PLAIN], launch.problem("balanced"), WARM_UP + rounds)
        if not launch.emulated:
            _compare(steps, problem)
            steps |= _others(problem, names)
        wire = {name: wire_bytes(step) for name, step in steps.items()}
        seconds = measure(steps, rounds, warm_up=WARM_UP - 1)
        # Not of plain: the last step of its layer was that of even.
        loads = {name: _load(layer) for name, layer in layers.items() if name != PLAIN}
        found[routing] = {"seconds": seconds, "bytes": wire, "loads": loads, "load": load()}
        say(f"{routing}: {', '.join(f'{name} {Spread.of(s).median:.3f} s' for name, s in seconds.items())}")
        if dist.get_rank() == 0:
            out.write_text(json.dumps({"launch": asdict(launch), "found": found}))
    dist.barrier()
    os._exit(0)  # foreign systems leave groups and threads behind that do not end


def _compiled(launch: Launch, machine: Any, name: str) -> Any:
    policy = {"placement": name} if name in POLICIES else {}
    problem = launch.problem("balanced")
    layer = layer_of(problem, mesh_of(), machine=machine, ranks_per_node=launch.per_node, chunks=1, alltoall="direct",
                     **policy)  # fmt: skip
    step_through(layer, problem, 1)()
    say(f"{name} is compiled")
    return layer


def _compare(steps: dict[str, Step], problem: Problem) -> None:
    """The outputs of the first two batches with one device's: the second one's placement may have changed."""
    for number in range(2):
        wanted = eager_output(problem, number)
        for name, step in steps.items():
            if name != EVEN:
                worst = off_by(step(), wanted)
                assert worst <= TOLERANCE, f"{name}: its output of batch {number} is off by {worst:.1e}"
    if EVEN in steps:
        steps[EVEN]()


def _others(problem: Problem, names: list[str]) -> dict[str, Step]:
    builders: dict[str, Callable] = {"simple": simple, **SYSTEMS}
    found: dict[str, Step] = {}
    for name in [name for name in builders if name in names]:
        contestant, error = None, None
        try:
            contestant = builders[name](problem, dist.new_group())
            contestant.run()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if not any(errors):
            found[name] = contestant.run
    return found


def _load(layer: Any) -> tuple[float, float]:
    """Rows of a rank, the largest over the mean, in the last step; and without copies."""
    (stats,) = layer.moe_stats().values()
    rows, at_home = (torch.tensor(each, dtype=torch.float64) for each in (stats.rows, stats.rows_at_home))
    return float(rows.max() / rows.mean()), float(at_home.max() / at_home.mean())


# -- the report ----------------------------------------------------------------------------------------------------


def section(of: dict) -> str:
    lines = [f"## {Launch(**of['launch']).title}", ""]
    for routing, found in of["found"].items():
        seconds = found["seconds"]
        lines += [f"### {routing.capitalize()}", "", f"Machine: {found['load']}.", "",
                  "| | ms a step | times as fast as plain | of even | load | MB between nodes, first step |",
                  "|---" * 6 + "|"]
        for name, times in seconds.items():
            ms = Spread.of([1e3 * s for s in times]).text(0)
            at = found["loads"]
            rows = f"{at[name][0]:.2f}" if name in at else ""
            if name == PLAIN and at:
                rows = f"{next(iter(at.values()))[1]:.2f}"
            mb = f"{found['bytes'][name] / 1e6:.1f}"
            ratios_of = _ratio(seconds, PLAIN, name), _ratio(seconds, name, EVEN)
            lines.append(f"| {' | '.join((name, ms, *ratios_of, rows, mb))} |")
        lines.append("")
    return "\n".join(lines)


def _ratio(seconds: dict, name: str, other: str) -> str:
    return ratios(seconds, name, other).text() if name in seconds and other in seconds else ""


def report(launches: list[dict], rounds: int, failures: list[str]) -> str:
    head = ["# Skewed routing on an emulated cluster", "",
            f"Written by `{' '.join(['python benchmarks/skew.py', *sys.argv[1:]])}`, "
            f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {rounds} rounds; "
            f"{len(launches)} of {len(LAUNCHES)} launches.", "", __doc__.split("\n\n", 2)[2].strip(), ""]  # fmt: skip
    return "\n".join([*head, *map(section, launches), *(f"- {line}" for line in failures), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(LAUNCHES)), help="numbers of the launches")
    parser.add_argument("--names", nargs="*", default=[EVEN, PLAIN, *POLICIES, "simple", *SYSTEMS])
    parser.add_argument("--routing", nargs="*", default=list(ROUTINGS))
    parser.add_argument("--change", type=json.loads, default={}, help="fields of every launch, as JSON")
    parser.add_argument("--result", default="skew.md", help="file in results/")
    parser.add_argument("--quick", action="store_true", help="3 rounds, two routings; writes nothing")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which launch, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.routing = 3, ["zipf 0", "zipf 1.5"]
    if arguments.rank_of:
        launch = Launch(**json.loads(arguments.rank_of))
        on_rank(launch, arguments.routing, arguments.names, arguments.rounds, Path(arguments.out))
        return
    launches, failures = [], []
    for launch in (replace(LAUNCHES[number], **arguments.change) for number in arguments.only):
        found, wrong = on_cluster(__file__, launch, sys.argv[1:], 1500)
        if wrong:
            failures.append(f"{launch.title}: not all was measured, {wrong}")
        if found:
            launches.append(found)
        if not arguments.quick:
            (HERE / "results" / arguments.result).write_text(report(launches, arguments.rounds, failures))
    print(report(launches, arguments.rounds, failures))


if __name__ == "__main__":
    main()
