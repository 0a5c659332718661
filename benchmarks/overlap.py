"""How much communication moefx hides behind computation, on an emulated cluster: every way to run one MoE layer.

    python benchmarks/overlap.py            as root; all set-ups; writes results/overlap.md
    python benchmarks/overlap.py --quick    two set-ups, few chunks; writes results/overlap.md and says so
    python benchmarks/overlap.py --only 0   set-ups by number; writes results/overlap.md and says so

One MoE layer, forward and backward, fp32, one thread per rank. Matmuls are real up to 2x2 ranks (twice as many as
cores). With more ranks the experts' matmuls are emulated: each takes its time at 25 GFLOP/s by the clock, without a
processor, and gives zeros; all else runs, and nothing is compared with the reference. All points of an all-to-all are
interleaved in the same processes (interleave.py) with the whole region one after the other, and so are the tasks alone:
communication (the four exchanges of a step) and every stage of computation, by moefx's own kernels, all ranks at once.
More points at once would disturb one another: gloo wakes every idle thread of every group a hundred times a second.

share: communication alone over the step that hides nothing (one chunk, "sequential"). hidden: of the time of
communication alone, what the step does not take beyond computation alone. bound: no order of these tasks can be faster;
proven by the scheduler for forward and backward, with the times measured alone, a chunk taking its share of the whole;
for one exchange at a time as fast as alone, so "pipe" may beat it. predicted: the makespan in the cost model of a
machine that was calibrated in the same cluster just before. regret: what the point predicted to be fastest loses on
even rounds to the point that was fastest on odd ones, each by its share of the whole, sequential region; floor: what
the latter loses to the fastest on even rounds, chance alone.
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
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster import cluster
from contestants import Local, Problem, communication, compiled, reference, simple, worst_difference
from interleave import Spread, Step, load, measure, ratios, split_half
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.costmodel.calibrate import calibrate
from moefx.costmodel.curves import GemmModel
from moefx.costmodel.layers import LayerTimes, schemoe_layer
from moefx.costmodel.machine import Machine
from moefx.costmodel.schedulers import schedule
from moefx.runtime import grouped, kernels

HERE = Path(__file__).parent
TOLERANCE = 1e-5
COMMUNICATION, COMPUTATION, BOUND = "communication alone", "computation alone", "bound"
SCHEDULERS = ("sequential", "optsche", "optimal")


@dataclass(frozen=True)
class Point:
    alltoall: str
    chunks: int
    scheduler: str

    @property
    def name(self) -> str:
        return f"{self.alltoall}, {self.chunks}, {self.scheduler}"


WHOLE = Point("direct", 1, "sequential")


@dataclass(frozen=True)
class Setup:
    """emulated: GFLOP/s of the experts' matmuls, which then take wall time alone; 0: they are real."""

    per_node: int
    rate: str
    inner: int
    tokens: int = 1024
    nodes: int = 2
    emulated: float = 0.0

    @property
    def problem(self) -> Problem:
        return Problem(self.tokens, 512, self.inner, 8)

    def points(self, degrees: tuple[int, ...]) -> list[list[Point]]:
        """By all-to-all; the first is `WHOLE`. A whole region has one order, and with one rank per node there is one
        all-to-all."""
        found = []
        for algorithm in ("direct",) if self.per_node == 1 else ("direct", "2dh", "pipe"):
            mine = [WHOLE]
            for chunks in degrees:
                names = SCHEDULERS if chunks > 1 else ("sequential",)
                mine += [Point(algorithm, chunks, name) for name in names]
            found.append(list(dict.fromkeys(mine)))
        return found

    @property
    def title(self) -> str:
        p = self.problem
        how = ", computation emulated" if self.emulated else ""
        return (f"{self.nodes} nodes of {self.per_node} ranks, {self.rate} between nodes, T={p.tokens}, M={p.width}, "
                f"H={p.inner}, E={p.experts}, k={p.k}{how}")  # fmt: skip


# One rank per node: 4 degrees each; two: 4 degrees of 3 algorithms each; emulated: 2 degrees of 3 algorithms. 46
# configurations, by 3 schedulers.
SETUPS = (
    Setup(1, "200mbit", 1024), Setup(2, "200mbit", 1024), Setup(1, "400mbit", 1024), Setup(1, "400mbit", 512),
    Setup(1, "200mbit", 2048), Setup(2, "400mbit", 1024), Setup(2, "200mbit", 1024, 512, nodes=4, emulated=25.0),
)  # fmt: skip


