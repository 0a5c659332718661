"""Every MoE causal language model of transformers, compiled for two ranks and compared with itself on one device.

    python benchmarks/coverage.py                   all families; writes results/coverage.md
    python benchmarks/coverage.py mixtral jamba     some; prints
    python benchmarks/coverage.py --without doge    all others; writes results/coverage.md

Each family is a tiny random model (tests/support/families.py) with two MoE layers or more, all parameters redrawn. Two
gloo processes compile it with experts spread over them and run two steps, of equal and of unequal batches; outputs,
every gradient and every buffer must be those of two eager copies with averaged gradients, to 1e-5.

    equal      every MoE of the model was raised, and all numbers are equal
    rounding   raised; more than 1e-5 apart, but no more than 1e-5, or twice as far as eager is (1e-2 at most), from the
               same model in double precision
    by block   the MoEs were compiled one by one, since the model as a whole cannot be captured; all numbers are equal
    refused    moefx says why
    wrong      numbers differ
    broken     another error
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.support.families import Found, families, try_family  # noqa: E402


def report(found: dict[str, tuple[Found, float]]) -> str:
    counts = Counter(each.verdict for each, _ in found.values())
    lines = [
        "# MoE families of transformers", "",
        f"Written by `{' '.join(['python benchmarks/coverage.py', *sys.argv[1:]])}`, "
        f"{datetime.date.today().isoformat()}: transformers {transformers.__version__}, torch {torch.__version__}.", "",
        __doc__.split("\n\n", 2)[2].strip(), "",
        f"{len(found)} families: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}.", "",
        "| family | MoE layers | verdict | seconds |", "|---|---|---|---|",
        *(f"| {family} | {each.layers} | {each.verdict}{': ' + each.why if each.why else ''} | {seconds:.0f} |"
          for family, (each, seconds) in found.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--without", nargs="*", default=[], help="leave these out; the file says so")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one family")
    parser.add_argument("--details", action="store_true", help="print whole errors")
    arguments = parser.parse_args()
    found = {}
    for family in arguments.families or [each for each in families() if each not in arguments.without]:
        start = time.perf_counter()
        each = try_family(family, arguments.timeout)
        found[family] = each, time.perf_counter() - start
        print(f"{family}: {each.verdict} {each.details if arguments.details else each.why}", flush=True)
        if not arguments.families:
            (ROOT / "benchmarks" / "results" / "coverage.md").write_text(report(found))
    print(report(found))


if __name__ == "__main__":
    main()
