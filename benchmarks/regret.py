"""What the planner's joint choice loses to the best of those that were measured, on an emulated cluster.

    python benchmarks/regret.py            as root; all configurations; writes results/regret.md after every one
    python benchmarks/regret.py --only 0   configurations by number; writes results/regret.md and says so
    python benchmarks/regret.py --quick    three configurations, small, 6 rounds; writes nothing
    --log FILE                             of earlier launches, too: what stands there is not measured again

One MoE layer, forward and backward, fp32, one thread per rank, computation real; every step has another batch.
"planned" is the layer with all choices left open (chunks, all-to-all, order, r, what is kept, and, where "copies"
stands, placement), within the limit of memory where there is one, for a machine that was calibrated in a cluster of
this kind. The others are named choices: degrees and all-to-alls, r where ranks share experts, what is kept where memory
is limited, placements where routing is skewed. Choices that need more than the limit, by their predicted peak, are
none. limit: a share of what the whole region needs that keeps everything.

All are interleaved in the same processes (interleave.py). regret: what "planned" takes more on even rounds than the one
that was fastest on odd rounds, "planned" among them, each by its share of the whole, direct region; floor: what the
latter takes more than the fastest on even rounds, chance alone. Asked: mean regret at most the mean floor and 1 %, its
95th percentile at most that of the floor and 3 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from adaptive import name_of
from contestants import Problem
from interleave import Spread, load, measure, split_half
from layers import (
    TOLERANCE,
    begin,
    eager_output,
    layer_of,
    machine_here,
    mesh_of,
    off_by,
    on_cluster,
    refusal,
    say,
    step_through,
)

from moefx.costmodel.machine import Machine
from moefx.report.explanation import report_of

HERE = Path(__file__).parent
WARM_UP = 6  # steps: the window of loads is full then
PLANNED = "planned"


class Point(NamedTuple):
    """options: of the layer; arm: of the call."""

    options: Mapping[str, Any]
    arm: Mapping[str, Any]

    @property
    def name(self) -> str:
        return name_of({**self.arm, **self.options})


def _arm(chunks: int, alltoall: str = "direct", **others: Any) -> dict[str, Any]:
    ordered = {"scheduler": "optsche"} if chunks > 1 else {}
    return {"chunks": chunks, "alltoall": alltoall, **others, **ordered}


@dataclass(frozen=True)
class Case:
    """limit: a share of what the whole region needs. copies: whether placement is among the choices."""

    tokens: int
    inner: int
    routing: str = "balanced"
    rate: str = "400mbit"
    per_node: int = 2
    esp: int = 1
    limit: float | None = None
    copies: bool = False
    nodes: int = 2
    width: int = 256
    experts: int = 8

    @property
    def problem(self) -> Problem:
        return Problem(self.tokens, self.width, self.inner, self.experts, 2, self.routing)

    @property
    def title(self) -> str:
        ranks, names = self.nodes * self.per_node, ""
        names += f", esp={self.esp}" if self.esp > 1 else ""
        names += f", limit {self.limit:.0%}" if self.limit else ""
        names += ", copies" if self.copies else ""
        return f"{self.nodes}x{self.per_node}, {self.rate}, ep={ranks // self.esp}, T={self.tokens}, M={self.width}, " \
               f"H={self.inner}, E={self.experts}, {self.routing}{names}"  # fmt: skip

    def points(self) -> list[Point]:
        """The named choices; the first is the whole region, exchanged directly."""
        ways, degrees = ([{"r": self.esp}, {"r": 1}, {"r": 0}], (1, 2)) if self.esp > 1 else ([{}], (1, 2, 4, 8))
        found = [Point({}, _arm(chunks, **way)) for way in ways for chunks in degrees]
        if self.esp == 1:
            found += [Point({}, _arm(chunks, "dedup")) for chunks in ((1, 2) if self.per_node > 1 else (1, 2, 4))]
        if self.per_node > 1 and self.esp == 1:
            found += [Point({}, _arm(1, "2dh")), Point({}, _arm(2, "2dh")), Point({}, _arm(2, "pipe"))]
        if self.limit:
            found += [Point({"keep": keep}, _arm(chunks)) for keep in KEEPS for chunks in (4, 8)]
        if self.copies:
            kept = {"keep": KEEPS[0]} if self.limit else {}
            found += [Point({"placement": policy, **kept}, _arm(chunks)) for policy in ("balanced", "exact")
                      for chunks in ((4, 8) if self.limit else (1, 2))]  # fmt: skip
        return found


KEEPS = tuple(f"mpipemoe-s{number}" for number in range(1, 5))
SIZES = ((1024, 1024), (2048, 256), (128, 1024))
CASES = (
    *(Case(*size, rate=rate, per_node=1) for rate in ("200mbit", "400mbit") for size in SIZES),
    *(Case(*size, rate=rate) for rate in ("200mbit", "400mbit") for size in ((1024, 512), (256, 512))),
    *(Case(2048, 256, rate=rate, per_node=1, limit=limit) for rate in ("100mbit", "400mbit") for limit in (0.8, 0.68)),
    *(Case(1024, 512, limit=limit) for limit in (0.85, 0.72)),
    *(Case(1024, 512, routing, copies=True, experts=16) for routing in ("zipf 0", "zipf 1.0", "zipf 2.0")),
    *(Case(1024, 512, routing, per_node=1, copies=True) for routing in ("zipf 0.5", "zipf 1.5")),
    *(Case(tokens, 512, rate=rate, esp=2) for rate in ("200mbit", "400mbit") for tokens in (64, 1024)),
    *(Case(tokens, 512, per_node=1, esp=2) for tokens in (64, 2048)),
    *(Case(2048, 256, "zipf 1.0", per_node=1, limit=limit, copies=True) for limit in (1.0, 0.8)),
)  # fmt: skip


# -- on every rank -------------------------------------------------------------------------------------------------


def on_rank(case: Case, rounds: int, machines: Path, out: Path) -> None:
    begin()
    file = machines / f"{case.nodes}x{case.per_node}-{case.rate}.json"
    found = run(case, case.points(), rounds, machine_here(case.per_node, file))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def run(case: Case, points: Sequence[Point], rounds: int, machine: Machine) -> dict[str, Any]:
    """{"seconds": {name: [..]}, "peaks": {name: bytes}, "predicted": {name: seconds}, "limit": bytes or None,
    "planned": what it chose, "refused": {name: why}, "case", "load"}. Of choices within the limit alone there are
    seconds."""
    mesh, problem, count = mesh_of(case.esp), case.problem, WARM_UP + rounds
    common = {"machine": machine, "ranks_per_node": case.per_node}
    layers: dict[str, Any] = {}
    steps, peaks, predicted, refused, limit, words = {}, {}, {}, {}, None, ""
    for point in points:
        key = repr(point.options)
        if key not in layers:
            layers[key] = layer_of(problem, mesh, **{"keep": "eager", **point.options}, **common)
        step = step_through(layers[key], problem, count, point.arm)
        why = refusal(step)
        if why is None:
            peaks[point.name], _, predicted[point.name] = _facts(layers[key], problem)
            limit = case.limit and case.limit * next(iter(peaks.values()))
            steps[point.name] = step
        else:
            refused[point.name] = why
        say(f"{point.name}: {why or 'compiled'}")
    layers[PLANNED] = layer_of(problem, mesh, memory_limit=limit, placement="auto" if case.copies else None, **common)
    steps[PLANNED] = step_through(layers[PLANNED], problem, count)
    steps[PLANNED]()
    peaks[PLANNED], words, predicted[PLANNED] = _facts(layers[PLANNED], problem)
    say(f"{PLANNED}: {words}")
    wanted = eager_output(problem, 1)
    steps = {name: step for name, step in steps.items() if limit is None or name == PLANNED or peaks[name] <= limit}
    for name, step in steps.items():  # their second batch
        worst = off_by(step(), wanted)
        assert worst <= TOLERANCE, f"{name}: its output is off by {worst:.1e}"
    seconds = measure(steps, rounds, warm_up=WARM_UP - 2)
    for layer in layers.values():
        layer.close()
    return {"case": asdict(case), "seconds": seconds, "peaks": peaks, "predicted": predicted, "limit": limit,
            "planned": words, "refused": refused, "load": load()}  # fmt: skip


def _facts(layer: Any, problem: Problem) -> tuple[float, str, float]:
    """(bytes at the predicted peak of the program that ran last, how its region runs, its predicted seconds)."""
    (variant,) = layer.prepare(problem.inputs(dist.get_rank())[0].unsqueeze(0).requires_grad_())
    found = report_of(variant)
    (region,) = found.regions
    simplest = type(region.choice)()
    named = {"chunks": region.choice.chunks, "alltoall": region.choice.alltoall, "scheduler": region.scheduler}
    named |= {name: value for name, value in region.choice.to_dict().items()
              if name not in named and value != getattr(simplest, name)}  # fmt: skip
    ways = {way for each in variant.context.decisions.restoring.values() for way in each} - {"keep"}
    words = name_of({name: value for name, value in named.items() if value is not None})
    words = "; ".join([words, *sorted(ways), *region.placement[:1]])
    seconds = variant.context.decisions.plan.regions[0].chosen.seconds
    return max(peak.bytes for peak in found.peaks.values()), words, seconds


# -- the report ----------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    fastest: str
    regret: float
    floor: float


def score(found: Mapping[str, Any]) -> Score:
    seconds = found["seconds"]
    by = seconds[next(iter(seconds))]
    return Score(*split_half(PLANNED, {name: [a / b for a, b in zip(each, by)] for name, each in seconds.items()}))


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def summary(scores: Sequence[Score]) -> str:
    lost, floors = [each.regret for each in scores], [each.floor for each in scores]
    pairs = (statistics.mean(lost), statistics.mean(floors), 0.01), (p95(lost), p95(floors), 0.03)
    words = [f"{name} {a:.1%}, of the floor {b:.1%}: {'met' if a <= b + more else 'missed'}"
             for name, (a, b, more) in zip(("mean regret", "95th percentile"), pairs)]  # fmt: skip
    return f"{len(scores)} configurations: {'; '.join(words)}."


def predictions(every: Sequence[Mapping[str, Any]]) -> str:
    """How far off they are, where all steps run alike: without copies of experts."""
    errors = [abs(found["predicted"][name] / statistics.median(seconds) - 1) for found in every
              if not found["case"]["copies"] for name, seconds in found["seconds"].items()]  # fmt: skip
    if not errors:
        return "No predictions."
    return (f"{len(errors)} predictions without copies: off by {statistics.median(errors):.0%} (median), "
            f"{sum(error <= 0.15 for error in errors)} by at most 15 %.")  # fmt: skip


def report(every: Sequence[Mapping[str, Any]], failures: Sequence[str], rounds: int) -> str:
    scores = [score(found) for found in every]
    lines = ["# Regret of the planner's joint choice", "",
             f"Written by `{' '.join(['python benchmarks/regret.py', *sys.argv[1:]])}`, "
             f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {rounds} rounds; {len(every)} of "
             f"{len(CASES)} configurations.", "", __doc__.split("\n\n", 2)[2].strip(), "",
             *([summary(scores), "", predictions(every), ""] if scores else []),
             "| | configuration | planned | fastest on odd rounds | regret | floor | choices |",
             "|---" * 7 + "|"]  # fmt: skip
    for number, (found, each) in enumerate(zip(every, scores), 1):
        lines.append(f"| {number} | {Case(**found['case']).title} | {found['planned']} | {each.fastest} | "
                     f"{each.regret:.1%} | {each.floor:.1%} | {len(found['seconds'])} |")  # fmt: skip
    for number, found in enumerate(every, 1):
        lines += ["", f"## {number}: {Case(**found['case']).title}", "",
                  f"Load: {found['load']}." + (f" Limit: {found['limit'] / 1e6:.2f} MB." if found["limit"] else ""), "",
                  "| | ms a step | predicted | MB at the predicted peak |", "|---" * 4 + "|"]  # fmt: skip
        lines += [f"| {name} | {Spread.of([1e3 * s for s in each]).text(0)} | {found['predicted'][name] * 1e3:.0f} | "
                  f"{found['peaks'][name] / 1e6:.2f} |" for name, each in found["seconds"].items()]  # fmt: skip
        large = [name for name in found["peaks"] if name not in found["seconds"]]
        lines += ["", f"Too large: {'; '.join(large)}."] if large else []
        lines += [f"- {name} was not measured: {why}" for name, why in found["refused"].items()]
    return "\n".join([*lines, "", *(f"- {line}" for line in failures), ""])


def small(case: Case) -> Case:
    """For a look at whether it runs."""
    return replace(case, tokens=128, width=64, inner=64, per_node=1, rate="200mbit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the configurations")
    parser.add_argument("--log", type=Path, help="JSON lines; what is measured is added")
    parser.add_argument("--machines", type=Path, help="folder for machines that were calibrated; what is there is used")
    parser.add_argument("--result", default="regret.md", help="file in results/")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which configuration, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (6 if arguments.quick else 12)
    if arguments.rank_of:
        on_rank(Case(**json.loads(arguments.rank_of)), rounds, arguments.machines, Path(arguments.out))
        return
    numbers = arguments.only if arguments.only is not None else (0, 10, 16) if arguments.quick else range(len(CASES))
    cases = [small(CASES[number]) if arguments.quick else CASES[number] for number in numbers]
    every: list[dict] = []
    if arguments.log and arguments.log.is_file():
        every = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        machines = arguments.machines or Path(folder)
        machines.mkdir(exist_ok=True)
        for case in cases:
            if any(Case(**found["case"]) == case for found in every):
                continue
            began = time.monotonic()
            found, wrong = on_cluster(__file__, case, [*sys.argv[1:], "--machines", str(machines)], 900)
            print(f"{case.title}: {time.monotonic() - began:.0f} s {wrong}", flush=True)
            if found:
                every.append(found)
                if arguments.log:
                    with arguments.log.open("a") as log:
                        log.write(json.dumps(found) + "\n")
            else:
                failures.append(f"{case.title}: not measured, {wrong}")
            if not arguments.quick:
                (HERE / "results" / arguments.result).write_text(report(every, failures, rounds))
    print(report(every, failures, rounds))


if __name__ == "__main__":
    main()
