"""Plans of placement over 1,000 skewed routings: how even ranks are, with how many copies, and how fast that is found.

    python benchmarks/placement.py [--out benchmarks/results/placement.md]

Routings are those of tests/support/skews.py: 2 to 8 ranks, 1 to 64 experts, zipf 0 to 2.5, all to one expert or rank,
none, unequal batches, homes that differ in number. Optima are maximum flows (networkx) over the same copies; the fewest
copies are a bound: n less the most groups of ranks that are even among themselves, over all partitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moefx.placement import decide, exact, tables
from moefx.placement.loads import Window
from moefx.placement.score import Costs
from tests.support.skews import Skew, fewest_copies, least_cap, skews, traces, zipf

COSTS = Costs(row=1e-6, row_bytes=1e3, expert_bytes=5e4, gradient_bytes=1e5, byte=(1e-9, 4e-9), message=(1e-6, 1e-6),
              hidden=(1e-4, 2e-4))  # fmt: skip


def over(rows: float, other: float) -> float:
    """1 where there are no rows at all."""
    return rows / other if other else 1.0


def exactly(case: Skew) -> tuple[float, float, int, int]:
    """Of a plan by `exact`: busiest over mean; over the optimum of the same copies; copies; the bound of them, or -1
    where ranks are not even."""
    slots, quota = exact.plan(case.loads, case.owners, case.slots)
    ranks, cap, valid = len(case.loads), sum(case.slots), slots >= 0
    rows, held = np.zeros(ranks, dtype=int), np.zeros((len(slots), ranks), dtype=bool)
    np.add.at(rows, slots[valid] // cap, quota.sum(0)[valid])
    held[np.nonzero(valid)[0], slots[valid] // cap] = True
    is_even = rows.max() - rows.min() <= 1
    best = rows.max() if is_even else least_cap(case.loads.sum(0), held, int(rows.max()))
    copies = int(valid[:, 1:].sum())
    bound = fewest_copies(case.homes) if is_even else -1
    return over(rows.max(), rows.mean()), over(rows.max(), best), copies, bound


def by_shares(case: Skew, error: float, rng: np.random.Generator) -> tuple[float, float]:
    """Of the policy "balanced", with loads that come out otherwise by expert: busiest over the optimum of the same
    copies, and over the mean."""
    plan, cap = decide.plan("balanced", case.loads, case.owners, case.slots), sum(case.slots)
    real = np.maximum(np.rint(case.loads * (1 + error * rng.standard_normal(len(case.owners)))), 0).astype(np.int64)
    rows = plan.traffic(real, cap).sum(0)
    best = least_cap(real.sum(0), plan.held(len(rows), cap), int(rows.max()))
    return over(rows.max(), best), over(rows.max(), rows.mean())


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} | {np.quantile(values, 0.95):.3f} | {max(values):.3f}"


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(21):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * float(np.median(times))


def balance_tables(number: int) -> list[str]:
    rng = np.random.default_rng(1)
    found = [exactly(case) for case in skews(0, number)]
    even = [(copies, least) for *_, copies, least in found if least >= 0]
    others = [(mean, best) for mean, best, _, least in found if least < 0]
    times = sum(copies for copies, _ in even) / sum(least for _, least in even)
    most = sum(copies > 1.1 * least for copies, least in even)
    lines = [
        f"## `exact`, {number:,} routings", "",
        f"* {len(even)} end with ranks that are even to within one row. They take {times:.3f} times as many copies as "
        f"the bound; {most} of them take more than 1.1 times, since experts are smaller than what is to be moved.",
        f"* In {len(others)} the spare slots are too few for experts this small: the busiest rank has up to "
        f"{max(mean for mean, _ in others):.2f} times the mean, and at most {max(best for _, best in others):.3f} "
        "times the optimum of the same copies.", "",
        f"## `balanced`, {number:,} routings", "",
        "| error of the forecast, by expert | busiest over the optimum of the same copies: mean | 95 % | largest | "
        "over the mean rank: mean | 95 % | largest |", "|---" * 7 + "|",
    ]  # fmt: skip
    for error in (0.0, 0.03, 0.1, 0.3):
        pairs = [by_shares(case, error, rng) for case in skews(0, number)]
        lines.append(f"| {error:.0%} | {spread([one for one, _ in pairs])} | {spread([other for _, other in pairs])} |")
    return lines


def policy_table() -> list[str]:
    """Seconds over those of no copies, planned from five steps, the last of them two steps old."""
    lines = ["", "## Seconds by the score, over those without copies", "",
             "8 ranks on 4 nodes, 16 experts, 2 spare slots; mean of 24 steps. A row takes 1 us to compute and 1 or 4 "
             "to send, within and between nodes; 2 ms of the forward and 4 ms of the backward hide copies.",
             ""]  # fmt: skip
    owners = tables.contiguous(16, 8)
    kinds = {"steady": (0, 0), "drifts": (0.05, 0), "drifts, and jumps every 8 steps": (0.05, 8),
             "another every step": (0, 1)}  # fmt: skip
    for size in (1, 20):
        costs = replace(COSTS, expert_bytes=size * COSTS.expert_bytes, gradient_bytes=size * COSTS.gradient_bytes,
                        hidden=(2e-3, 4e-3))  # fmt: skip
        lines += [f"| experts of {50 * size:,} rows: loads | " + " | ".join((*decide.POLICIES[1:], "exact")) + " |",
                  "|---" * 5 + "|"]  # fmt: skip
        for name, (drift, jump) in kinds.items():
            window, waiting, found = Window(), [], []
            for loads in traces(np.random.default_rng(3), 31, drift, jump):
                if len(waiting) > 6:
                    found.append(decide.weighed(waiting[-2], loads, owners, (2, 2), costs, 2))
                window.add(loads)
                waiting.append(window.mean())
            sums = {policy: sum(each[policy] for each in found) for policy in found[0]}
            cells = (f"{sums[policy] / sums['none']:.2f}" for policy in (*decide.POLICIES[1:], "exact"))
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def time_table() -> list[str]:
    lines = ["", "## Milliseconds of one core to decide, zipf 1.2, 2 spare slots, median of 21", "",
             "| ranks | experts | exact | hecate | balanced | auto |", "|---" * 6 + "|"]  # fmt: skip
    rng = np.random.default_rng(2)
    for ranks, experts in ((8, 16), (8, 64), (32, 64), (32, 256)):
        loads, owners = zipf(rng, ranks, experts, 4096, 1.2), tables.contiguous(experts, ranks)
        slots = (experts // ranks, 2)
        calls = [lambda: exact.plan(loads, owners, slots, 8)]  # noqa: B023
        calls += [lambda policy=policy: decide.plan(policy, loads, owners, slots, COSTS, 4)  # noqa: B023
                  for policy in ("hecate", "balanced", "auto")]  # fmt: skip
        lines.append(f"| {ranks} | {experts} | " + " | ".join(f"{milliseconds(call):.1f}" for call in calls) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "placement.md")
    given = parser.parse_args()
    text = "\n".join(["# Placement over skewed routings", "",
                      "Made by `python benchmarks/placement.py`, whose docstring says how.", "",
                      *balance_tables(given.number), *policy_table(), *time_table(), ""])  # fmt: skip
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