# -- on every rank -------------------------------------------------------------------------------------------------


def on_rank(setup: Setup, degrees: tuple[int, ...], rounds: int, out: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    machine = calibrate(quick=setup.emulated > 0, ranks_per_node=setup.per_node)
    if setup.emulated:
        machine = replace(machine, gemm={"float32": GemmModel(1e9 * setup.emulated)})
        emulate(1e9 * setup.emulated)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    expected = reference(setup.problem, dist.get_world_size(), dist.get_rank())
    stages = stage_steps(setup.problem)
    communicate = communication(setup.problem, dist.new_group())
    compute = in_turn(stages) if setup.emulated else simple(setup.problem, dist.new_group(), Local).run
    alone = {COMMUNICATION: communicate, COMPUTATION: compute, **stages}
    batches = [_batch(setup, points, mesh, machine, expected, alone, rounds) for points in setup.points(degrees)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"setup": asdict(setup), "batches": batches, "load": load()}))
    dist.barrier()
    os._exit(0)  # process groups, which need not end one by one


def _batch(setup: Setup, points: list[Point], mesh: DeviceMesh, machine: Machine, expected: tuple,
           alone: dict[str, Step], rounds: int) -> dict:  # fmt: skip
    """{"seconds": {name: [..]}, "predicted": {name: seconds}} of points and tasks that are timed side by side."""
    steps: dict[str, Step] = {}
    predicted: dict[str, float] = {}
    layers = []
    for point in points:
        run, layer, predicted[point.name], (what, difference) = _prepare(setup, point, mesh, machine, expected)
        layers.append(layer)
        same = "computes the same" if difference <= TOLERANCE else f"its {what} is off by {difference:.1e}"
        assert setup.emulated or difference <= TOLERANCE, f"{point.name}: {same}"
        steps[point.name] = run
        if dist.get_rank() == 0:
            print(f"{point.name}: {same}, {predicted[point.name] * 1e3:.0f} ms predicted", flush=True)
    seconds = measure({**steps, **alone}, rounds)
    for layer in layers:
        layer.close()
    return {"seconds": seconds, "predicted": predicted}


def _prepare(setup: Setup, point: Point, mesh: DeviceMesh, machine: Machine, expected: tuple,
             ) -> tuple[Step, Any, float, tuple[str, float]]:  # fmt: skip
    options = moefx.Options.named(machine=machine, verify=0, **asdict(point))
    contestant, layer = compiled(setup.problem, mesh, options)
    difference = worst_difference(contestant, expected)
    x = setup.problem.inputs(dist.get_rank())[0].unsqueeze(0).requires_grad_()
    (program,) = layer.prepare(x)
    plans = program.context.decisions.orders
    return contestant.run, layer, sum(plan.timeline.makespan for plan in plans), difference


def emulate(flops_per_s: float) -> None:
    """From now on products of rows and experts take wall time and no processor, and give zeros."""

    def linear(rows: Tensor, matrices: Tensor, counts: Tensor, exact: bool, bias: Tensor | None) -> Tensor:
        time.sleep(2 * len(rows) * matrices[0].numel() / flops_per_s)
        return rows.new_zeros(len(rows), matrices.shape[2])

    def wgrad(rows: Tensor, grad: Tensor, counts: Tensor, out: Tensor | None) -> Tensor:
        time.sleep(2 * len(rows) * rows.shape[1] * grad.shape[1] / flops_per_s)
        return rows.new_zeros(len(counts), rows.shape[1], grad.shape[1]) if out is None else out

    slept = grouped.Provider("wall time", linear, wgrad, lambda rows, width: True)
    grouped.PROVIDERS = {**grouped.PROVIDERS, ("cpu", torch.float32): slept}


def in_turn(steps: dict[str, Callable[[], object]]) -> Step:
    def run() -> None:
        for step in steps.values():
            step()

    return run


