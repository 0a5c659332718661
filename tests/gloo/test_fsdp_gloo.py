"""Dense parameters in shards on real ranks: training, checkpoints, weight files, and what travels.
tests/gloo/test_checkpoint.py: checkpoints between meshes."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import moefx
from moefx import checkpoint
from moefx.layout import chunked
from moefx.runtime import parameters as stored
from tests.gloo.test_checkpoint import SHARDED, adamw, assert_same, spoil, values
from tests.support.models import shallow
from tests.support.parity import compare, parameters, reference_step
from tests.support.ranks import run_ranks
from tests.support.scenarios import DP2_EP2, compiled_case, draw

DP2, EP2 = ((2,), ("dp",)), ((2,), ("ep",))
PLAIN = partial(moefx.compile, options=moefx.Options.named(dynamic=False))


def case_of():
    """Tied embeddings of a number of rows that does not divide. In double precision: Adam makes much of rounding, and
    sums over ranks are in another order."""
    case = shallow("mixtral-eager")
    return replace(case, make=partial(case.make, vocab_size=67, tie_word_embeddings=True), edit=nn.Module.double)


def trained(case, world, steps=3):
    """Batches of all ranks, and the parameters of the plain model trained on all of them."""
    model, batches = case.build(), []
    optimizer = adamw(model)
    for step in range(steps):
        batches.append([draw(case, model, 10 * step + rank, 2, 4) for rank in range(world)])
        reference_step(model, batches[-1])
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return batches, parameters(model)


def _trains(rank, world, layout, case, batches, expected, folder):
    with closing(compiled_case(case, layout, SHARDED)) as model:
        optimizer = adamw(model)
        for step in batches:
            optimizer.zero_grad()
            model(**step[rank]).loss.backward()
            trace = list(model._session.trace)
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        compare(parameters(model), expected).check(f"{layout}, rank {rank}")
        _check_bytes(model, trace, world, layout)
        checkpoint.save(folder, model, optimizer, step=3)
        saved = values(model, optimizer)
        spoil(model, optimizer)
        checkpoint.load(folder, model, optimizer)
        assert_same(values(model, optimizer), saved)
    with closing(compiled_case(case, ((world,), ("ep",)), PLAIN)) as model:
        optimizer = adamw(model)
        checkpoint.load(folder, model, optimizer)
        model.prepare(**batches[0][rank])
        assert_same(values(model, optimizer), saved)


def _check_bytes(model, trace, world, layout):
    """Parameters are gathered twice, in forward and backward, and their gradients are cut once: 3 (N - 1) / N of them.
    Where rows do not divide, ranks gather as many as the first has, and send what is not their own."""
    cut = {id(p): p for p in model.parameters() if not stored.is_replicated(p) and p.dim() == 2}.values()
    most = sum(chunked(p.shape[0], layout[0])[0] * p.shape[1] for p in cut) * 8
    mine = sum(stored.local(p).numel() for p in cut) * 8
    weights = [t for t in trace if t.axes == layout[1] and t.region != "the backward"]  # where headers go
    sent = {kind: sum(t.num_bytes for t in weights if t.kind == kind)
            for kind in ("all_gather", "reduce_scatter")}  # fmt: skip
    assert sent["all_gather"] == 2 * (world - 1) * most
    assert sent["reduce_scatter"] == sum(p.numel() for p in cut) * 8 - mine
    assert len(cut) == 6


@pytest.mark.full
@pytest.mark.parametrize("layout", [DP2, DP2_EP2])
def test_training_and_checkpoints(layout, tmp_path):
    case, world = case_of(), math.prod(layout[0])
    run_ranks(world, _trains, layout, case, *trained(case, world), str(tmp_path))


def _from_files(rank, world, layout, case, folder, batch, expected):
    with torch.device("meta"):
        model = case.make().double()
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1])
    with closing(SHARDED(model, mesh, example_inputs=batch)) as compiled:
        compiled.materialize(folder)
        assert stored.local(compiled.get_parameter("model.embed_tokens.weight")).shape[0] == (34, 33)[rank]
        assert_same(parameters(compiled), expected)
        compiled.save_safetensors(f"{folder}/again")


@pytest.mark.full
def test_weight_files_both_ways(tmp_path):
    case = case_of()
    model = case.build()
    model.save_pretrained(tmp_path)
    expected = parameters(model)
    run_ranks(2, _from_files, EP2, case, str(tmp_path), draw(case, model, 0, 2, 4), expected)
    assert_same(parameters(type(model).from_pretrained(tmp_path / "again")), expected)
