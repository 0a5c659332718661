"""Rooms are rooms: without one the core and the other features work, and its options are refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moefx import features

ROOT = Path(__file__).parents[2]
OPTIONS = {"tuning": "tune"}
TRAINS = """
import torch, moefx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tests.support.ranks import fake_world
from tests.support.models import shallow

assert "{option}" not in moefx.Options.__dataclass_fields__
try:
    moefx.Options({option}=1)
except moefx.errors.MoefxError as error:
    assert "no option '{option}'" in str(error), error
else:
    raise AssertionError("the option of a feature that there is not was taken")
case = shallow("loop-plain")
with fake_world(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    compiled = moefx.compile(case.build(), mesh, chunks=2, machine="emulated-200mbit")
    compiled(**case.batch(0)).loss.backward()
    assert str(moefx.explain(compiled))
print("it trains")
"""


def test_every_listed_room_is_in_this_table_and_has_a_page_and_tests():
    assert {*OPTIONS} == {*features.LISTED}
    for name in features.LISTED:
        assert len((ROOT / "docs" / "features" / f"{name}.md").read_text().splitlines()) <= 60
        assert list((ROOT / "tests" / "features" / name).glob("test_*.py"))


@pytest.mark.parametrize("name", features.LISTED)
def test_without_its_folder_everything_else_works(tmp_path, name):
    """Its folder and its line in the list are all that goes."""
    shutil.copytree(ROOT / "moefx", tmp_path / "moefx", ignore=shutil.ignore_patterns("__pycache__", name))
    assert not (tmp_path / "moefx" / "features" / name).exists()
    listing = tmp_path / "moefx" / "features" / "__init__.py"
    listing.write_text(listing.read_text().replace(f'"{name}",', ""))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    result = subprocess.run([sys.executable, "-c", TRAINS.format(option=OPTIONS[name])], cwd=tmp_path, text=True,
                            capture_output=True, timeout=600, check=False, env=_env(tmp_path))  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "it trains" in result.stdout


def _env(path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path), "MOEFX_CACHE": "off", "OMP_NUM_THREADS": "1"}
