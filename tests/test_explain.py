"""`moefx.explain`: what a user reads of the planner's choices, on the screen and as data."""

from __future__ import annotations

import json

import pytest
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.costmodel.memory import live_memory
from moefx.errors import MoefxError, UnsupportedUse
from tests.support.handmade import Loop, OneLayer
from tests.support.models import CASES
from tests.support.ranks import fake_world

CASE = CASES["loop-setitem"]


@pytest.fixture(scope="module", autouse=True)
def world():
    with fake_world(4):
        yield


def compiled(**options):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    return moefx.compile(CASE.build(), mesh, moefx.Options(**options))


@pytest.fixture(scope="module")
def planned(world):
    model = compiled(machine="emulated-200mbit", lossy=True)
    yield moefx.explain(model, **CASE.batch(0))
    model.close()


@pytest.fixture(scope="module")
def plain(world):
    model = compiled(chunks=2, codec="bf16")
    model.prepare(**CASE.batch(0))
    yield model
    model.close()


def test_candidates_reason_machine_and_formulas(planned):
    region = planned.regions[0]
    assert region.module.startswith("layers.0")
    assert region.plan.chosen.choice == region.choice
    assert {c.choice.alltoall for c in region.plan.candidates} == {"direct", "pipe", "2dh", "1dh"}
    assert {c.choice.codec for c in region.plan.candidates} == {"identity", "bf16", "int8"}
    text = str(planned)
    assert "machine emulated-200mbit (measured: all-to-all of 4 MiB" in text
    assert "figures assumed" in text
    assert region.reason in text
    assert "alpha_all_to_all_inter" in text
    assert "OptSche with r chunks takes Max(" in text
    assert "sizes: s" in text
    assert "\x1b[" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_data_is_the_whole_of_it(planned):
    data = json.loads(planned.to_json())
    program = data["programs"][0]
    assert program["machine"]["kind"] == "measured"
    assert program["machine"]["sources"]["launch_s"].startswith("assumed")
    region = program["regions"][0]
    assert len(region["candidates"]) == len(planned.regions[0].plan.candidates)
    assert region["candidates"] == sorted(region["candidates"], key=lambda c: c["seconds"])
    assert set(region["formulas"]) == set(region["stage_seconds"]) == {"forward", "backward"}
    assert region["chosen"]["memory_bytes"] > 0
    assert data == planned.to_dict()


def test_without_a_machine_it_says_so_and_how_to_get_one(plain):
    found = moefx.explain(plain)
    assert found.programs[0].machine is None
    assert [region.plan for region in found.regions] == [None] * len(found.regions)
    assert found.regions[0].choice[:3] == (2, "direct", "bf16")
    text = str(found)
    assert "no machine was given" in text
    assert "moefx calibrate" in text
    assert "chunks 2, all-to-all direct, codec bf16" in text


def test_a_lossy_codec_names_its_error(plain):
    found = moefx.explain(plain)
    assert found.regions[0].codec_error == 2.0**-8
    assert "the codec 'bf16' changes numbers" in str(found)


def test_peak_memory_is_that_of_the_final_graphs(plain):
    variants = plain._variants
    report = moefx.explain(plain).programs[0]
    for name, gm in variants[0].scheduled.items():
        assert report.peaks[name] == live_memory(gm).peak(report.sizes)
    assert report.peaks["forward"].bytes > 4 * sum(p.to_local().numel() for p in plain.parameters())


def test_what_could_not_be_used_is_said():
    model = compiled(chunks=2, alltoall="2dh", ranks_per_node=4)  # all ranks on one node
    text = str(moefx.explain(model, **CASE.batch(0)))
    assert "'2dh' is no better than 'direct'" in text.replace("\n", " ")
    model.close()


def test_impossible_memory_limit_is_one_error():
    model = compiled(memory_limit=1000)
    with pytest.raises(MoefxError, match=r"memory_limit is 0\.001 MB, and no choice"):
        model.prepare(**CASE.batch(0))
    model.close()


def test_unknown_names_are_refused_at_compile():
    for options in ({"scheduler": "fifo"}, {"alltoall": "3dh"}, {"codec": "zip"}, {"machine": "h200-8x400"}):
        with pytest.raises(MoefxError):
            compiled(**options)


def test_nothing_compiled_yet():
    model = compiled()
    with pytest.raises(UnsupportedUse, match="nothing was compiled yet"):
        moefx.explain(model)
    model.close()


def test_a_batch_of_one_is_priced_as_one(world):
    """It is traced as a batch of two, since torch would specialise on the one."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "ep"))
    model = moefx.compile(OneLayer(Loop()), mesh, moefx.Options(machine="emulated-200mbit", chunks=1))
    report = moefx.explain(model, **CASE.batch(0, rows=1, length=32))
    assert sorted(size for name, size in report.programs[0].sizes.items() if name.startswith("s")) == [1, 1, 32, 32]
    assert {size for name, size in report.programs[0].sizes.items() if name.startswith("u")} == {64}
    model.close()
