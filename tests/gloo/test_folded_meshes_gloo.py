"""Experts folded into a mesh of `dp` and `mp` on real ranks: steps, checkpoints between meshes, and weight files."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import moefx
from moefx import checkpoint
from tests.gloo.test_checkpoint import FIXED, MODELS, adamw, assert_same, spoil, train, values
from tests.gloo.test_expert_sharding_gloo import BATCH, from_files
from tests.support.families import case_of
from tests.support.models import CASES, Case
from tests.support.parity import compare, full, outputs_of, parameters
from tests.support.ranks import run_ranks
from tests.support.scenarios import (
    EP2,
    check_compiled,
    check_training,
    compiled_case,
    reads,
    reference_training,
    steps_of,
)

MP2, MP4, DP2_MP2 = ((2,), ("mp",)), ((4,), ("mp",)), ((2, 2), ("dp", "mp"))
MP2_EP2 = ((2, 2), ("mp", "ep"))


def _folded(layout):
    """The experts on all ranks of a mesh that names none of theirs: half of the ranks have parts of the same experts,
    if these are more than two."""
    n = torch.Size(layout[0]).numel()
    return moefx.Options.named(dynamic=False, ep=2, esp=n // 2)


def _compiled(layout, name):
    is_folded = "ep" not in layout[1]
    return compiled_case(MODELS[name], layout, partial(moefx.compile, options=_folded(layout)) if is_folded else FIXED)


def _save(rank, world, layout, name, folder, steps):
    """Trained weights, behind a step that is right."""
    model = _compiled(layout, name)
    check_compiled(rank, layout, MODELS[name], steps, model)
    norms = torch.stack([full(p.grad).norm() for p in model.parameters() if p.grad is not None])
    assert torch.isclose(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)), norms.norm(), rtol=1e-5)
    optimizer = adamw(model)
    torch.manual_seed(reads(rank, layout))
    train(model, optimizer, name, 2)
    checkpoint.save(folder, model, optimizer, step=2)
    saved = values(model, optimizer)
    model.close()
    return saved if rank == 0 else None


def _load(rank, world, layout, name, folder, expected):
    model = _compiled(layout, name)
    optimizer = adamw(model)
    for _ in ("before the first call", "after it"):
        spoil(model, optimizer)
        checkpoint.load(folder, model, optimizer)
        assert_same(values(model, optimizer), expected)
        torch.manual_seed(reads(rank, layout))  # loading has set what each of the ranks that saved would draw
        train(model, optimizer, name, 1)
    model.close()


@pytest.mark.parametrize(("name", "saved", "loaded"), [
    ("separate", MP2, EP2), *(pytest.param(*each, marks=pytest.mark.full) for each in [
        ("stacked", DP2_MP2, MP2_EP2), ("separate", MP4, DP2_MP2), ("stacked", EP2, MP2)])])  # fmt: skip
def test_checkpoints_move_between_meshes_and_into_the_plain_model(name, saved, loaded, tmp_path):
    worlds = [torch.Size(layout[0]).numel() for layout in (saved, loaded)]
    steps = steps_of(MODELS[name], [[(2, 8)] * (1 + max(reads(rank, saved) for rank in range(worlds[0])))])
    expected = run_ranks(worlds[0], _save, saved, name, str(tmp_path), steps)[0]
    run_ranks(worlds[1], _load, loaded, name, str(tmp_path), expected)
    plain = MODELS[name].build()
    optimizer = adamw(plain)
    spoil(plain, optimizer)
    checkpoint.load(tmp_path, plain, optimizer)
    assert_same(values(plain, optimizer), expected)


@pytest.mark.full
def test_training():
    """With every optimizer. Adam makes much of rounding, and sums over ranks are in another order: double precision."""
    case = Case("double", CASES["loop-ungated"].make, edit=nn.Module.double)
    compile_fn = partial(moefx.compile, options=_folded(MP4))
    run_ranks(4, check_training, MP4, case, reference_training(case, 1), compile_fn)


@pytest.mark.parametrize("family", [pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_weight_files_both_ways(family, tmp_path):
    model = case_of(family).build()
    model.save_pretrained(tmp_path)
    expected = {**outputs_of(model(**BATCH)), **parameters(model)}
    local = run_ranks(4, from_files, MP4, family, str(tmp_path), expected, _folded(MP4))[3]
    whole = dict(model.named_parameters())
    down = next(name for name in whole if name.endswith("experts.down_proj"))
    assert torch.Size(local[down]).numel() * 4 == whole[down].numel()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again").train()
    compare({**outputs_of(loaded(**BATCH)), **parameters(loaded)}, expected).check(family)
