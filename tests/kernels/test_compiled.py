"""Kernels compile for GPUs that are not here: no register spills, rows move in pieces of 16 bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/compiled_kernels.py"
NAMES = ("route", "dispatch", "dispatch_padded", "combine", "combine_backward", "expert_rows", "expert_rows_backward",
         "finish_rows", "glu", "glu_clamped", "glu_backward", "grouped_linear", "grouped_wgrad", "layer forward",
         "layer backward")  # fmt: skip


def compiled(tmp_path: Path, *more: str) -> list[dict]:
    """The script runs in a process of its own: here Triton interprets."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT, *more], env=env, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: list[dict]) -> None:
    for each in found:
        assert each["stack"] == 0
        assert each["shared"] <= (163 if each["target"] == 80 else 227) * 1024
        if each["kernel"] in ("gather_sum", "gather_sum_backward", "spread", "activate", "activate_backward"):
            assert each["loads"]["16"] > 0
            assert each["stores"]["16"] > 0
        if each["kernel"] in ("linear", "wgrad"):
            assert each["tensor_cores"] > 0
            assert each["stores"].keys() == {"16"}
            assert each["copies"]["16"] > 0
            assert "2" not in each["loads"]


def test_two_functions_for_hopper(tmp_path):
    found = compiled(tmp_path, "--only", "combine", "grouped_linear", "--targets", "90")
    assert {each["kernel"] for each in found} == {"invert", "gather_sum", "map_tiles", "linear"}
    check(found)


@pytest.mark.full
def test_all_functions_for_ampere_and_hopper(tmp_path):
    found = compiled(tmp_path)
    assert {each["case"] for each in found} == set(NAMES)
    check(found)
