"""benchmarks/gpu.py, which wants a GPU, on CPU: pieces run once, one that dies takes nothing with it, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"


def run(folder: Path, *pieces: str, seconds: int = 1000) -> dict:
    command = [sys.executable, SCRIPT, "--out", folder, "--seconds", str(seconds), "--patience", "1000",
               "--only", *pieces]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "gpu.json").read_text())


def test_pieces_run_once_and_failures_are_told(tmp_path):
    first = run(tmp_path, "facts", "copy", "timed kernels", "step grouped_mm", "no such piece")
    assert [each["status"] for each in first.values()] == ["done"] * 4 + ["failed"]
    page = (tmp_path / "gpu.md").read_text()
    assert "- no such piece: failed, KeyError" in page
    assert "| combine_backward | " in page
    assert "| grouped_mm | " in page
    again = run(tmp_path, "facts", "copy", seconds=0)
    assert again == {name: each for name, each in first.items() if name != "no such piece"}


@pytest.mark.full
def test_all_pieces_but_torch_compile(tmp_path):
    found = run(tmp_path, "right kernels", "products", "layers", "overlap", "step moefx", "step eager", "right moefx")
    assert {each["status"] for each in found.values()} == {"done"}
    page = (tmp_path / "gpu.md").read_text()
    assert "WRONG" not in page
    assert page.count("| right |") > 30
