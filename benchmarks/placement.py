"""Plans of placement over 1,000 skewed routings: how even ranks are, with how many copies, and how fast that is found.

    python benchmarks/placement.py [--out benchmarks/results/placement.md]

Routings are those of tests/support/skews.py: 2 to 8 ranks, 1 to 64 experts, zipf 0 to 2.5, all to one expert or rank,
none, unequal batches, homes that differ in number. Optima are maximum flows (networkx) over the same copies; the fewest
copies are a bound: n less the most groups of ranks that are even among themselves, over all partitions. What any shares
leave is a bound, too (`skews.least_mean`), over 100 draws of each routing's errors. Milliseconds are processor time of
the thread, the least of 21 calls: other work on the machine does not count, though it slows all of them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moefx.features.exact import calibration
from moefx.placement import decide, exact, tables
from moefx.placement.loads import Window
from moefx.placement.score import Costs
from tests.support.skews import Skew, fewest_copies, least_cap, least_caps, least_mean, skews, traces, zipf

COSTS = Costs(row=1e-6, row_bytes=1e3, expert_bytes=5e4, gradient_bytes=1e5, byte=(1e-9, 4e-9), message=(1e-6, 1e-6),
              hidden=(1e-4, 2e-4))  # fmt: skip


def over(rows: float, other: float) -> float:
    """1 where there are no rows at all."""
    return rows / other if other else 1.0


def planned(case: Skew) -> tuple[np.ndarray, np.ndarray]:
    """By `exact`: (rows of every rank [n], who has which expert [E, n])."""
    slots, quota = exact.plan(case.loads, case.owners, case.slots)
    ranks, cap, valid = len(case.loads), sum(case.slots), slots >= 0
    rows, held = np.zeros(ranks, dtype=int), np.zeros((len(slots), ranks), dtype=bool)
    np.add.at(rows, slots[valid] // cap, quota.sum(0)[valid])
    held[np.nonzero(valid)[0], slots[valid] // cap] = True
    return rows, held


def is_even(rows: np.ndarray) -> bool:
    return rows.max() - rows.min() <= 1


def exactly(case: Skew) -> tuple[float, float, int, int]:
    """Of a plan by `exact`: busiest over mean; over the optimum of the same copies; copies; the bound of them, or -1
    where ranks are not even."""
    rows, held = planned(case)
    best = rows.max() if is_even(rows) else least_cap(case.loads.sum(0), held, int(rows.max()))
    bound = fewest_copies(case.homes) if is_even(rows) else -1
    return over(rows.max(), rows.mean()), over(rows.max(), best), int(held.sum()) - len(held), bound


def by_shares(case: Skew, error: float, rng: np.random.Generator) -> tuple[float, float]:
    """Of the policy "balanced", with loads that come out otherwise by expert: busiest over the optimum of the same
    copies, and over the mean."""
    plan, cap = decide.plan("balanced", case.loads, case.owners, case.slots), sum(case.slots)
    real = np.maximum(np.rint(case.loads * (1 + error * rng.standard_normal(len(case.owners)))), 0).astype(np.int64)
    rows = plan.traffic(real, cap).sum(0)
    best = least_cap(real.sum(0), plan.held(len(rows), cap), int(rows.max()))
    return over(rows.max(), best), over(rows.max(), rows.mean())


def by_any_shares(case: Skew, error: float, rng: np.random.Generator) -> tuple[float, float]:
    """Busiest over the optimum of the same copies, in the mean of 100 errors: of the policy "balanced", and what no
    other shares of these copies can beat, even those made for just these errors."""
    plan, cap, totals = decide.plan("balanced", case.loads, case.owners, case.slots), sum(case.slots), case.loads.sum(0)
    real = np.maximum(totals * (1 + error * rng.standard_normal((100, len(totals)))), 1e-6)
    held, valid = plan.held(len(case.loads), cap), plan.slots >= 0
    parts = (np.diff(plan.ends, axis=2, prepend=0) * case.loads[:, :, None]).sum(0) / np.maximum(totals, 1)[:, None]
    shares = np.zeros(held.shape)
    shares[np.nonzero(valid)[0], plan.slots[valid] // cap] = parts[valid] / (1 << tables.BITS)
    shares[totals == 0, np.array(case.owners)[totals == 0]] = 1.0
    return float(((real @ shares).max(1) / least_caps(real, held)).mean()), least_mean(real, held)


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} | {np.quantile(values, 0.95):.3f} | {max(values):.3f}"


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(21):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


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
    bounds, draws = [], np.random.default_rng(4)
    for error in (0.0, 0.03, 0.1, 0.3):
        pairs = [by_shares(case, error, rng) for case in skews(0, number)]
        lines.append(f"| {error:.0%} | {spread([one for one, _ in pairs])} | {spread([other for _, other in pairs])} |")
        if error:
            found = np.mean([by_any_shares(case, error, draws) for case in skews(0, number)], axis=0)
            bounds.append(f"| {error:.0%} | {found[0]:.4f} | {found[1]:.4f} |")
    lines += ["", "Busiest over the optimum of the same copies, in the mean of 100 errors of each routing:", "",
              "| error of the forecast | `balanced` | no shares of the copies are below |", "|---" * 3 + "|",
              *bounds]  # fmt: skip
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
        policies = (*decide.policies()[1:], "exact", "calibrated")
        lines += [f"| experts of {50 * size:,} rows: loads | {' | '.join(policies)} |", "|---" * 6 + "|"]
        for name, (drift, jump) in kinds.items():
            window, waiting, found = Window(), [], []
            for loads in traces(np.random.default_rng(3), 31, drift, jump):
                if len(waiting) > 6:
                    case = waiting[-2], loads, owners, (2, 2), costs, 2
                    found.append({**decide.weighed(*case), "calibrated": calibration.seconds(*case)})
                window.add(loads)
                waiting.append(window.mean())
            sums = {policy: sum(each[policy] for each in found) for policy in found[0]}
            cells = (f"{sums[policy] / sums['none']:.2f}" for policy in policies)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def time_table() -> list[str]:
    lines = ["", "## Milliseconds of one core to decide, zipf 1.2, 2 spare slots, least of 21", "",
             "| ranks | experts | exact | calibrated: loads as expected | others | hecate | balanced | auto |",
             "|---" * 8 + "|"]  # fmt: skip
    rng = np.random.default_rng(2)
    for ranks, experts in ((8, 16), (8, 64), (32, 64), (32, 256)):
        loads, owners = zipf(rng, ranks, experts, 4096, 1.2), tables.contiguous(experts, ranks)
        slots = (experts // ranks, 2)
        before = calibration.forecast(loads, owners, slots, COSTS, 4).slots
        calls = [lambda: exact.plan(loads, owners, slots, 8)]  # noqa: B023
        calls += [lambda real=real: calibration.plan(real, before, slots, 4, COSTS)  # noqa: B023
                  for real in (loads, rng.permutation(loads, axis=1))]  # fmt: skip
        calls += [lambda policy=policy: decide.plan(policy, loads, owners, slots, COSTS, 4)  # noqa: B023
                  for policy in ("hecate", "balanced", "auto")]  # fmt: skip
        lines.append(f"| {ranks} | {experts} | " + " | ".join(f"{milliseconds(call):.1f}" for call in calls) + " |")
    return lines


def crowded(rng: np.random.Generator, ranks: int, experts: int) -> Iterator[Skew]:
    """Routings for which spare slots are often too few: rows for the experts of one or two ranks alone, homes that are
    drawn, and experts that live in the order of their rows."""
    for spare, s, kind in itertools.product((1, 2, 3), (0.0, 0.3, 0.8, 1.2), ("one", "two", "drawn", "sorted")):
        loads, owners = zipf(rng, ranks, experts, 4096, s), np.array(tables.contiguous(experts, ranks))
        if kind == "drawn":
            owners = rng.integers(0, ranks, experts)
        elif kind == "sorted":
            loads = loads[:, np.argsort(-loads.sum(0), kind="stable")]
        else:
            loads = loads * (owners < ("one", "two").index(kind) + 1)
        yield Skew(kind, loads, tuple(owners.tolist()), (int(np.bincount(owners).max()), spare))


def crowded_table() -> list[str]:
    lines = ["", "## The same of `exact` where 1 to 3 spare slots are too few for even ranks", "",
             "| ranks | experts | routings | median | largest |", "|---" * 5 + "|"]  # fmt: skip
    for ranks, experts in ((8, 64), (32, 256)):
        cases = [case for case in crowded(np.random.default_rng(3), ranks, experts) if not is_even(planned(case)[0])]
        found = [milliseconds(lambda case=case: exact.plan(case.loads, case.owners, case.slots, 8)) for case in cases]
        lines.append(f"| {ranks} | {experts} | {len(found)} | {np.median(found):.1f} | {max(found):.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "placement.md")
    given = parser.parse_args()
    text = "\n".join(["# Placement over skewed routings", "",
                      "Made by `python benchmarks/placement.py`, whose docstring says how.", "",
                      *balance_tables(given.number), *policy_table(), *time_table(), *crowded_table(), ""])  # fmt: skip
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
