"""Whole blocks in parts of the batch or the sequence: outputs, gradients, buffers are those of the model on one device.

Ranks are threads that share one compile.
"""

from __future__ import annotations

from functools import partial

import pytest

import moefx
from tests.support.handmade import Capacity, LanguageModel, Loop, make_moe
from tests.support.layered import layered
from tests.support.models import CASES, Case
from tests.support.scenarios import DP2_EP2, EP2, check_accumulation, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN, ONE_SAMPLE = [(2, 8), (2, 8)], [(4, 2), (3, 10)], [(1, 2), (3, 10)]
EP2_MP2 = ((2, 2), ("ep", "mp"))
FULL = pytest.mark.full


def compiled(options, model, mesh):
    return moefx.compile(model, mesh, whole_blocks=True, **options)


def check(rank, world, layout, case, steps, options):
    """What the pass says that it did, and did not."""
    model = compiled_case(case, layout, partial(compiled, options))
    check_compiled(rank, layout, case, steps, model)
    (program, *_) = model.prepare(**steps[0][0][0])
    (cut,) = [record for record in program.records if record.name == "cut-blocks"]
    model.close()
    return cut.changes, [reason for _, reason in cut.skipped]


@pytest.mark.parametrize(("name", "options"), [
    ("mixtral-grouped_mm", {"chunks": 2, "scheduler": "heuristic"}),
    pytest.param("qwen3_moe-eager", {"chunks": 3}, marks=FULL),
    pytest.param("loop-checkpointed", {"chunks": 2}, marks=FULL),
    pytest.param("deepseek_v3-grouped_mm", {"chunks": 2, "keep": "lean"}, marks=FULL),
    pytest.param("gpt_oss-grouped_mm", {"chunks": 2}, marks=FULL),
    pytest.param("mixtral-grouped_mm", {"chunks": 2, "placement": "exact"}, marks=FULL),
])  # fmt: skip
def test_on_two_ranks(name, options):
    """The batches are even, uneven, and of fewer samples than parts."""
    case = CASES[name]
    for changes, skipped in run_sharing(2, check, EP2, case, steps_of(case, [EVEN, UNEVEN, ONE_SAMPLE]), options):
        assert len(changes) == 1, skipped
        written = [each for each in skipped if "key_states" in each]  # deepseek writes them half by half
        assert bool(skipped) == ("deepseek" in name)
        assert bool(written) == bool(skipped)


LONG, SHORT = [(1, 8), (1, 11)], [(1, 4), (1, 2)]
WITHOUT_ATTENTION = Case("without attention", partial(layered, partial(make_moe, Loop()), 2))


@pytest.mark.parametrize(("case", "options", "meets"), [
    (WITHOUT_ATTENTION, {"chunks": 2}, 0),
    (CASES["loop-plain"], {"chunks": 2, "scheduler": "heuristic"}, 1),
    pytest.param(CASES["loop-plain"], {"chunks": 2, "dynamic": False}, 1, marks=FULL),
    pytest.param(CASES["mixtral-grouped_mm"], {"chunks": 3, "keep": "lean"}, 1, marks=FULL),
    pytest.param(CASES["gpt_oss-grouped_mm"], {"chunks": 2}, 2, marks=FULL),
    pytest.param(CASES["mixtral-grouped_mm"], {"chunks": 2, "placement": "exact"}, 1, marks=FULL),
    pytest.param(CASES["mixtral-router_logits"], {"chunks": 2}, 2, marks=FULL),
])  # fmt: skip
def test_long_samples_on_two_ranks(case, options, meets):
    """One each. The parts meet in the attention between the two layers; the same program takes several samples."""
    shapes = [[(1, 8), (1, 8)]] if options.get("dynamic") is False else [LONG, SHORT, UNEVEN]
    for changes, skipped in run_sharing(2, check, EP2, case, steps_of(case, shapes), options):
        assert changes[0].endswith(f"{options['chunks']} parts of the sequence")
        assert len([each for each in skipped if each.endswith("mixes positions")]) == meets, skipped


def test_a_loss_over_all_tokens_is_that_of_the_uncut_model():
    case = CASES["mixtral-router_logits"]
    for changes, _ in run_sharing(2, check, EP2, case, steps_of(case, [UNEVEN]), {"chunks": 2}):
        assert len(changes) == 1


@pytest.mark.full
def test_accumulation_over_data_and_experts():
    case = CASES["mixtral-grouped_mm"]
    steps = steps_of(case, [[(2, 8), (3, 4), (4, 2), (1, 8)]] * 3)
    run_sharing(4, check_accumulation, DP2_EP2, case, steps, partial(compiled, {"chunks": 2}))


def mixed(capacities):
    """Three layers of experts, those of these numbers with a capacity over all tokens of a rank."""
    model = LanguageModel(Loop())
    for number, block in enumerate(model.layers):
        block.mlp = make_moe(Capacity() if number in capacities else Loop())
    return model


@pytest.mark.parametrize("capacities", [(1,), pytest.param((0,), marks=FULL), pytest.param((0, 2), marks=FULL)])
def test_layers_beside_one_with_a_capacity_are_cut(capacities):
    """The layer with the capacity sees all tokens, drops those that the uncut model drops, and says so."""
    case = Case("mixed", partial(mixed, capacities))
    options = {"chunks": 2, "dynamic": False}
    for changes, skipped in run_sharing(2, check, EP2, case, steps_of(case, [EVEN]), options):
        assert [change.partition(" of ")[2] for change in changes] == [
            f"{3 - len(capacities)} regions in 2 parts of the batch"]  # fmt: skip
        kept = [reason for reason in skipped if reason.endswith("its chunks are parts of the capacity")]
        assert len(kept) == len(capacities)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout", "why"), [
    ("gshard-top2", EP2, "its chunks are parts of the capacity"),
    ("mixtral-grouped_mm", EP2_MP2, "hidden_states_7_share: it mixes samples"),
])  # fmt: skip
def test_what_cannot_be_cut_is_said(name, layout, why):
    case = CASES[name]
    world = layout[0][0] * layout[0][-1] if len(layout[0]) > 1 else layout[0][0]
    for changes, skipped in run_sharing(world, check, layout, case, steps_of(case, [EVEN]), {"chunks": 2}):
        assert not changes
        assert why in skipped[0]
