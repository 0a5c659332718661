"""Rooms are rooms: without one the core and the other features work, and its options are refused by name."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from moefx import features, rooms
from moefx.compiler.pipeline import JOINT, PLACING, STEP, WHOLE

ROOT = Path(__file__).parents[2]
# What is refused without a room, and the words.
REFUSED = {
    "adaptive": ("formula='tutel'", "formula is 'tutel'"),
    "dedup": ("alltoall='dedup'", "no all-to-all 'dedup'"),
    "exact": ("placement='exact'", "no policy of placement 'exact'"),
    "fastermoe": ("placement='fastermoe'", "no policy of placement 'fastermoe'"),
    "fp8": ("fp8=True", "no option 'fp8'"),
    "fsdp": ("shard_dense=True", "no option 'shard_dense'"),
    "hecate": ("placement='hecate'", "no policy of placement 'hecate'"),
    "islands": ("islands=True", "no option 'islands'"),
    "llep": ("placement='llep'", "no policy of placement 'llep'"),
    "offload": ("keep='mpipemoe-s1'", "keep is 'mpipemoe-s1'"),
    "rehoming": ("rehome_every=3", "no option 'rehome_every'"),
    "tuning": ("tune='online'", "no option 'tune'"),
    "whole_blocks": ("whole_blocks=True", "no option 'whole_blocks'"),
}
IS_REFUSED = """
try:
    moefx.Options.named({option})
except moefx.errors.MoefxError as error:
    assert {words!r} in str(error), error
else:
    raise AssertionError("the option of a feature that there is not was taken")
"""
IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from tests.support.ranks import fake_world
from tests.support.models import CASES, shallow
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
    "saa": IMPORTS + """
with fake_world(4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
    compiled = moefx.compile(shallow("gshard-grouped").build(), mesh, ep=2, esp=2, split="s2")
    compiled(**CASES["gshard-grouped"].batch(0)).loss.backward()
    (where, how), = moefx.explain(compiled).programs[0].schedules
    assert how == "s2", how
""",
}
TRAINS = IMPORTS + """
case = shallow("loop-plain")
with fake_world(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    compiled = moefx.compile(case.build(), mesh, chunks=2, machine="emulated-200mbit")
    compiled(**case.batch(0)).loss.backward()
    assert str(moefx.explain(compiled))
"""


def test_every_listed_room_is_in_this_table_and_has_a_page_and_tests():
    assert REFUSED.keys() | DIFFERS.keys() == {*features.LISTED}
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    assert not [name for name in features.LISTED if f"(features/{name}.md)" not in architecture]
    for name in features.LISTED:
        assert len((ROOT / "docs" / "features" / f"{name}.md").read_text().splitlines()) <= 60
        assert list((ROOT / "tests" / "features" / name).glob("test_*.py"))


def test_passes_of_rooms_stand_behind_passes_that_there_are():
    known = {entry.name for entry in (*WHOLE, *PLACING, *JOINT, *STEP)} | {"differentiate", "partition", "schedule"}
    assert not [each.after for feature in rooms.FEATURES.values() for each in feature.passes if each.after not in known]


def test_the_core_trains_without_any_room(tmp_path):
    without(tmp_path, features.LISTED, "".join(map(differs, features.LISTED)) + TRAINS)


@pytest.mark.parametrize("name", features.LISTED)
def test_without_a_room_the_others_load(tmp_path, name):
    """Its folder and its line in the list are all that goes."""
    without(tmp_path, [name], differs(name))


@pytest.mark.parametrize("name", ["fastermoe", "llep"])
def test_without_plans_in_the_call_policies_that_make_them_are_refused(tmp_path, name):
    without(tmp_path, ["exact"], IS_REFUSED.format(option=f"placement={name!r}", words=f"{name!r}, which plans in"))


@pytest.mark.full
@pytest.mark.parametrize("name", features.LISTED)
def test_without_a_room_the_others_train(tmp_path, name):
    without(tmp_path, [name], TRAINS)


def differs(name: str) -> str:
    if name in DIFFERS:
        return DIFFERS[name]
    option, words = REFUSED[name]
    return IS_REFUSED.format(option=option, words=words)


def without(path: Path, names: Collection[str], script: str) -> None:
    """Runs a script with a moefx that lacks these rooms."""
    rooms_of = ROOT / "moefx" / "features"
    shutil.copytree(ROOT / "moefx", path / "moefx", ignore=lambda folder, found: [
        each for each in found if Path(folder) == rooms_of and each in names])  # fmt: skip
    listing = path / "moefx" / "features" / "__init__.py"
    for name in names:
        assert not (path / "moefx" / "features" / name).exists()
        listing.write_text(listing.read_text().replace(f'    "{name}",\n', ""))
    (path / "tests").symlink_to(ROOT / "tests")
    code, said = _server().ask(path, "import moefx\n" + script + 'print("done")')
    assert code == 0, said[-3000:]
    assert "done" in said


class _Server:
    """A process that has read torch and transformers, but not moefx, and runs every script in a copy of itself."""

    LOOP = """
import json, os, sys
import torch, torch.distributed, torch._dynamo, transformers
from torch.distributed import device_mesh, tensor
from torch.testing._internal.distributed import fake_pg

for line in sys.stdin:
    path, script = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(path)
        said = os.open("said", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.path.insert(0, path)
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""

    def __init__(self) -> None:
        environment = {"PATH": "/usr/bin:/bin", "MOEFX_CACHE": "off", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-c", self.LOOP], text=True, env=environment, cwd="/",
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def ask(self, path: Path, script: str) -> tuple[int, str]:
        """The exit code, and what the script wrote."""
        print(json.dumps([str(path), script]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline()), (path / "said").read_text()


@functools.cache
def _server() -> _Server:
    return _Server()
