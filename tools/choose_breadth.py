"""Choose which costly tests the gate leaves to --full, and write tests/breadth.txt.

    pip install pytest-cov
    python tools/choose_breadth.py             runs all tests of one process under coverage (an hour), then chooses
    python tools/choose_breadth.py --from DIR  chooses from the data that an earlier run left in DIR

A test of a second or more is breadth if no line of moefx needs it. A line needs `--times` tests, one of them costly:
short tests compare what a pass writes, costly ones what a model computes. Where fewer run it, it needs all of them.
Costly tests are taken greedily, always the one that adds most lines for its time. Short tests stay, as do golden ones
and those that start processes, which are not measured.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "breadth.txt"
COSTLY_S = 1.0
HEAD = """# Tests that the gate leaves to --full: each line of moefx that they run is run by others of the gate, too.
# Written by tools/choose_breadth.py. A test that is renamed runs again.
"""


def measure(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rc").write_text(f"[run]\nsource = moefx\ndata_file = {folder / 'data'}\n")
    tests = ["tests", "--ignore", "tests/gloo", "--broad", "-n", "2", "--dist", "worksteal"]
    subprocess.run([sys.executable, "-m", "pytest", *tests, "--cov", "moefx", "--cov-context=test", "--cov-report=",
                    f"--cov-config={folder / 'rc'}", f"--junitxml={folder / 'times.xml'}"],
                   cwd=ROOT, check=False)  # fmt: skip


def lines_of(files: Iterable[Path]) -> dict[str, set[tuple[int, int]]]:
    """{test: (file, line) that it runs}"""
    from coverage.numbits import numbits_to_nums

    found, numbers = defaultdict(set), {}
    for file in files:
        with sqlite3.connect(file) as read:
            rows = read.execute("select context, path, numbits from line_bits join context on context.id = context_id "
                                "join file on file.id = file_id where context != ''")  # fmt: skip
            for context, path, bits in rows:
                number = numbers.setdefault(path, len(numbers))
                found[context.rpartition("|")[0]].update((number, line) for line in numbits_to_nums(bits))
    return found


def seconds_of(junit: Path) -> dict[str, float]:
    cases = ET.parse(junit).iter("testcase")
    return {f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": float(case.get("time"))
            for case in cases if case.find("skipped") is None}  # fmt: skip


def breadth(lines: Mapping[str, set], seconds: Mapping[str, float], times: int, stays: Iterable[str]) -> list[str]:
    """Costly tests of which no line needs them."""
    costly = {test for test, took in seconds.items() if took >= COSTLY_S and test in lines} - {*stays}
    runs = Counter(line for test in lines for line in lines[test])
    open_ = {line: min(times, count) for line, count in runs.items()}
    for test in lines.keys() - costly:
        for line in lines[test]:
            open_[line] -= 1
    for test in costly:
        for line in lines[test]:
            open_[line] = max(1, open_[line])
    needed = {line for line, count in open_.items() if count > 0}
    left = {test: lines[test] & needed for test in costly}
    heap = [(-len(left[test]) / seconds[test], test) for test in left]
    heapq.heapify(heap)
    while heap:
        worth, test = heapq.heappop(heap)
        still = {line for line in left[test] if open_[line] > 0}
        if not still:
            continue
        now = -len(still) / seconds[test]
        if now > worth:  # others have taken some of its lines since
            left[test] = still
            heapq.heappush(heap, (now, test))
            continue
        costly.discard(test)
        for line in still:
            open_[line] -= 1
    return sorted(costly)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, help="data.db and times.xml of an earlier run")
    parser.add_argument("--times", type=int, default=2)
    given = parser.parse_args()
    folder = given.folder or ROOT / "build" / "breadth"
    if given.folder is None:
        measure(folder)
    lines, seconds = lines_of(folder.glob("data*")), seconds_of(folder / "times.xml")
    starting = starters()
    stays = [test for test in seconds if "golden" in test.lower() or test.partition("[")[0] in starting]
    found = breadth(lines, seconds, given.times, stays)
    LIST.write_text(HEAD + "".join(f"{test}\n" for test in found), encoding="utf-8")
    print(f"{len(found)} of {len(seconds)} tests are breadth: {sum(seconds[test] for test in found):.0f} of "
          f"{sum(seconds.values()):.0f} s")  # fmt: skip


def starters() -> set[str]:
    """Tests that start processes, by themselves or by other functions of their file."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        words = {node.name: {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} for node in functions}
        starting, more = {"run_ranks", "subprocess", "mp"}, True
        while more:
            more = {name for name, used in words.items() if used & starting} - starting
            starting |= more
        found |= {f"{path.relative_to(ROOT)}::{name}" for name in starting & words.keys()}
    return found


if __name__ == "__main__":
    main()
