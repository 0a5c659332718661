"""Kernels compile for GPUs that are not here: no register spills, rows move in pieces of 16 bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/compiled_kernels.py"
NAMES = ("route", "dispatch", "combine", "combine_backward", "expert_rows", "expert_rows_backward", "finish_rows",
         "glu", "glu_clamped", "glu_backward", "grouped_linear", "grouped_wgrad", "layer forward", "layer backward",
         *(f"{way} {codec}" for way in ("encode", "decode") for codec in ("int8", "fp8-e4m3", "fp8-e5m2")))  # fmt: skip


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
        if each["kernel"] == "to_bytes":  # rows of bytes lie 2052 apart, so 4 bytes are the most
            assert each["loads"].keys() == {"16"}
            assert each["stores"]["4"] > each["stores"]["1"]
        if each["kernel"] == "from_bytes":
            assert (each["loads"].keys(), each["stores"].keys()) == ({"4"}, {"16"})
        if each["kernel"] in ("linear", "wgrad"):
            assert each["tensor_cores"] > 0
            assert each["stores"].keys() == {"16"}
            assert each["copies"]["16"] > 0
            assert "2" not in each["loads"]


def test_some_functions_for_hopper(tmp_path):
    found = compiled(tmp_path, "--only", "combine", "grouped_linear", "encode int8", "decode int8", "--targets", "90")
    kernels = {"invert", "gather_sum", "map_tiles", "linear", "to_bytes", "from_bytes"}
    assert {each["kernel"] for each in found} == kernels
    check(found)


@pytest.mark.full
def test_all_functions_for_ampere_and_hopper(tmp_path):
    found = compiled(tmp_path)
    assert {each["case"] for each in found} == set(NAMES)
    check(found)
