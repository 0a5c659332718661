"""What tests cost: processor seconds of each, those of all processes that it starts among them. Walls of a machine that
others use say little.

    python -m pytest -p tools.seconds_of_tests --seconds after.tsv tests/gloo     a line for every test
    python tools/seconds_of_tests.py before.tsv after.tsv                         a table of the files that both have
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def used() -> float:
    """By this process and all below it, ended or not, since they began."""
    ticks, below = {}, defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # its own, and of children that it waited for
        below[int(fields[1])].append(int(folder.name))
    todo, total = [os.getpid()], 0
    while todo:
        process = todo.pop()
        total += ticks.get(process, 0)
        todo += below[process]
    return total / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=Path, metavar="FILE", help="what processor seconds of tests are added to")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = used()
    yield
    with open(item.config.getoption("--seconds"), "a") as out:
        out.write(f"{used() - before:.2f}\t{item.nodeid}\n")


def of_files(path: str) -> tuple[dict[str, float], dict[str, set[str]]]:
    """{file of tests: seconds}, {file of tests: its tests}"""
    seconds, tests = defaultdict(float), defaultdict(set)
    for line in Path(path).read_text().splitlines():
        value, name = line.split("\t")
        file = name.partition("::")[0]
        seconds[file] += float(value)
        tests[file].add(name)
    return seconds, tests


def main(before: str, after: str) -> None:
    (old, old_tests), (new, new_tests) = of_files(before), of_files(after)
    both = sorted(old.keys() & new.keys(), key=lambda file: new[file] - old[file])
    print("| file | before (s) | after (s) | tests before | tests after |\n|---|---|---|---|---|")
    for file in both:
        print(f"| {file} | {old[file]:.1f} | {new[file]:.1f} | {len(old_tests[file])} | {len(new_tests[file])} |")
    print(f"| all {len(both)} | {sum(old[file] for file in both):.0f} | {sum(new[file] for file in both):.0f} | "
          f"{sum(len(old_tests[file]) for file in both)} | {sum(len(new_tests[file]) for file in both)} |")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
