"""benchmarks/gpu_ranks.py, which wants a GPU, on gloo: a case, a rank that is lost, and going on where it was."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch):
    """The script's main function, in this process: it makes processes for its ranks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("gpu_ranks")

    def run(out: Path, *more: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["gpu_ranks.py", "--device", "cpu", "--ranks", "2", "--steps", "1",
                                          "--seconds", "200", "--out", str(out), *more])  # fmt: skip
        script.main()
        return json.loads(out.read_text())

    return run


def test_cases_run_on_gloo_and_once(run, tmp_path):
    out = tmp_path / "found.json"
    parity, lost = run(out, "--only", "direct", "killed")
    assert (parity["case"], parity["status"], lost["case"], lost["status"]) == ("direct", "passed", "killed", "passed")
    assert 0 < parity["error"] < 1e-5
    assert run(out, "--only", "direct", "killed") == [parity, lost]
    none = run(out, "--only", "direct", "killed", "2dh", "--budget", "0")
    assert none[:2] == [parity, lost]
    assert (none[2]["status"], none[2]["said"]) == ("not run", "no time was left; start again")
    assert "| 2dh | 2 | not run |" in out.with_suffix(".md").read_text()
