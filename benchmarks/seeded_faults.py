"""Which test of the gate finds each of 40 faults that a rule puts into passes and runtime.

    python benchmarks/seeded_faults.py                       all; writes results/seeded_faults.md and .json
    python benchmarks/seeded_faults.py --only chunk order    some files; prints
    python benchmarks/seeded_faults.py --again               those that no test has found; the others' rows stay
    python benchmarks/seeded_faults.py --again --full        the same with the tests that need --full
    python benchmarks/seeded_faults.py --list                the faults alone

fault_sites.py reads all faults that its rule knows off the syntax trees, among them comparisons turned round, numbers
one greater and calls left out. They are ordered by the sha256 of file, line and kind, and the first 40 are taken, one
of a file at most: nobody chooses.

Each fault stands alone in a copy of the tree. The tests that are nearest run first, up to the first failure: the file
of the module's name, then those that import the module or name the pass, then those that do so with a module that
imports it, then broad ones, then all others. A test that
takes longer than five minutes counts as failed (a fault may well make a loop endless). Left out are tests that read
code and do not run it.

    nearest    found by a test that names the module
    next       found by a test that names a module which imports it
    broad      found by a test of the whole compiler
    rest       found by another test
    full       found only by a test that needs --full
    none       found by no test within the limit of time
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fault_sites import ROOT, Fault, chosen

RESULTS = ROOT / "benchmarks" / "results" / "seeded_faults.json"
COUNT = 40
TEST_S = 300
BROAD = ("tests/test_any_layer.py", "tests/test_fuzz.py", "tests/test_parity.py", "tests/gloo/test_parity.py",
         "tests/gloo/test_parameters_gloo.py", "tests/test_styles.py")  # fmt: skip
READ_CODE = ("tests/test_architecture.py",)


def stages(fault: Fault) -> list[tuple[str, list[str]]]:
    """Test files to run, nearest first."""
    _, place, name = Path(fault.file).with_suffix("").parts
    own = f"tests/{place}/test_{name}.py"
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("tests/**/test_*.py"))}
    code = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "moefx").rglob("*.py"))}
    its = naming([fault.file])
    theirs = naming([file for file, text in code.items() if file != fault.file and its.search(text)])
    left = [file for file in tests if file not in READ_CODE]
    found = []
    for stage, asked in (
        ("nearest", lambda file: file == own or its.search(tests[file])),
        ("next", lambda file: theirs.search(tests[file])),
        ("broad", BROAD.__contains__), ("rest", lambda file: True),
    ):  # fmt: skip
        those = sorted(filter(asked, left), key=lambda file: (file != own, f"/{place}/" not in file, "gloo" in file))
        found.append((stage, those))
        left = [file for file in left if file not in those]
    return found


def naming(files: list[str]) -> re.Pattern[str]:
    """What says that code is about the modules of these files of moefx."""
    words = []
    for file in files:
        *_, place, name = Path(file).with_suffix("").parts
        words += [rf"\b{place}\.{name}\b", rf"\b{place} import (?:\w+, )*{name}\b"]
        words += [f'"{name.replace("_", "-")}"'] if place == "passes" else []
    return re.compile("|".join(words) or "(?!)")


def hunt(fault: Fault, tree: Path, limit: float, *options: str) -> dict[str, Any]:
    """The row of one fault: which test finds it first, and in how many seconds. tree: a copy to spoil."""
    path = tree / fault.file
    source = path.read_text()
    begin = time.monotonic()
    row = {**asdict(fault), "stage": "none", "test": "", "seconds": 0.0}
    try:
        write(path, fault.applied(source))
        for stage, files in stages(fault):
            left = limit - (time.monotonic() - begin)
            if files and left > 0 and (test := failing(tree, files, left, *options)):
                row |= {"stage": stage, "test": test}
                break
    finally:
        write(path, source)
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def write(path: Path, source: str) -> None:
    """Two versions of a file may be alike in size and time, by which Python knows whether it compiled them."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def failing(tree: Path, files: list[str], limit: float, *options: str) -> str | None:
    """The first test of `files` that fails, or None, as if `limit` seconds are over."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-o", f"timeout={TEST_S}", *options, *files]
    env = {**os.environ, "PYTHONPATH": str(tree), "MOEFX_CACHE": "off"}
    with tempfile.TemporaryFile("w+") as out:
        tests = subprocess.Popen(command, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = tests.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)  # ranks, too
            tests.wait()
        out.seek(0)
        named = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", out.read(), re.MULTILINE)
    if code in (0, 5):  # passed, or none was selected
        return None
    return named[0] if named else f"{files[0]}: exit code {code}"


def report(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["stage"] for row in rows)
    lines = [
        "# Seeded faults", "", f"Written by `python benchmarks/seeded_faults.py` at {commit()}.", "",
        __doc__.split("\n\n", 2)[2].strip(), "",
        f"{len(rows)} faults: {', '.join(f'{count} {stage}' for stage, count in counts.most_common())}.", "",
        "| place | kind | line | stage | found by | seconds |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: row["file"]):
        source, why = (row[name].replace("|", "\\|") for name in ("source", "test"))
        lines.append(f"| {row['file']}:{row['line']} | {row['kind']} | `{source}` | {row['stage']} | "
                     f"{why or row.get('why', '')} | {row['seconds']:.0f} |")  # fmt: skip
    return "\n".join([*lines, ""])


def commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True).stdout.strip()


def copied(folder: str) -> Path:
    """The tree as git knows it, in a new folder below `folder`."""
    tree = Path(tempfile.mkdtemp(dir=folder))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    for name in listed.splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def hunt_all(faults: list[Fault], jobs: int, limit: float, *options: str) -> Iterator[dict[str, Any]]:
    """Rows as they come; `jobs` faults at a time, each in a tree of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for _ in range(jobs):
            trees.put(copied(folder))

        def one(fault: Fault) -> dict[str, Any]:
            tree = trees.get()
            try:
                return hunt(fault, tree, limit, *options)
            finally:
                trees.put(tree)

        for done in as_completed([pool.submit(one, fault) for fault in faults]):
            yield done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODULE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of one fault")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time")
    options = parser.parse_args()
    faults = chosen(COUNT)
    old = {row["file"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    if options.only:
        faults = [fault for fault in faults if Path(fault.file).stem in options.only]
    if options.again:
        faults = [fault for fault in faults if old.get(fault.file, {"stage": "none"})["stage"] == "none"]
        faults.sort(key=lambda fault: fault.file in old)  # first those that were not tried yet
    if options.list:
        print(*(f"{fault.file}:{fault.line} {fault.kind}: {fault.source}" for fault in faults), sep="\n")
        return
    rows = {fault.file: old[fault.file] for fault in chosen(COUNT) if options.again and fault.file in old}
    for row in hunt_all(faults, options.jobs, options.limit, *(["--full"] if options.full else [])):
        if options.full and row["stage"] != "none":
            row["stage"] = "full"
        print(f"{row['file']}:{row['line']}", row["kind"], row["stage"], row["test"], row["seconds"], flush=True)
        rows[row["file"]] = row | {"why": old.get(row["file"], {}).get("why", "")}
        if not options.only:
            RESULTS.write_text(json.dumps([rows[file] for file in sorted(rows)], indent=1) + "\n")
            RESULTS.with_suffix(".md").write_text(report(list(rows.values())))


if __name__ == "__main__":
    main()
