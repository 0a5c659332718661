"""Whole blocks in parts of the batch: outputs, gradients and buffers are those of the model on one device.

Ranks are threads that share one compile.
"""

from __future__ import annotations

from functools import partial

import pytest

import moefx
from tests.support.models import CASES
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN, ONE_SAMPLE = [(2, 8), (2, 8)], [(4, 2), (3, 10)], [(1, 2), (3, 10)]


def compiled(options, model, mesh):
    return moefx.compile(model, mesh, whole_blocks=True, **options)


def check(rank, world, layout, case, steps, options):
    model = compiled_case(case, layout, partial(compiled, options))
    check_compiled(rank, layout, case, steps, model)
    (program, *_) = model.prepare(**steps[0][0][rank])
    cut = next(record for record in program.records if record.name == "cut-blocks")
    model.close()
    return cut.changes, cut.skipped


@pytest.mark.parametrize(("name", "options"), [
    ("mixtral-grouped_mm", {"chunks": 2, "scheduler": "heuristic"}),
    ("qwen3_moe-eager", {"chunks": 3}),
])  # fmt: skip
def test_on_two_ranks(name, options):
    case = CASES[name]
    for changes, skipped in run_sharing(2, check, EP2, case, steps_of(case, [EVEN, UNEVEN, ONE_SAMPLE]), options):
        assert len(changes) == 1, skipped
        assert not skipped
