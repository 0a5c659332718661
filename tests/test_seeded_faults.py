"""Faults that benchmarks/seeded_faults.py puts into the code: the same ones every time, each in one place."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCE = '''"""1 + 1"""
def one(a: int, b=3) -> "x":
    if not a == b and b:
        result.changed(f"{a + 1} of {b}")
        items.append(a - b)
    elif a:
        raise ValueError(a + 1)
    return "text" + a
'''


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("fault_sites", "seeded_faults"):
        sys.modules.pop(name, None)


def test_every_site_of_a_file_is_one_change_of_its_line():
    from fault_sites import faults_of

    lines = SOURCE.splitlines()
    found = [(fault.line, fault.kind, SOURCE[fault.start : fault.end], fault.text) for fault in faults_of("a", SOURCE)]
    assert found == [
        (2, "number", "3", "(4)"),
        (3, "negation", "not a == b", "(a == b)"),
        (3, "condition", "not a == b and b", "(True)"),
        (3, "connective", "not a == b and b", "(not a == b or b)"),
        (3, "comparison", "a == b", "(a != b)"),
        (5, "call", "items.append(a - b)", "pass"),
        (5, "sign", "a - b", "(a + b)"),
        (6, "condition", "a", "(True)"),
    ]
    for fault in faults_of("a", SOURCE):
        changed = fault.applied(SOURCE).splitlines()
        assert [n for n, (old, new) in enumerate(zip(lines, changed, strict=True), 1) if old != new] == [fault.line]


def test_the_chosen_faults_are_always_the_same_and_change_one_place_each():
    from fault_sites import chosen

    faults = chosen(40)
    assert faults == chosen(40)
    assert faults[:20] == chosen(20)
    assert len({fault.file for fault in faults}) == 40
    for fault in faults:
        source = (ROOT / fault.file).read_text()
        changed = fault.applied(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert changed.startswith(source[: fault.start])
        assert changed.endswith(source[fault.end :])
        assert source[: fault.start].count("\n") + 1 >= fault.line


def test_the_nearest_tests_run_first_and_every_test_once():
    from fault_sites import Fault
    from seeded_faults import READ_CODE, stages

    (_, near), *others = stages(Fault("moefx/passes/chunk.py", 1, "", 0, 0, "", ""))
    assert near[0] == "tests/passes/test_chunk.py"
    assert [stage for stage, _ in others] == ["next", "broad", "rest"]
    every = [*near, *(file for _, files in others for file in files)]
    assert len(every) == len(set(every)) == len(list(ROOT.glob("tests/**/test_*.py"))) - len(READ_CODE)


def test_a_fault_stands_in_the_copy_while_tests_run_and_no_longer(tmp_path, monkeypatch):
    import seeded_faults
    from fault_sites import Fault

    (tmp_path / "a.py").write_text("x = 1\n")
    seen = []

    def failing(tree, files, limit):
        seen.append((tree / "a.py").read_text())
        return "test_two" if len(seen) == 2 else None

    monkeypatch.setattr(seeded_faults, "failing", failing)
    monkeypatch.setattr(seeded_faults, "stages", lambda fault: [("nearest", ["a"]), ("broad", ["b"]), ("rest", ["c"])])
    row = seeded_faults.hunt(Fault("a.py", 1, "number", 4, 5, "(2)", "x = 1"), tmp_path, 60)
    assert seen == ["x = (2)\n"] * 2
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    assert (row["stage"], row["test"]) == ("broad", "test_two")
