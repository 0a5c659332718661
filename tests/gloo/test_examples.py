"""Examples with others' trainers: each trains on two ranks, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("example", "most"), [("with_fabric", 1.5), ("with_lightning", 1.5), ("with_trl", 4.15)])
def test_it_learns_on_two_ranks(example: str, most: float, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples" / f"{example}.py"), "--folder", str(tmp_path / "run")]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                         text=True, timeout=900, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for line in re.findall(r"loss:? .*", ran.stdout) for loss in re.findall(r"\d+\.\d+", line)]
    assert losses[-1] < most, losses  # of 64 numbers: 4.2 before any step
