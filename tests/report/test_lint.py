"""`moefx.lint`: of plain and compiled models, and of experts without rows."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.analysis.lints.never_moves import CHOICE
from moefx.errors import ModelError, UnsupportedUse
from moefx.model.stats import RegionStats
from moefx.report.lint import DEAD, ENOUGH, of_stats
from tests.analysis.lints.test_never_moves import D, Model, MoE
from tests.support.ranks import one_rank


def stats(load: list[int]) -> dict[str, RegionStats]:
    return {"layers.3.mlp": RegionStats("layers.3.mlp", load, sum(load), 0, 0)}


def test_experts_that_got_none_of_many_rows():
    (found,) = of_stats(stats([4 * ENOUGH, 0, 0, 0]))
    assert found.name == DEAD
    assert found.what == "3 of 4 experts of layers.3.mlp got none of 64 rows"
    assert "experts 1 to 3" in found.where


@pytest.mark.parametrize("load", [[4 * ENOUGH - 1, 0, 0, 0], [1000, 1, 1, 1], []])
def test_few_rows_and_uneven_loads_are_no_finding(load):
    assert of_stats(stats(load)) == []


def test_of_a_compiled_model_the_last_forward_counts_too():
    model = Model(MoE("detach"))
    with torch.no_grad():
        model.layers[0].router.weight.zero_()  # all tokens choose the same experts
    x = torch.randn(8 * ENOUGH, D)
    with one_rank(), closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        assert moefx.lint(compiled) == []
        compiled(x)
        assert [each.name for each in moefx.lint(compiled)] == [DEAD]
        assert [each.name for each in moefx.lint(compiled, x)] == [CHOICE, DEAD]


def test_bad_input_is_told():
    with pytest.raises(ModelError, match=r"a list is not an nn\.Module"):
        moefx.lint([])
    with pytest.raises(UnsupportedUse, match="no example of a call"):
        moefx.lint(Model(MoE()))
