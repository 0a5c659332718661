"""Experts that do not divide over the ranks, whose homes differ in number: outputs and every gradient."""

from __future__ import annotations

from functools import partial

import pytest

import moefx
from moefx.options import Options
from tests.support.handmade import Loop, OneLayer
from tests.support.models import Case, hugging_face
from tests.support.scenarios import check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

STACKED = Case("stacked", partial(hugging_face, "qwen3_moe", "grouped_mm", num_hidden_layers=1, num_experts=3,
                                  num_experts_per_tok=2))  # fmt: skip
MODULES = Case("modules", partial(OneLayer, Loop(num_experts=10, top_k=2, bias=True)))


def _check(rank, world, layout, case, steps, compile_fn):
    compiled = compiled_case(case, layout, compile_fn)
    check_compiled(rank, layout, case, steps, compiled)
    assert {len(region.load) for region in compiled.moe_stats().values()} == {3 if case is STACKED else 10}
    compiled.close()


@pytest.mark.parametrize(("case", "options"), [
    (STACKED, {"chunks": 2}), (MODULES, {}),
    pytest.param(STACKED, {"verify": 2, "alltoall": "2dh", "ranks_per_node": 2}, marks=pytest.mark.full),
    pytest.param(MODULES, {"verify": 2, "chunks": 4, "keep": "mpipemoe-s4"}, marks=pytest.mark.full),
], ids=["a rank without experts", "modules", "between nodes", "made again"])  # fmt: skip
def test_on_four_ranks(case, options):
    compile_fn = partial(moefx.compile, options=Options.named(**options))
    steps = steps_of(case, [[(1, 6), (3, 10), (2, 5), (2, 8)]])
    run_sharing(4, _check, ((4,), ("ep",)), case, steps, compile_fn)
