"""The worked example of what users register runs and agrees with the built-in ways."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extensions.py"
AGREES = ("scheduler  differs from the built-in by 0.0e+00", "all-to-all differs from the built-in by 0.0e+00",
          "codec      differs from the built-in by ", "kernel     differs from the built-in by ")  # fmt: skip


def _said(rank: int, world: int) -> str:
    """What the example prints in a group that stands already."""
    given = {name: mock.DEFAULT for name in ("init_process_group", "destroy_process_group")}
    with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.multiple(dist, **given):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_the_example_agrees_with_the_built_in_ways():
    said = run_ranks(2, _said)[0]
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
