"""Examples with others' trainers: each trains on two ranks, and its loss falls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("example", "most"), [("with_fabric", 1.5), ("with_lightning", 1.5), ("with_trl", 4.15)])
def test_it_learns_on_two_ranks(example: str, most: float, tmp_path: Path):
    script = ROOT / "examples" / f"{example}.py"
    said = run_script(script, "--folder", str(tmp_path / "run"), folder=tmp_path, timeout=900)
    losses = [float(loss) for line in re.findall(r"loss:? .*", said) for loss in re.findall(r"\d+\.\d+", line)]
    assert losses[-1] < most, losses  # of 64 numbers: 4.2 before any step
