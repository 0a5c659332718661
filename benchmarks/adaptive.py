"""A training run whose batches change, on an emulated cluster: choices of each step against the best fixed ones.

    python benchmarks/adaptive.py            as root; all launches, 200 steps each; writes results/adaptive.md
    python benchmarks/adaptive.py --only 0   launches by number; writes results/adaptive.md and says so
    python benchmarks/adaptive.py --quick    the first launch, small, 4 phases of 20 steps; writes nothing

One MoE layer, forward and backward, fp32, one thread per rank, computation real. The run has four phases; in each of
them all batches have one size and one skew of routing (experts by Zipf's probabilities), and every step has another
batch. "online" and "model" are `Options(tune=..)`, started without anything remembered; each fixed choice is one arm of
`CompiledModule.use`, all of one layer. All of them take every step of the run, one after the other on the same batch,
in an order that moves on from step to step (interleave.py). The first batches of each phase are compared with one
device's output.

best: the fixed choice that is fastest in a phase by the median of its steps. Ratios are taken step by step: median and
quartiles. whole phase: the sum of all steps over that of the best, with those in which something else was tried. last
half: of the phase, the median. floor: what the best of odd steps loses on even ones, chance alone. made: steps in which
a program was compiled, or the choices for batches of a new size were priced; their time (said beside) is in no other
figure, and in those steps nobody's time is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contestants import Problem
from interleave import Spread, Step, load, measure, ratios, split_half
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
from torch import Tensor

from moefx.costmodel.machine import Machine
from moefx.options import ARMS

HERE = Path(__file__).parent
TUNED = {"online": 0.03, "model": 0.08}  # how much slower than the best fixed choice of a phase each may be


class Phase(NamedTuple):
    """tokens: of every rank. routing: as `Problem` has it."""

    tokens: int
    routing: str


@dataclass(frozen=True)
class Launch:
    """esp: ranks that share an expert. arms: the fixed choices."""

    arms: tuple[Mapping[str, Any], ...]
    phases: tuple[Phase, ...]
    esp: int = 1
    per_node: int = 2
    nodes: int = 2
    rate: str = "400mbit"
    experts: int = 16
    width: int = 256
    inner: int = 512

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Launch:
        """From what `asdict` makes, by way of JSON."""
        return cls(**{**data, "arms": tuple(data["arms"]), "phases": tuple(Phase(*each) for each in data["phases"])})

    @property
    def title(self) -> str:
        ranks = self.nodes * self.per_node
        mesh = f"ep={ranks // self.esp}, esp={self.esp}" if self.esp > 1 else f"ep={ranks}"
        return (f"{self.nodes} nodes of {self.per_node} ranks ({mesh}), {self.rate} between nodes, M={self.width}, "
                f"H={self.inner} (SwiGLU), E={self.experts}, k=2")  # fmt: skip

    def problem(self, phase: Phase) -> Problem:
        return Problem(phase.tokens, self.width, self.inner, self.experts, 2, phase.routing)


def _arm(chunks: int, alltoall: str = "direct", **others: Any) -> dict[str, Any]:
    return {"chunks": chunks, "alltoall": alltoall, **others}


_DEGREES = tuple(_arm(chunks, scheduler="optsche") for chunks in (2, 4, 8))
LAUNCHES = (
    Launch((_arm(1), *_DEGREES, _arm(2, scheduler="heuristic"), _arm(1, "2dh"), _arm(2, "2dh", scheduler="optsche"),
            _arm(1, "dedup"), _arm(2, "dedup", scheduler="optsche")),
           (Phase(1024, "zipf 0"), Phase(64, "zipf 0"), Phase(1024, "zipf 1.5"), Phase(256, "zipf 0.5"))),
    Launch((_arm(1, r=2), _arm(1, r=1), _arm(2, r=2, scheduler="optsche"), _arm(2, r=1, scheduler="optsche"),
            _arm(4, r=1, scheduler="optsche"), _arm(1, r=0)),
           (Phase(32, "zipf 0"), Phase(1024, "zipf 0"), Phase(32, "zipf 1.5"), Phase(512, "zipf 1.0")), esp=2),
)  # fmt: skip


# -- on every rank -------------------------------------------------------------------------------------------------


def on_rank(launch: Launch, steps: int, out: Path) -> None:
    begin()
    run(launch, steps, machine_here(launch.per_node), out)
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def run(launch: Launch, steps: int, machine: Machine, out: Path) -> None:
    """All phases, `steps` each; rank 0 writes what there is after each of them."""
    mesh, first = mesh_of(launch.esp), launch.problem(launch.phases[0])
    common = {"machine": machine, "ranks_per_node": launch.per_node}
    fixed = layer_of(first, mesh, chunks=1, alltoall="direct", r=launch.esp if launch.esp > 1 else None, **common)
    tuned = {name: layer_of(first, mesh, tune=name, **common) for name in TUNED}
    arms, refused = {}, {}
    for arm in launch.arms:
        why = refusal(step_through(fixed, first, 1, arm))
        (arms if why is None else refused)[name_of(arm)] = arm if why is None else why
        say(f"{name_of(arm)}: {why or 'compiled'}")
    found = []
    for phase in launch.phases:
        found.append(_phase(launch.problem(phase), steps, {name: (fixed, arm) for name, arm in arms.items()}, tuned))
        say(f"{phase}: " + ", ".join(f"{name} {statistics.median(each):.3f}" for name, each in
                                     found[-1]["seconds"].items()))  # fmt: skip
        if dist.get_rank() == 0:
            logs = {name: str(layer.tuning).splitlines() for name, layer in tuned.items()}
            out.write_text(json.dumps({"launch": asdict(launch), "phases": found, "refused": refused, "logs": logs,
                                       "load": load()}))  # fmt: skip
    for layer in (fixed, *tuned.values()):
        layer.close()


def _phase(problem: Problem, steps: int, fixed: Mapping[str, tuple[Any, Mapping[str, Any]]],
           tuned: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """{"seconds": {name: [..]} of every step, "made": {name: numbers of steps in which something was made}, "arms":
    {name: of every step}}."""
    mine = {name: _Watched(layer, step_through(layer, problem, steps, arm)) for name, (layer, arm) in fixed.items()}
    mine |= {name: _Watched(layer, step_through(layer, problem, steps)) for name, layer in tuned.items()}
    seconds = measure(mine, steps, warm_up=0)
    wanted = eager_output(problem)
    for name, watched in mine.items():
        worst = off_by(watched.first, wanted)
        assert worst <= TOLERANCE, f"{name}: its output is off by {worst:.1e} with {problem}"
    return {"seconds": seconds, "made": {name: watched.made for name, watched in mine.items()},
            "arms": {name: mine[name].arms for name in tuned}}  # fmt: skip


class _Watched:
    """A step that keeps its first output, the numbers of the calls in which the layer made a program or priced choices,
    and the arms that tuning gave them."""

    def __init__(self, layer: Any, step: Step) -> None:
        self.layer, self.step = layer, step
        self.first: Tensor | None = None
        self.made: list[int] = []
        self.arms: list[str] = []
        self.count = 0

    def __call__(self) -> None:
        before = self._known()
        out = self.step()
        self.first = out if self.first is None else self.first
        if self._known() != before:
            self.made.append(self.count)
        self.arms.append(name_of(dict(self.layer.tuning.arm)))
        self.count += 1

    def _known(self) -> tuple[int, int]:
        return len(self.layer._variants), len(self.layer.tuning.buckets)


def name_of(arm: Mapping[str, Any]) -> str:
    """Chunks first, as in the fixed choices."""
    order = sorted(arm, key=lambda key: (key not in ARMS, key != "chunks"))
    return ", ".join(f"{key} {arm[key]}" if key in ("chunks", "r") else str(arm[key]) for key in order)


# -- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """Of one phase. seconds: of the steps in which nobody made anything. lost: seconds of the steps in which the name
    did."""

    seconds: Mapping[str, Sequence[float]]
    lost: Mapping[str, Sequence[float]]
    best: str
    floor: float

    @classmethod
    def of(cls, phase: Mapping[str, Any]) -> Account:
        every = {number for numbers in phase["made"].values() for number in numbers}
        kept = {name: [s for number, s in enumerate(found) if number not in every] or found  # of very short phases, all
                for name, found in phase["seconds"].items()}  # fmt: skip
        lost = {name: [phase["seconds"][name][number] for number in numbers]
                for name, numbers in phase["made"].items()}  # fmt: skip
        fixed = {name: found for name, found in kept.items() if name not in TUNED}
        best = min(fixed, key=lambda name: statistics.median(fixed[name]))
        return cls(kept, lost, best, split_half(best, fixed)[2])

    def sum(self, name: str) -> float:
        return sum(self.seconds[name])

    def over_best(self, name: str) -> float:
        """Of the sums, less one."""
        return self.sum(name) / self.sum(self.best) - 1

    def row(self, name: str) -> str:
        half = len(self.seconds[name]) // 2
        ends = {each: found[half:] for each, found in self.seconds.items()}
        lost = f"{len(self.lost[name])} ({sum(self.lost[name]):.1f} s)" if self.lost[name] else ""
        cells = (f"**{name}**" if name == self.best else name, Spread.of([1e3 * s for s in self.seconds[name]]).text(0),
                 ratios(self.seconds, name, self.best).text(3), f"{self.over_best(name):+.1%}",
                 f"{ratios(ends, name, self.best).median:.3f}", lost)  # fmt: skip
        return f"| {' | '.join(cells)} |"


def section(found: Mapping[str, Any]) -> str:
    launch = Launch.of(found["launch"])
    lines = [f"## {launch.title}", "", f"Load: {found['load']}.", ""]
    accounts = [Account.of(phase) for phase in found["phases"]]
    for phase, measured, account in zip(launch.phases, found["phases"], accounts):
        lines += [f"### {phase.tokens} tokens a rank, {phase.routing}", "", f"Floor {account.floor:.1%}.", "",
                  "| | ms a step | of the best | whole phase | last half | made |", "|---" * 6 + "|",
                  *(account.row(name) for name in account.seconds), "",
                  *(f'- Steps of "{name}": {told(arms)}.' for name, arms in measured["arms"].items()), ""]  # fmt: skip
    lines += _overall(accounts)
    lines += [f"- {name} was not measured: {why}" for name, why in found["refused"].items()]
    for name, log in found["logs"].items():
        lines += ["", f'What "{name}" said:', "", "```", *(log or ["nothing"]), "```"]
    return "\n".join([*lines, ""])


def told(arms: Sequence[str]) -> str:
    """How many steps had which, and the last one."""
    counts = ", ".join(f"{number} {arm or 'as planned'}" for arm, number in Counter(arms).most_common())
    return f"{counts}; at the end {arms[-1] or 'as planned'}"


def _overall(accounts: Sequence[Account]) -> list[str]:
    """The whole run: by the best choice of every phase, by the best of all for all, and as it was tuned."""
    best = sum(account.sum(account.best) for account in accounts)
    sums = {name: sum(account.sum(name) for account in accounts) for name in accounts[0].seconds}
    one = min((name for name in sums if name not in TUNED), key=sums.__getitem__)
    lines = ["### The whole run", "", f"The best of every phase takes {best:.1f} s; one fixed choice for all, {one}, "
             f"{sums[one] / best - 1:+.1%}.", ""]  # fmt: skip
    for name, allowed in TUNED.items():
        over = [account.over_best(name) for account in accounts]
        met = "met" if max(over) <= allowed else "missed"
        phases = ", ".join(f"{each:+.1%} (floor {account.floor:.1%})" for each, account in zip(over, accounts))
        lines.append(f"- \"{name}\": {sums[name] / best - 1:+.1%}; by phase {phases}. At most {allowed:+.0%} in every "
                     f"phase was asked: {met}.")  # fmt: skip
    return [*lines, ""]


def report(found: Iterable[Mapping[str, Any]], steps: int, failures: Sequence[str]) -> str:
    found = list(found)
    head = ["# Choices of each step", "",
            f"Written by `{' '.join(['python benchmarks/adaptive.py', *sys.argv[1:]])}`, "
            f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {steps} steps a phase; {len(found)} of "
            f"{len(LAUNCHES)} launches.", "", __doc__.split("\n\n", 2)[2].strip(), ""]  # fmt: skip
    return "\n".join([*head, *map(section, found), *(f"- {line}" for line in failures), ""])


def small(launch: Launch) -> Launch:
    """For a look at whether it runs."""
    phases = tuple(Phase(max(16, phase.tokens // 8), phase.routing) for phase in launch.phases)
    return replace(launch, phases=phases, width=64, inner=64, rate="200mbit", per_node=1, arms=launch.arms[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, help="of each phase; 50, or 20 with --quick")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the launches")
    parser.add_argument("--change", type=json.loads, default={}, help="fields of every launch, as JSON")
    parser.add_argument("--result", default="adaptive.md", help="file in results/")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which launch, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = arguments.steps or (20 if arguments.quick else 50)
    if arguments.rank_of:
        on_rank(Launch.of(json.loads(arguments.rank_of)), steps, Path(arguments.out))
        return
    numbers = arguments.only if arguments.only is not None else [0] if arguments.quick else range(len(LAUNCHES))
    found, failures = [], []
    for launch in (LAUNCHES[number] for number in numbers):
        launch = replace(small(launch) if arguments.quick else launch, **arguments.change)
        began = time.monotonic()
        mine, wrong = on_cluster(__file__, launch, sys.argv[1:], 3600)
        print(f"{launch.title}: {time.monotonic() - began:.0f} s {wrong}", flush=True)
        found += [mine] if mine else []
        failures += [f"{launch.title}: not all was measured, {wrong}"] if wrong else []
        if not arguments.quick:
            (HERE / "results" / arguments.result).write_text(report(found, steps, failures))
    print(report(found, steps, failures))


if __name__ == "__main__":
    main()