def stage_steps(problem: Problem) -> dict[str, Callable[[], object]]:
    """The stages of a whole region, one by one, with as many rows as balanced routing brings; in ScheMoE's names, those
    of the backward with a B in front."""
    each = problem.experts // dist.get_world_size()
    rows = problem.tokens * problem.k
    router, gate_up, down = problem.weights()
    gate_up, down = gate_up[:each], down[:each]
    x, grad = problem.inputs(dist.get_rank())
    weights, chosen = F.linear(x, router).softmax(-1).topk(problem.k)
    perm, _ = kernels.route(chosen, None, None, problem.experts)
    counts = torch.full((each,), rows // each)
    sent, inner, middle = (torch.randn(rows, width) for width in (problem.width, problem.inner, 2 * problem.inner))
    gate, up = middle.chunk(2, dim=1)

    def experts() -> None:
        left, right = grouped.grouped_linear(sent, gate_up, counts).chunk(2, dim=1)
        grouped.grouped_linear(F.silu(left) * right, down, counts)

    def input_gradients() -> None:
        back = grouped.grouped_linear(sent, down, counts, transposed=True)
        both = torch.cat([torch.ops.aten.silu_backward(back * up, gate), back * F.silu(gate)], 1)
        grouped.grouped_linear(both, gate_up, counts, transposed=True)

    def weight_gradients() -> None:
        grouped.grouped_wgrad(inner, sent, counts)
        grouped.grouped_wgrad(sent, middle, counts)

    return {
        "C1": lambda: kernels.dispatch(x, perm, problem.k),
        "E": experts,
        "D2": lambda: kernels.combine(sent, weights, perm, problem.k),
        "BC1": lambda: kernels.combine_backward(grad, sent, weights, perm, problem.k),
        "BE": input_gradients,
        "BW": weight_gradients,
        "BD2": lambda: kernels.combine(sent, None, perm, problem.k),
    }


# -- the report ----------------------------------------------------------------------------------------------------


def bound(seconds: dict[str, list[float]], chunks: int) -> float:
    """Seconds that no order of a step's tasks can beat, given the median of each alone."""
    alone = {name: statistics.median(found) / chunks for name, found in seconds.items()}
    exchange = alone[COMMUNICATION] / 4
    forward = LayerTimes(c1=alone["C1"], a1=exchange, d1=0, e=alone["E"], c2=0, a2=exchange, d2=alone["D2"])
    backward = LayerTimes(c1=alone["BC1"], a1=exchange, d1=0, e=alone["BE"], c2=0, a2=exchange, d2=alone["BD2"],
                          w=alone["BW"])  # fmt: skip
    return sum(schedule(schemoe_layer(times, chunks, backward=is_backward), "optimal").lower_bound
               for times, is_backward in ((forward, False), (backward, True)))  # fmt: skip


def regret(batches: list[dict]) -> tuple[str, str, float, float]:
    """(the point predicted to be fastest, the one that was on odd rounds, regret, floor)."""
    predicted = {name: seconds for batch in batches for name, seconds in batch["predicted"].items()}
    shares = {name: [a / b for a, b in zip(batch["seconds"][name], batch["seconds"][WHOLE.name])]
              for batch in batches for name in batch["predicted"]}  # fmt: skip
    chosen = min(predicted, key=predicted.__getitem__)
    return chosen, *split_half(chosen, shares)


@dataclass(frozen=True)
class Row:
    point: Point
    ms: Spread
    of_whole: Spread
    hidden: float
    over_bound: float
    error: float  # predicted over measured, less one

    def text(self) -> str:
        p = self.point
        return (f"| {p.alltoall} | {p.chunks} | {p.scheduler} | {self.ms.text(0)} | {self.of_whole.text(3)} | "
                f"{self.hidden:.0%} | {self.over_bound:.2f} | {self.error:+.0%} |")  # fmt: skip


def rows_of(found: dict) -> list[Row]:
    first, *others = found["batches"]
    rows = _rows(first)
    for batch in others:
        rows += [row for row in _rows(batch) if row.point != WHOLE]
    return rows


def _rows(batch: dict) -> list[Row]:
    seconds, rows = batch["seconds"], []
    bounds: dict[int, float] = {}
    for name, predicted in batch["predicted"].items():
        alltoall, chunks, scheduler = name.split(", ")
        point = Point(alltoall, int(chunks), scheduler)
        if point.chunks not in bounds:
            bounds[point.chunks] = bound(seconds, point.chunks)
        exposed = [(step - compute) / communicate for step, compute, communicate in
                   zip(seconds[name], seconds[COMPUTATION], seconds[COMMUNICATION])]  # fmt: skip
        median = statistics.median(seconds[name])
        rows.append(Row(point, Spread.of([1e3 * s for s in seconds[name]]), ratios(seconds, name, WHOLE.name),
                        1 - statistics.median(exposed), median / bounds[point.chunks], predicted / median - 1))
    return rows


def section(found: dict) -> str:
    seconds, setup = found["batches"][0]["seconds"], Setup(**found["setup"])
    share = ratios(seconds, COMMUNICATION, WHOLE.name)
    chosen, oracle, lost, floor = regret(found["batches"])
    rows = rows_of(found)
    overlapped = [row for row in rows if row.point.chunks > 1 and row.point.scheduler != "sequential"]
    best = min(overlapped, key=lambda row: row.of_whole.median)
    alone = {name: 1e3 * statistics.median(seconds[name]) for name in (COMMUNICATION, COMPUTATION)}
    error = statistics.mean(abs(row.error) for row in rows)
    outside = "" if 0.3 <= share.median <= 0.7 else " (not 30 to 70 %)"
    return "\n".join([
        f"## {setup.title}", "",
        f"Load: {found['load']}. Communication alone {alone[COMMUNICATION]:.0f} ms, computation alone "
        f"{alone[COMPUTATION]:.0f} ms, share {share.median:.0%}{outside}.",
        "", "| all-to-all | chunks | scheduler | ms a step | of the whole, sequential | hidden | over the bound | "
        "predicted |", "|---" * 8 + "|", *(row.text() for row in rows), "",
        f"Fastest: {best.point.name}, {1 / best.of_whole.median:.2f} times as fast as the whole region one after the "
        f"other, {best.over_bound:.2f} of the bound. Predicted fastest: {chosen}; fastest on odd rounds: {oracle}; "
        f"regret {lost:.1%}, floor {floor:.1%}. Mean error of prediction {error:.0%}.",
        "",
    ])  # fmt: skip


def report(found: list[dict], rounds: int, failures: list[str]) -> str:
    every = [row for each in found for row in rows_of(each)]
    rows = [row for row in every if row.point.chunks > 1 and row.point.scheduler != "sequential"]
    near = sum(row.over_bound <= 1.1 for row in rows)
    summary = (f"{len(rows)} overlapped points: {near} within 10 % of the bound; over the bound "
               f"{Spread.of([row.over_bound for row in rows]).text()}, hidden "
               f"{Spread.of([row.hidden for row in rows]).text()} (median and quartiles).") if rows else ""
    head = ["# Hidden communication on an emulated cluster", "",
            f"Written by `{' '.join(['python benchmarks/overlap.py', *sys.argv[1:]])}`, "
            f"{datetime.date.today().isoformat()}: torch {torch.__version__}, {rounds} rounds"
            f"; {len(found)} of {len(SETUPS)} set-ups.", "",
            __doc__.split("\n\n", 2)[2].strip(), "",
            summary, ""]  # fmt: skip
    return "\n".join([*head, *map(section, found), *(f"- {line}" for line in failures), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the set-ups")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # given to the ranks: which set-up, as JSON
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (6 if arguments.quick else 12)
    if arguments.rank_of:
        setup = Setup(**json.loads(arguments.rank_of))
        few = (2, 4) if setup.per_node == 1 else (2,)
        every = (1, 4) if setup.emulated else (1, 2, 4, 8)
        on_rank(setup, few if arguments.quick else every, rounds, Path(arguments.out))
        return
    setups = SETUPS[:2] if arguments.quick else SETUPS
    if arguments.only is not None:
        setups = [SETUPS[number] for number in arguments.only]
    found, failures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for setup in setups:
            out = Path(folder) / "found.json"
            out.unlink(missing_ok=True)
            given = ["--rank-of", json.dumps(asdict(setup)), "--out", str(out)]
            with cluster("overlap", setup.nodes, setup.rate) as nodes:
                status = nodes.run([sys.executable, __file__, *sys.argv[1:], *given], setup.per_node, timeout_s=1800)
            if status:
                failures.append(f"{setup.title}: not measured, the ranks ended with status {status}")
            else:
                found.append(json.loads(out.read_text()))
            (HERE / "results" / "overlap.md").write_text(report(found, rounds, failures))  # what is there survives
    print(report(found, rounds, failures))


if __name__ == "__main__":
    main()
