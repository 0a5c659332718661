"""Any layer on any mesh keeps its meaning in every pass.

The program is compiled once and run by threads, one per rank, before and after every pass (verify level 2), on batches
of unequal sizes; tests/gloo/test_parity.py has a few of the same layers on real ranks.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.analysis import compare
from tests.support.handmade import Loop, OneLayer, capacities, loops
from tests.support.models import Case
from tests.support.ranks import fake_world

MESHES = [{"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 3}]


def compiled(style, axes, **options):
    case = Case("any", lambda: OneLayer(style))
    # What cannot be compared is skipped with a warning: here that would be a test that asserts nothing.
    refusing = mock.patch.object(compare.log, "warning", side_effect=AssertionError("not compared"))
    with fake_world(math.prod(axes.values())), refusing:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = moefx.compile(case.build(), mesh, moefx.Options(verify=2, **options), example_inputs=case.batch(0))
        found = moefx.inspect(model)
        model.close()
    return found


@pytest.mark.parametrize("style", [Loop(gather="stack", bias=True), Loop(gather="assign", top_k=1, renormalise=False)],
                         ids=lambda style: style.gather)  # fmt: skip
def test_other_ways_to_write_a_loop(style):
    assert "all_to_all" in compiled(style, {"dp": 2, "ep": 2}, chunks=2).code["forward"]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(style=st.one_of(loops(), capacities()), axes=st.sampled_from(MESHES), chunks=st.integers(1, 3))
def test_every_pass_keeps_the_meaning(style, axes, chunks):
    assert "all_to_all" in compiled(style, axes, chunks=chunks).code["forward"]
