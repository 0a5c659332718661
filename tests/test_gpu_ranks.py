"""benchmarks/gpu_ranks.py, which wants a GPU, on gloo: a case, a rank that is lost, and going on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks/gpu_ranks.py"


def run(out: Path, *more: str) -> list[dict]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--steps", "1", "--seconds", "200",
               "--out", str(out), *more]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def test_cases_run_on_gloo_and_once(tmp_path):
    out = tmp_path / "found.json"
    parity, lost = run(out, "--only", "direct", "killed")
    assert (parity["case"], parity["status"], lost["case"], lost["status"]) == ("direct", "passed", "killed", "passed")
    assert 0 < parity["error"] < 1e-5
    assert run(out, "--only", "direct", "killed") == [parity, lost]
    none = run(out, "--only", "direct", "killed", "2dh", "--budget", "0")
    assert none[:2] == [parity, lost]
    assert (none[2]["status"], none[2]["said"]) == ("not run", "no time was left; start again")
    assert "| 2dh | 2 | not run |" in out.with_suffix(".md").read_text()
