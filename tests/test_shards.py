"""Dense parameters of which every rank has some rows: numbers of the eager model on ranks that are threads.
tests/gloo/test_shards_gloo.py: with processes, optimizers, files and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import moefx
from tests.support.models import CASES, shallow
from tests.support.scenarios import DP2_EP2, check_accumulation, check_in_flight, check_steps, steps_of
from tests.support.sharing import run_sharing

UNEVEN = [(2, 2), (3, 10), (1, 4), (2, 3)]
FULL = pytest.mark.full


def sharded(options, model, mesh):
    return moefx.compile(model, mesh, moefx.Options(shard_dense=True, **options))


def odd(name):
    """A tiny model of transformers with an embedding of 67 rows, which do not divide."""
    case = shallow(name)
    return replace(case, make=partial(case.make, vocab_size=67))


@pytest.mark.parametrize(("case", "options"), [
    (odd("mixtral-tied"), {"verify": 2}),
    pytest.param(odd("qwen3_moe-frozen"), {"verify": 2}, marks=FULL),
    pytest.param(odd("qwen3_moe-grouped_mm"), {"keep": "eager"}, marks=FULL),
    pytest.param(CASES["loop-tied"], {"scheduler": "optsche", "chunks": 2}, marks=FULL),
    pytest.param(shallow("gshard-top2"), {}, marks=FULL),
], ids=lambda each: getattr(each, "name", None))  # fmt: skip
def test_parity(case, options):
    run_sharing(4, check_steps, DP2_EP2, case, steps_of(case, [UNEVEN]), partial(sharded, options))


@pytest.mark.parametrize("check", [check_accumulation, check_in_flight])
def test_several_forwards(check):
    case = shallow("loop-plain")
    run_sharing(2, check, ((2,), ("dp",)), case, steps_of(case, [UNEVEN[:2]] * 2), partial(sharded, {}))
