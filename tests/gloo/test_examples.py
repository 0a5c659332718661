"""Examples with tools that the gate does not install: each trains on two ranks, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize(("example", "tool", "most"), [
    ("with_fabric", "lightning", 1.5), ("with_lightning", "lightning", 1.5), ("with_trl", "trl", 4.15),
])  # fmt: skip
def test_it_learns_on_two_ranks(example: str, tool: str, most: float, tmp_path: Path):
    pytest.importorskip(tool, reason=f"{tool} is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples" / f"{example}.py"), "--folder", str(tmp_path / "run")]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                         text=True, timeout=900, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for line in re.findall(r"loss:? .*", ran.stdout) for loss in re.findall(r"\d+\.\d+", line)]
    assert losses[-1] < most, losses  # of 64 numbers: 4.2 before any step
