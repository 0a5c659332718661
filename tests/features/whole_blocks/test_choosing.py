"""Whether blocks are cut, and in how many parts, is chosen by what a whole step is predicted to take."""

from __future__ import annotations

import re

import pytest
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import UnsupportedUse
from moefx.features.whole_blocks.feature import FEATURE
from tests.planning.test_planner import machine
from tests.support.models import CASES
from tests.support.ranks import fake_world

BOTH = {"launch_s": 1e-8, "message_s": 1e-7, "flops": 3e10, "bytes_per_s": 1e8}  # computation and links take as long
BUSY = BOTH | {"flops": 1e8}  # computation alone takes all the time


def planned(figures, **options):
    """(whether blocks were cut, why, the peak in bytes) of a program."""
    case = CASES["mixtral-grouped_mm"]
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        given = {"whole_blocks": "auto", "dynamic": False} | options
        model = moefx.compile(case.build(), mesh, machine=machine(**figures), **given)
        (program,) = model.prepare(**case.batch(0))
        cut = [record for record in program.records if record.name == "cut-blocks" and record.changes]
        (found,) = moefx.explain(model).programs
        (note,) = [note for note in found.notes if "as planned" in note]
        return bool(cut), note, max(each.bytes for each in found.peaks.values())


def test_blocks_are_cut_where_a_step_is_faster_then():
    is_cut, note, _ = planned(BOTH)
    before, in_two = (float(re.search(form, note)[1]) for form in (r"([\d.]+) ms as planned", r"2 parts: ([\d.]+) ms"))
    assert is_cut
    assert in_two < before
    assert note.endswith("Taken: blocks in 2 parts")


@pytest.mark.full
def test_the_limit_of_memory_holds():
    _, _, peak = planned(BOTH, chunks=2)
    is_cut, note, _ = planned(BOTH, chunks=2, memory_limit=0.999 * peak)  # less than the blocks need
    assert not is_cut
    assert "more than memory_limit. Taken: what was planned" in note


@pytest.mark.full
def test_nothing_is_tried_where_nothing_can_be_hidden():
    is_cut, note, _ = planned(BUSY)
    assert not is_cut
    assert "blocks in 2 parts not tried" in note


@pytest.mark.parametrize(("options", "what"), [
    ({"whole_blocks": "auto"}, "without a machine"),
    ({"whole_blocks": "auto", "machine": "emulated-200mbit", "chunks": 1}, "there is one"),
    ({"whole_blocks": True}, "there is one"),
])  # fmt: skip
def test_options_that_leave_nothing_to_choose_are_refused(options, what):
    with pytest.raises(UnsupportedUse, match=what):
        FEATURE.check(moefx.Options().changed(**options))
