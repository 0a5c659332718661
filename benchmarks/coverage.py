"""Every MoE causal language model of transformers, compiled for two ranks and compared with itself on one device.

    python benchmarks/coverage.py                            all families; writes results/coverage.md and .json
    python benchmarks/coverage.py mixtral jamba              some; prints
    python benchmarks/coverage.py mixtral jamba --update     some; their rows of the results are new
    python benchmarks/coverage.py --mp                       the same on a mesh of mp=2; writes results/dense_tp.md
    python benchmarks/coverage.py --defaults                 as default configurations train; a list in coverage.md

Each family is a tiny random model (tests/support/families.py) with two MoE layers or more, all parameters redrawn. Two
gloo processes compile it with experts spread over them and run two steps, of equal and of unequal batches; outputs,
every gradient and every buffer must be those of two eager copies with averaged gradients, to 1e-5.

    equal      every MoE of the model was raised, and all numbers are equal
    rounding   raised; more than 1e-5 apart, but no more than 1e-5, twice as far as eager is, or as far as eager is in
               its worst tensor (1e-2 at most), from the same model in double precision; or to 1e-9 equal where both
               are in double precision
    by block   the MoEs were compiled one by one, since the model as a whole cannot be captured; all numbers are equal
    refused    moefx says why
    wrong      numbers differ
    broken     another error
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.support.families import MP2, dense_weights, families, try_family  # noqa: E402
from tests.support.family_defaults import fields, try_defaults  # noqa: E402
from tests.support.sharing import run_sharing  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
DENSE = RESULTS.with_name("dense_tp.json")
DEFAULTS = RESULTS.with_name("coverage_defaults.json")
Row = dict[str, Any]


def report(rows: dict[str, Row]) -> str:
    counts = Counter(row["verdict"] for row in rows.values())
    lines = [
        "# MoE families of transformers", "",
        f"Written by `python benchmarks/coverage.py`: transformers {transformers.__version__}, torch "
        f"{torch.__version__}. A row says at which commit it was measured.", "",
        __doc__.split("\n\n", 2)[2].strip(), "",
        f"{len(rows)} families: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}.", "",
        "Which of them ask the kernels of attention for their causal mask: [attention](attention.md).", "",
        "| family | MoE layers | verdict | seconds | commit |", "|---|---|---|---|---|",
        *(f"| {family} | {row['layers']} | {row['verdict']}{': ' + row['why'] if row['why'] else ''} | "
          f"{row['seconds']:.0f} | {row['commit']} |" for family, row in sorted(rows.items())), "",
    ]  # fmt: skip
    return "\n".join([*lines, *defaults(json.loads(DEFAULTS.read_text()) if DEFAULTS.exists() else {}, rows)])


def defaults(rows: dict[str, Row], others: dict[str, Row]) -> list[str]:
    """What families do in training with the noise, dropout and losses of their default configurations. others: of the
    table before."""
    drawing = sorted(family for family in families() if fields(family)[0])
    weighed = sorted(family for family in families() if fields(family)[1])
    missing = sorted({*drawing, *weighed} - rows.keys())
    found = Counter(row["verdict"] for row in rows.values())
    return [
        "## In training, as they come", "",
        "Written by `python benchmarks/coverage.py --defaults`: two steps on one rank in `train()`, with the noise and "
        "dropout of the default configuration and, where it weighs losses of routers, `output_router_logits=True`; "
        "outputs and every gradient are those of eager with the same seeds, to 1e-5. Measured at "
        f"{', '.join(sorted({row['commit'] for row in rows.values()}))}.", "",
        f"By default {', '.join(drawing)} of the {len(families())} families "
        f"draw{'s' if len(drawing) == 1 else ''} random numbers in training, and {len(weighed)} weigh losses of their "
        f"routers. Of these {len({*drawing, *weighed})}, {len(rows)} were tried: "
        f"{', '.join(f'{count} {verdict}' for verdict, count in found.most_common())}. The others do here what they "
        "do in the table above.", "",
        *(f"- {family}: {row['verdict']}, {row['why']} ({others[family]['verdict']} in the table above)"
          for family, row in sorted(rows.items()) if row["verdict"] != "equal"),
        *([f"- not tried: {', '.join(missing)}"] if missing else []), "",
    ]  # fmt: skip


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def try_all_defaults(names: list[str]) -> None:
    rows = json.loads(DEFAULTS.read_text()) if DEFAULTS.exists() else {}
    for family in names or [family for family in families() if any(fields(family))]:
        verdict, why = try_defaults(family)
        rows[family] = {"verdict": verdict, "why": why, "commit": commit()}
        print(f"{family}: {verdict} {why}", flush=True)
        DEFAULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        RESULTS.with_suffix(".md").write_text(report(json.loads(RESULTS.read_text())))


def report_dense(rows: dict[str, Row]) -> str:
    counts = Counter(row["verdict"] for row in rows.values())
    full = sum(row["share"] >= 0.9 for row in rows.values())
    lines = [
        "# Dense tensor parallelism of MoE families of transformers", "",
        f"Written by `python benchmarks/coverage.py --mp`: transformers {transformers.__version__}, torch "
        f"{torch.__version__}. Each family is a tiny random model on a mesh of mp=2, whose ranks (threads) read one "
        "batch; verdicts are those of [coverage.md](coverage.md), and in double precision, casts to single precision "
        "in the model's code are to double. The share is that of the weights of linear layers outside of experts, "
        "without router and head, that are cut, counted in the sizes of the family's default configuration. What is "
        "whole has its reason.", "",
        f"{len(rows)} families: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}. "
        f"{full} have 90 % or more of their dense weights cut.", "",
        "| family | verdict | cut | whole, and why | seconds | commit |", "|---|---|---|---|---|---|",
        *(f"| {family} | {row['verdict']}{': ' + row['why'] if row['why'] else ''} | {row['share']:.0%} | "
          f"{'; '.join(row['whole'])} | {row['seconds']:.0f} | {row['commit']} |"
          for family, row in sorted(rows.items())), "",
    ]  # fmt: skip
    return "\n".join(lines)


def share_of(family: str, cut: tuple[str, ...], whole: tuple[tuple[str, str], ...]) -> tuple[float, list[str]]:
    """How much of the dense weights is cut, and what is not."""
    sizes = dense_weights(family)
    reasons = dict(reversed(whole))  # the first program knows why
    missing = [name for name in sizes if name not in cut]
    total = sum(sizes.values())
    return sum(size for name, size in sizes.items() if name in cut) / total, [
        f"`{name.removeprefix('model.')}` {reasons.get(name, 'no product in the tiny model')}" for name in missing
        if sizes[name] >= 0.01 * total]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--update", action="store_true", help="put the families named into the results")
    parser.add_argument("--mp", action="store_true", help="on a mesh of mp=2")
    parser.add_argument("--defaults", action="store_true", help="in training, as default configurations are")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one family")
    parser.add_argument("--details", action="store_true", help="print whole errors")
    arguments = parser.parse_args()
    if arguments.defaults:
        try_all_defaults(arguments.families)
        return
    file, table = (DENSE, report_dense) if arguments.mp else (RESULTS, report)
    rows = json.loads(file.read_text()) if arguments.update else {}
    for family in arguments.families or families():
        start = time.perf_counter()
        how = {"layout": MP2, "run": run_sharing} if arguments.mp else {}
        each = try_family(family, arguments.timeout, **how)
        rows[family] = {"layers": each.layers, "verdict": each.verdict, "why": each.why,
                        "seconds": time.perf_counter() - start, "commit": commit()}  # fmt: skip
        if arguments.mp:
            rows[family]["share"], rows[family]["whole"] = share_of(family, each.cut, each.whole)
        print(f"{family}: {each.verdict} {each.details if arguments.details else each.why}", flush=True)
        if arguments.update or not arguments.families:
            file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            file.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
