"""Random MoE layers in random settings against the eager layer: `python benchmarks/fuzz.py --cases 200 --seed 0`.

What is drawn and how it is compared stands in tests/support/fuzz.py. Failures are shrunk and written to --out, each a
script of its own that shows it again.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.fuzz import STEPS, Sample, Verdict, judge, samples, script, shrunk, with_more_steps  # noqa: E402
from tests.support.handmade import Capacity  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "fuzz.md"


@dataclass
class Tally:
    """What came out, by style and verdict, or by the way of rows where samples are chosen by it."""

    programs: Counter = field(default_factory=Counter)
    cases: Counter = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    failures: list[tuple[Sample, Verdict]] = field(default_factory=list)
    seconds: float = 0.0
    ways: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    def add(self, sample: Sample, verdict: Verdict) -> None:
        key = way_of(sample) if self.ways else style_of(sample), f"{verdict.kind} {verdict.error}".strip()
        self.programs[key] += 1
        self.cases[key] += verdict.cases
        if verdict.kind == "equal":
            self.worst[sample.dtype] = max(self.worst.get(sample.dtype, 0.0), verdict.worst)
        if not verdict.ok:
            self.failures.append((sample, verdict))

    def include(self, other: Tally) -> None:
        """Add what another process found meanwhile."""
        self.programs += other.programs
        self.cases += other.cases
        self.failures += other.failures
        self.seconds = max(self.seconds, other.seconds)
        self.worst |= {dtype: max(worst, self.worst.get(dtype, 0.0)) for dtype, worst in other.worst.items()}

    def lines(self) -> Iterator[str]:
        yield f"| {'way of rows' if self.ways else 'style'} | verdict | programs | cases |"
        yield "|---|---|---|---|"
        for (style, verdict), count in sorted(self.programs.items()):
            yield f"| {style} | {verdict} | {count} | {self.cases[style, verdict]} |"
        yield ""
        rate = self.total / max(self.seconds, 1e-9)
        programs = sum(self.programs.values())
        yield f"{self.total} cases of {programs} programs in {self.seconds:.0f} s, {rate:.2f} cases/s."
        each = ", ".join(f"{dtype} {worst:.2f}" for dtype, worst in sorted(self.worst.items()))
        yield f"Largest error of the equal ones, in units of what is allowed: {each}."


def style_of(sample: Sample) -> str:
    style = sample.style
    if isinstance(style, Capacity):
        return "einsum, grouped" if style.groups else "einsum"
    return f"loop, {style.gather}{', twice' if style.twice else ''}"


def way_of(sample: Sample) -> str:
    """De-duplication counts where there are nodes; uneven: some ranks have more experts than others; shards: of dense
    parameters; layers: several, equal."""
    nodes = sample.ranks_per_node is not None and sample.world > sample.ranks_per_node
    homes = sample.ep or dict(sample.axes).get("ep", 1)
    found = {"s3": sample.split == "s3", "dedup": sample.alltoall == "dedup" and nodes, "rows": bool(sample.rows),
             "placement": sample.placement is not None, "calibrated": sample.placement == "calibrated",
             "uneven": sample.style.num_experts % homes > 0, "shards": sample.shard_dense,
             "layers": sample.layers > 1, "whole_blocks": sample.whole_blocks,
             "attention": sample.attention}  # fmt: skip
    return " ".join(name for name, is_there in found.items() if is_there)


def drawn(number: int, ways: tuple[str, ...] = ()) -> list[Sample]:
    """Random samples, apart from each other: Hypothesis goes from one to others that are much like it. ways: one of
    which each is to have, if there are any."""
    found: list[Sample] = []

    @seed(number)
    @settings(max_examples=_POOL, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(samples())
    def note(sample: Sample) -> None:
        if not ways or set(ways) & set(way_of(sample).split()):
            found.append(sample)

    note()
    random.Random(number).shuffle(found)
    return found


_POOL = 3_000


def search(cases: int, number: int, seconds: float, steps: int, ways: tuple[str, ...]) -> Tally:
    """Judge random samples until there are enough. steps: batches for each program."""
    tally, start = Tally(ways=ways), time.monotonic()
    for sample in drawn(number, ways):
        if tally.total >= cases or tally.seconds > seconds:
            break
        verdict = judge(with_more_steps(sample, steps))
        tally.add(sample, verdict)
        tally.seconds = time.monotonic() - start
        mark = "" if verdict.kind == "equal" else f"  {verdict.kind} {verdict.error}: {sample}"
        print(f"{tally.total} cases, {tally.seconds:.0f} s{mark}", flush=True)
    return tally


def write_failures(tally: Tally, out: Path) -> None:
    """One script for each kind of failure of each style."""
    seen = set()
    for sample, verdict in tally.failures:
        kind = style_of(sample), verdict.kind, verdict.error
        if kind in seen:
            continue
        seen.add(kind)
        path = out / f"fuzz_failure_{len(seen)}.py"
        small, found = shrunk(sample, verdict)
        path.write_text(script(small, found, str(path)))
        print(f"{verdict.kind} {verdict.error}: shrunk to {path}\n  {small}")


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.CRITICAL)


def main(cases: int = 200, seed: int = 0, seconds: float = float("inf"), steps: int = STEPS, out: Path = Path("."),
         write: bool = False, jobs: int = 1, ways: str = "") -> None:  # fmt: skip
    """Stops at as many cases or seconds. --steps: batches for each program. --jobs: so many processes, each with its
    share of the cases and a seed of its own, from --seed on. --ways "s3 dedup rows": only samples that have one of
    these, tallied by what they have. --write: also puts the tally into benchmarks/results/fuzz.md."""
    _quiet()
    of = tuple(ways.split())
    tally = Tally(ways=of)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
        for part in [pool.submit(search, cases // jobs, seed + job, seconds, steps, of) for job in range(jobs)]:
            tally.include(part.result())
    text = "\n".join(tally.lines())
    print(text)
    if write:
        header = HEADER.format(seed=seed, cases=cases, steps=steps, jobs=jobs, torch=torch.__version__)
        RESULT.write_text(header + text + "\n")
    write_failures(tally, out)
    raise typer.Exit(1 if tally.failures else 0)


HEADER = """# Differential fuzzing

`python benchmarks/fuzz.py --cases {cases} --seed {seed} --steps {steps} --jobs {jobs} --write`, torch {torch}, CPU.
Random layers (loops and einsums, router, body, widths, skewed routing), precision, mesh, chunks, all-to-all,
scheduler; the emitted program runs on threads, one per rank, and is compared with one eager copy per rank: outputs
and every gradient. fp32 within 1e-5 of the largest value; bf16 within four times the rounding error that eager makes
in bf16 (tests/support/fuzz.py). A program is compiled once and runs several batches and routings, each of which is a
case; what is refused is one case. void: eager itself cannot run it, or no batch was found that bf16 routes as fp32
does (NoBatch). rounding: beyond 1e-5 in fp32, though at most ten times that, and within 1e-10 in double precision.
refused
DivergenceError: ranks of which some have too few tokens for as many chunks.

"""

if __name__ == "__main__":
    typer.run(main)
