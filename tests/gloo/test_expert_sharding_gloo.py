"""Experts cut over `esp` on real ranks: checkpoints between meshes, weight files, and what travels."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import moefx
from tests.gloo.test_checkpoint import load_and_compare, save_trained
from tests.support.families import case_of, tiny_config
from tests.support.models import CASES, shallow
from tests.support.parity import compare, outputs_of, parameters, routing
from tests.support.ranks import run_ranks
from tests.support.scenarios import EP2, check_accumulation, check_training, reference_training, steps_of
from tests.support.sharing import run_sharing

EP2_ESP2 = ((2, 2), ("ep", "esp"))
ESP2 = ((2,), ("esp",))
TOKENS = torch.arange(16).view(2, 8) + 3
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
FIXED = moefx.Options.named(dynamic=False)


@pytest.mark.full  # those of folded meshes move in test_folded_meshes_gloo
@pytest.mark.parametrize("name", ["stacked", "separate"])
def test_checkpoints_move_between_meshes(name, tmp_path):
    _, expected = run_ranks(4, save_trained, EP2_ESP2, name, str(tmp_path))[0]
    for layout in (EP2, ESP2):
        run_ranks(2, load_and_compare, layout, name, str(tmp_path), expected)


@pytest.mark.full
def test_training():
    case = CASES["mixtral-grouped_mm"]
    run_ranks(4, check_training, EP2_ESP2, case, reference_training(case, 4))


@pytest.mark.full  # of ranks that are threads in test_tensor_parallelism, whose experts are cut over mp
def test_accumulation():
    case = shallow("gpt_oss-grouped_mm")
    run_ranks(2, check_accumulation, ESP2, case, steps_of(case, [[(2, 8), (1, 6)]] * 3))


def from_files(rank, world, layout, family, folder, expected, options=FIXED):
    """Weights from files into a model on the meta device, and into files again; the shapes of this rank's parts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1])
    with closing(moefx.compile(model, mesh, options, example_inputs=BATCH)) as compiled:
        compiled.materialize(folder)
        local = {name: tuple(p.to_local().shape) for name, p in compiled.named_parameters()}
        out = compiled(**BATCH)
        compare({**outputs_of(out), **parameters(compiled)}, expected).check(f"{family}, rank {rank}")
        compiled.save_safetensors(f"{folder}/again")
    return local


@pytest.mark.full  # experts cut over mp, in test_tensor_parallelism_gloo, are so over esp
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weight_files_both_ways(family, tmp_path):
    model = case_of(family).build()
    model.save_pretrained(tmp_path)
    expected = {**outputs_of(model(**BATCH)), **parameters(model)}
    local = run_ranks(4, from_files, EP2_ESP2, family, str(tmp_path), expected)[3]
    whole = dict(model.named_parameters())
    down = next(name for name in whole if name.endswith("experts.down_proj"))
    assert torch.Size(local[down]).numel() * 4 == whole[down].numel()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again").train()
    compare({**outputs_of(loaded(**BATCH)), **parameters(loaded)}, expected).check(family)


def _sent(rank, world, case, batches):
    """(kind, axes, bytes) of every exchange of rows, and the rows of every layer by (rank, expert)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    with closing(moefx.compile(case.build(), mesh, FIXED)) as compiled:
        with torch.no_grad():
            compiled(**batches[rank])
        sent = [(t.kind, t.axes, t.num_bytes) for t in compiled._session.trace if t.kind == "all_to_all"]
        return sent, {name: stats.load for name, stats in compiled.moe_stats().items()}


def test_what_travels_is_every_row_once_to_each_rank_that_has_a_part():
    case = shallow("mixtral-grouped_mm")
    batches = [case.batch(r) for r in range(4)]
    model = case.build()
    found = run_sharing(4, _sent, case, batches)
    width = model.config.hidden_size * 4
    for layer in range(model.config.num_hidden_layers):
        rows = [routing(model, b).chosen[layer].flatten().bincount(minlength=8) for b in batches]
        for rank, (sent, load) in enumerate(found):
            out, back = (nbytes for _, _, nbytes in sent[2 * layer : 2 * layer + 2])
            mine = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
            elsewhere = rows[rank].sum() * 2 - rows[rank][mine].sum()  # both ranks of a place, without this one
            assert out == int(elsewhere) * width
            assert back == sum(int(rows[r][mine].sum()) for r in range(4) if r != rank) * width
            assert list(load.values())[layer] == sum(rows).tolist()
