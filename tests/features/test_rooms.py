"""Rooms are rooms: without one the core and the other features work, and its options are refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moefx import features, rooms
from moefx.compiler.pipeline import JOINT, PLACING, STEP, WHOLE

ROOT = Path(__file__).parents[2]
# What is refused without a room, and the words.
REFUSED = {
    "dedup": ("alltoall='dedup'", "no all-to-all 'dedup'"),
    "fastermoe": ("placement='fastermoe'", "no policy of placement 'fastermoe'"),
    "fsdp": ("shard_dense=True", "no option 'shard_dense'"),
    "llep": ("placement='llep'", "no policy of placement 'llep'"),
    "offload": ("keep='mpipemoe-s1'", "keep is 'mpipemoe-s1'"),
    "tuning": ("tune='online'", "no option 'tune'"),
}
IS_REFUSED = """
try:
    moefx.Options.named({option})
except moefx.errors.MoefxError as error:
    assert {words!r} in str(error), error
else:
    raise AssertionError("the option of a feature that there is not was taken")
"""
# Of rooms without an option: what is different.
DIFFERS = {
    "papers": """
try:
    moefx.Options.preset("parm")
except moefx.errors.MoefxError as error:
    assert str(error) == "there is no preset 'parm'", error
else:
    raise AssertionError("a preset of a feature that there is not was taken")
""",
    "saa": """
with fake_world(4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
    compiled = moefx.compile(shallow("gshard-grouped").build(), mesh, ep=2, esp=2, split="s2")
    compiled(**CASES["gshard-grouped"].batch(0)).loss.backward()
    (where, how), = moefx.explain(compiled).programs[0].schedules
    assert how == "s2", how
""",
}
TRAINS = """
import torch, moefx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tests.support.ranks import fake_world
from tests.support.models import CASES, shallow

{differs}
case = shallow("loop-plain")
with fake_world(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    compiled = moefx.compile(case.build(), mesh, chunks=2, machine="emulated-200mbit")
    compiled(**case.batch(0)).loss.backward()
    assert str(moefx.explain(compiled))
print("it trains")
"""


def test_every_listed_room_is_in_this_table_and_has_a_page_and_tests():
    assert REFUSED.keys() | DIFFERS.keys() == {*features.LISTED}
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    assert not [name for name in features.LISTED if f"(features/{name}.md)" not in architecture]
    for name in features.LISTED:
        assert len((ROOT / "docs" / "features" / f"{name}.md").read_text().splitlines()) <= 60
        assert list((ROOT / "tests" / "features" / name).glob("test_*.py"))


def test_passes_of_rooms_stand_behind_passes_that_there_are():
    known = {entry.name for entry in (*WHOLE, *PLACING, *JOINT, *STEP)} | {"differentiate", "partition"}
    assert not [each.after for feature in rooms.FEATURES.values() for each in feature.passes if each.after not in known]


@pytest.mark.parametrize("name", features.LISTED)
def test_without_its_folder_everything_else_works(tmp_path, name):
    """Its folder and its line in the list are all that goes."""
    shutil.copytree(ROOT / "moefx", tmp_path / "moefx", ignore=shutil.ignore_patterns("__pycache__", name))
    assert not (tmp_path / "moefx" / "features" / name).exists()
    listing = tmp_path / "moefx" / "features" / "__init__.py"
    listing.write_text(listing.read_text().replace(f'    "{name}",\n', ""))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    option, words = REFUSED.get(name, ("", ""))
    differs = DIFFERS[name] if name in DIFFERS else IS_REFUSED.format(option=option, words=words)
    result = subprocess.run([sys.executable, "-c", TRAINS.format(differs=differs)], cwd=tmp_path, text=True,
                            capture_output=True, timeout=600, check=False, env=_env(tmp_path))  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "it trains" in result.stdout


def _env(path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path), "MOEFX_CACHE": "off", "OMP_NUM_THREADS": "1"}
