"""Models with products in fp8: the same on all ranks as on one, and as far from exact ones as fp8 makes them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.breadth import some
from tests.support.models import Case, shallow
from tests.support.parity import Numbers, compare, reference_step
from tests.support.ranks import one_rank
from tests.support.scenarios import EP1, EP2, Layout, cast, compiled_case, overall_error, values_of
from tests.support.sharing import run_sharing


def wide(name: str) -> Case:
    """Its products have sides that are multiples of 16."""
    case = shallow(name)
    return replace(case, make=partial(case.make, intermediate_size=32))


def step(rank: int, world: int, layout: Layout, case: Case, options: dict[str, Any]) -> tuple[Numbers, dict[str, str]]:
    """Values of a step in which all ranks have one batch, and the code."""
    compiled = compiled_case(case, layout, partial(moefx.compile, fp8=True, **options))
    with closing(compiled):
        return values_of(compiled, case.batch(0)), moefx.inspect(compiled).code


def on_one(case: Case, **options: Any) -> tuple[Numbers, dict[str, str]]:
    with one_rank():
        return step(0, 1, EP1, case, options)


@pytest.mark.parametrize("name", some(["mixtral-grouped_mm", "gpt_oss-grouped_mm"], "mixtral-grouped_mm"))
def test_numbers_are_off_by_what_fp8_loses(name: str) -> None:
    case = wide(name)
    found, code = on_one(case)
    exact = reference_step(case.build(), [case.batch(0)])
    assert 1e-3 < overall_error(found, exact.outputs[0]) < 0.05
    assert 1e-3 < overall_error(found, exact.grads) < 0.1
    for source in code.values():
        assert source.count("fp8.scaled_linear(") == 2
        assert "grouped_linear(" not in source
    assert code["backward"].count("grouped.grouped_wgrad(") == 2


@pytest.mark.parametrize("options", some([{"chunks": 2, "keep": "lean", "verify": 2}, {}],
                                         {"chunks": 2, "keep": "lean", "verify": 2}), ids=str)  # fmt: skip
def test_two_ranks_have_the_numbers_of_one(options: dict[str, Any]) -> None:
    """A scale is of a row, wherever it is. Every pass is checked, by exact products in place of those in fp8, too."""
    case = wide("mixtral-grouped_mm")
    alone, _ = on_one(case)
    for found, code in run_sharing(2, step, EP2, case, options):
        compare(found, alone).check(str(options))
        assert "fp8.scaled_linear(" in code["forward"]


@pytest.mark.full
def test_under_autocast() -> None:
    case = wide("mixtral-grouped_mm")
    exact = reference_step(case.build(), [case.batch(0)])
    with one_rank(), cast(torch.bfloat16):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(case.build(), mesh, fp8=True)) as compiled:
            found, code = values_of(compiled, case.batch(0)), moefx.inspect(compiled).code["forward"]
    assert 1e-3 < overall_error(found, exact.grads) < 0.15
    assert code.count("fp8.scaled_linear(") == 2
