"""Dense weights cut over `mp` on real ranks: training, checkpoints between meshes, weight files, and what travels."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import moefx
from moefx import checkpoint
from moefx.errors import DivergenceError
from tests.gloo.test_checkpoint import FIXED, MODELS, adamw, assert_same, spoil, train, values
from tests.gloo.test_expert_sharding_gloo import BATCH, TOKENS, from_files
from tests.support.families import case_of
from tests.support.models import CASES, Case, chosen, shallow
from tests.support.parity import compare, outputs_of, parameters
from tests.support.ranks import run_ranks
from tests.support.scenarios import EP2, check_training, compiled_case, reference_training
from tests.support.sharing import run_sharing

MP2 = ((2,), ("mp",))
MP2_EP2 = ((2, 2), ("mp", "ep"))


def _save(rank, world, layout, name, folder):
    torch.manual_seed(rank % 2)  # ranks along mp draw the same batches
    model = compiled_case(MODELS[name], layout, FIXED)
    optimizer = adamw(model)
    train(model, optimizer, name, 2)
    checkpoint.save(folder, model, optimizer, step=2)
    saved = values(model, optimizer)
    model.close()
    return saved if rank == 0 else None


def _load(rank, world, layout, name, folder, expected):
    torch.manual_seed(0)
    model = compiled_case(MODELS[name], layout, FIXED)
    optimizer = adamw(model)
    for _ in ("before the first call", "after it"):
        spoil(model, optimizer)
        checkpoint.load(folder, model, optimizer)
        assert_same(values(model, optimizer), expected)
        if layout == MP2:
            train(model, optimizer, name, 1)
    model.close()


@pytest.mark.full
def test_checkpoints_move_between_meshes(tmp_path):
    name = "stacked"
    expected = run_ranks(4, _save, MP2_EP2, name, str(tmp_path))[0]
    for layout in (MP2, EP2):
        run_ranks(2, _load, layout, name, str(tmp_path), expected)


@pytest.mark.full
def test_training():
    """With every optimizer. Adam makes much of rounding, and sums over ranks are in another order: double precision."""
    case = Case("double", CASES["loop-ungated"].make, edit=nn.Module.double)
    run_ranks(2, check_training, MP2, case, reference_training(case, 1))


@pytest.mark.parametrize("family", chosen(["gpt_oss"], ["phimoe", "gpt_oss"]))
def test_weight_files_both_ways(family, tmp_path):
    model = case_of(family).build()
    model.save_pretrained(tmp_path)
    expected = {**outputs_of(model(**BATCH)), **parameters(model)}
    local = run_ranks(2, from_files, MP2, family, str(tmp_path), expected)[1]
    whole = dict(model.named_parameters())
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.Size(local[name]).numel() * 2 == whole[name].numel()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again").train()
    compare({**outputs_of(loaded(**BATCH)), **parameters(loaded)}, expected).check(family)


def _sent(rank, world, case, axis, regions, schedule=None):
    """Bytes of all collectives of these names, of the forward and of the backward."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(axis,))
    with closing(moefx.compile(case.build(), mesh, split=schedule, dynamic=False)) as compiled:
        out = compiled(**BATCH)
        trace = compiled._session.trace
        forward = list(trace)
        trace.clear()
        out.loss.backward()
        return [[sent.num_bytes for sent in part if sent.region == region]
                for part in (forward, trace) for region in regions]  # fmt: skip


def test_what_travels():
    """2 (n-1)/n T D numbers for every product that is cut by rows, and in the backward for every value that products
    cut by columns read. (n-1) ceil(T/n) D for the results of an MoE layer (S1), and for the gradient of its input."""
    case = shallow("mixtral-grouped_mm")
    config = case.build().config
    once = 2 * TOKENS.numel() * config.hidden_size * 4 // 2  # n is 2
    rows = -(-TOKENS.numel() // 2) * config.hidden_size * 4
    for sums, gathered, sums_back, gathered_back in run_sharing(2, _sent, case, "mp", ("partial sums", "rows")):
        assert sums == [once] * config.num_hidden_layers  # o_proj
        assert sums_back == [once] * config.num_hidden_layers  # what q, k and v read
        assert gathered == gathered_back == [rows] * config.num_hidden_layers


def test_what_travels_in_parms_baseline():
    """Its Eq. 1: tokens are gathered, (n-1) T D numbers, with k ids and weights of each; what is made of the rows of
    all is summed, 2 (n-1)/n n T k D. The backward sums both again. Rows go to experts of the same rank."""
    case = shallow("mixtral-grouped_mm")
    config = case.build().config
    layers, k, tokens = config.num_hidden_layers, config.num_experts_per_tok, TOKENS.numel()
    ids, weights, x = tokens * k * 8, tokens * k * 4, tokens * config.hidden_size * 4  # n is 2
    for gathered, summed, scattered, again in run_sharing(2, _sent, case, "esp", ("tokens", "rows"), "baseline"):
        assert sorted(gathered) == sorted([ids, weights, x] * layers)
        assert summed == again == [2 * k * x] * layers
        assert sorted(scattered) == sorted([weights, x] * layers)


class _Noisy(nn.Module):
    """An MLP behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(nn.functional.dropout(x, 0.5, self.training)).relu())


def _drawn(rank, world):
    torch.manual_seed(0)
    with closing(moefx.compile(_Noisy(), init_device_mesh("cpu", (world,), mesh_dim_names=("mp",)))) as compiled:
        x = torch.ones(3, 8)
        same = compiled(x)
        torch.manual_seed(rank)
        with pytest.raises(DivergenceError) as caught:
            compiled(x)
        compiled.eval()(x)  # which draws nothing
    return same, str(caught.value)


def test_ranks_along_mp_that_draw_other_random_numbers_are_named():
    (same, told), (other, told_too) = run_ranks(2, _drawn)
    assert torch.equal(same, other)
    for message in (told, told_too):
        assert "ranks 0 and 1 along 'mp' draw different random numbers" in message
