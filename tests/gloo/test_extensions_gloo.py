"""The worked example of what users register runs and agrees with the built-in ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extensions.py"
AGREES = ("scheduler  differs from the built-in by 0.0e+00", "all-to-all differs from the built-in by 0.0e+00",
          "codec      differs from the built-in by ", "kernel     differs from the built-in by ")  # fmt: skip


def test_the_example_agrees_with_the_built_in_ways(tmp_path):
    said = run_script(EXAMPLE, folder=tmp_path)
    assert [what for what in AGREES if what not in said] == []


@pytest.mark.full
def test_the_example_runs_by_torchrun():
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert [what for what in AGREES if what not in run.stdout] == []
