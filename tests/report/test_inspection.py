"""`moefx.inspect`: what a user reads of a compilation, on the screen and in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.compiler import pipeline
from moefx.errors import RaiseError, UnsupportedUse
from moefx.ir.level import Level
from moefx.ir.read import read
from tests.support.models import shallow
from tests.support.ranks import one_rank
from tests.support.scenarios import EP1, compiled_case

CASE = shallow("loop-setitem")
ORDER = ["capture", "canonicalize", "raise-loop", "place-experts", "differentiate", "split-waits", "order"]


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank():
        yield


@pytest.fixture(scope="module")
def compiled(world):
    model = compiled_case(CASE, EP1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def found(compiled):
    return moefx.inspect(compiled, **CASE.batch(0))


def test_steps_tell_what_happened(found):
    names = [step.name for step in found.steps]
    assert [name for name in names if name in ORDER] == ORDER
    raised = found.step("raise-loop")
    assert raised.level is Level.MOE
    assert set(raised.texts) == {"graph"}
    assert "grouped_linear" in raised.texts["graph"]
    assert "  mlp  handmade.py" in raised.texts["graph"]
    assert "+    r0_route = ops.moefx.route.default(" in raised.diffs["graph"]
    assert "grouped_linear: 0 -> 2 (+2)" in raised.counts["graph"]
    assert raised.changes[0].startswith("region 0: a loop over 8 experts")
    assert set(found.step("split-waits").texts) == {"forward", "backward"}
    assert all(step.seconds >= 0 for step in found.steps)
    with pytest.raises(KeyError, match="no step 'raise-lop'; there are capture, "):
        found.step("raise-lop")


def test_code_is_the_emitted_python(found, compiled):
    assert set(found.code) == {"forward", "backward"}
    assert found.code["forward"].count("\ndef forward(session, step, inputs):") == 1
    assert "all_to_all" not in found.code["forward"]  # one rank


def test_table_is_plain_text_where_nobody_looks(found):
    text = str(found)
    assert "training, with gradients" in text
    assert "place-experts" in text
    assert "\x1b[" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "lines of emitted Python" in text


def test_saved_folder_is_complete(found, tmp_path):
    folder = found.save(tmp_path / "new" / "folder")
    names = {path.name for path in folder.iterdir()}
    assert {"index.md", "forward.py", "backward.py"} < names
    assert (folder / "forward.py").read_text() == found.code["forward"]
    changed = {step.name for step in found.steps if step.is_news}
    assert {"capture", "raise-loop"} < changed < {step.name for step in found.steps}
    number = next(i for i, step in enumerate(found.steps) if step.name == "raise-loop")
    (dumped,) = folder.glob("*-raise-loop.graph.py")
    assert {path.name.split(".")[0].split("-", 1)[1] for path in folder.glob("*.*.py")} == changed
    assert len(read(dumped.read_text()).graph.nodes) == found.steps[number].pictures["graph"].counts.total()
    index = (folder / "index.md").read_text()
    assert f"[graph]({dumped.name})" in index
    assert "- region 0: a loop over 8 experts" in index
    assert "```diff" in index


def test_without_arguments_every_program_is_shown(compiled, found, tmp_path):
    assert len(moefx.inspect(compiled).programs) == 1
    compiled.eval()
    try:
        compiled.prepare(**CASE.batch(0))
    finally:
        compiled.train()
    both = moefx.inspect(compiled)
    assert [p.title.split(",")[0] for p in both.programs] == ["training", "evaluation"]
    both.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"program-0", "program-1"}


def test_nothing_compiled_yet():
    model = compiled_case(CASE, EP1)
    with pytest.raises(UnsupportedUse, match="nothing was compiled yet"):
        moefx.inspect(model)
    model.close()


def test_environment_asks_for_dumps(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFX_DUMP", str(tmp_path / "dump"))
    model = compiled_case(CASE, EP1)
    model.prepare(**CASE.batch(0))
    model.prepare(**CASE.batch(1))
    first = {path.name for path in (tmp_path / "dump").iterdir()}
    assert {"index.md", "forward.py", "backward.py"} < first
    assert not any(name.startswith("program") for name in first)
    model.eval()
    model.prepare(**CASE.batch(0))
    assert (tmp_path / "dump" / "program1" / "index.md").exists()
    model.close()


def test_a_dump_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").write_text("")
    model = moefx.compile(CASE.build(), init_device_mesh("cpu", EP1[0], mesh_dim_names=EP1[1]),
                          dump_dir=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="are not dumped to"):
        model.prepare(**CASE.batch(0))
    assert model(**CASE.batch(0)).loss.isfinite()
    model.close()


def test_option_asks_for_dumps_also_of_what_failed(monkeypatch, tmp_path):
    def fails(gm, ctx):
        raise RaiseError("no such thing")

    broken = tuple(replace(e, run=fails) if e.name == "place-experts" else e for e in pipeline.WHOLE)
    monkeypatch.setattr(pipeline, "WHOLE", broken)
    monkeypatch.setenv("MOEFX_DUMP", str(tmp_path / "not here"))
    model = moefx.compile(CASE.build(), init_device_mesh("cpu", EP1[0], mesh_dim_names=EP1[1]),
                          dump_dir=str(tmp_path / "here"))
    with pytest.raises(RaiseError, match="no such thing"):
        model.prepare(**CASE.batch(0))
    names = [path.name for path in (tmp_path / "here" / "failed-rank0").iterdir()]
    assert "index.md" in names
    assert any("raise-loop" in name for name in names)
    assert not any("place-experts" in name for name in names)
    assert not (tmp_path / "not here").exists()
    model.close()


def test_torch_logs_knows_the_name():
    code = "import logging, moefx; logging.getLogger('moefx.passes').debug('hello')"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "TORCH_LOGS": "+moefx"},
                         capture_output=True, text=True, timeout=120)
    assert "hello" in run.stderr
