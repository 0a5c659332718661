"""The schedule S3: outputs and gradients of the whole model, on meshes of `mp`, `ep` and `esp`, separate and folded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.models import CASES, Case, shallow
from tests.support.parity import one_token, routing, skew
from tests.support.scenarios import check_accumulation, check_in_flight, check_steps, steps_of
from tests.support.sharing import run_sharing

UNEVEN, EVEN = [(1, 6), (3, 10)], [(2, 8), (2, 8)]
FULL = pytest.mark.full
EP_ESP = {"ep": 2, "esp": 2}


def _check(sizes: dict[str, int], case: Case, check=check_steps, steps: int = 1, change=None, **options) -> None:
    """The case is right on a mesh of these sizes. Options are those of the compiler."""
    layout, world = (tuple(sizes.values()), tuple(sizes)), torch.Size(sizes.values()).numel()
    readers = world // sizes.get("mp", 1)
    shapes = ((EVEN if case.name.startswith("gshard") else UNEVEN) * 4)[:readers]
    compile_fn = partial(moefx.compile, options=moefx.Options.named(split="s3", **options))
    run_sharing(world, check, layout, case, steps_of(case, [shapes] * steps, change=change), compile_fn)


@FULL
@pytest.mark.parametrize("sizes", [
    {"esp": 2}, {"mp": 2, "esp": 2}, {"mp": 2, "ep": 2}, {"ep": 2, "esp": 2}, {"dp": 2, "esp": 2},
    {"mp": 2, "ep": 2, "esp": 2}, {"ep": 2, "esp": 4},
], ids=str)  # fmt: skip
def test_separate_meshes(sizes):
    _check(sizes, shallow("gpt_oss-grouped_mm"))


@pytest.mark.parametrize(("sizes", "ep", "esp"), [
    ({"mp": 4}, 2, 2),
    *(pytest.param(sizes, ep, esp, marks=FULL) for sizes, ep, esp in [
        ({"mp": 2}, 1, 2), ({"mp": 2}, 2, 1), ({"dp": 2, "mp": 2}, 2, 2), ({"dp": 4}, 2, 2), ({"dp": 2, "mp": 2}, 1, 2),
        ({"dp": 2, "mp": 4}, 4, 2), ({"dp": 4, "mp": 2}, 2, 4), ({"dp": 2, "mp": 4}, 2, 4)]),
], ids=str)  # fmt: skip
def test_folded_meshes(sizes, ep, esp):
    _check(sizes, shallow("gpt_oss-grouped_mm"), ep=ep, esp=esp, chunks=2, scheduler="optsche")


@FULL
@pytest.mark.parametrize("name", [
    "mixtral-router_logits", "qwen3_moe-eager", "deepseek_v3-eager", "loop-ungated", "loop-twice", "loop-counting",
    "gshard-grouped", "gshard-top1"])  # fmt: skip
def test_every_style(name):
    _check({"mp": 4}, CASES[name], ep=2, esp=2)


def test_what_each_rank_sends_to_the_byte():
    """Every row once over ep, (n-1) times what a rank holds over esp, and the same back; the backward is the mirror."""
    case = shallow("mixtral-grouped_mm")
    batches, model = [case.batch(r) for r in range(4)], case.build()
    width = model.config.hidden_size * 4
    rows = torch.stack([routing(model, batch).chosen[0].flatten().bincount(minlength=8) for batch in batches])
    for rank, sent in enumerate(run_sharing(4, _sent, case, batches)):
        place, part = divmod(rank, 2)
        mine = slice(4 * place, 4 * place + 4)
        there = int(rows[rank].sum() - rows[rank, mine].sum()) * width
        back = int(rows[2 * (1 - place) + part, mine].sum()) * width
        held, others = (int(rows[j::2, mine].sum()) * width for j in (part, 1 - part))  # n is 2
        assert sent == 2 * [("all_to_all", ("ep",), there), ("all_gather", ("esp",), held),
                            ("reduce_scatter", ("esp",), others), ("all_to_all", ("ep",), back)]  # fmt: skip


def _sent(rank: int, n: int, case: Case, batches: list) -> list[tuple]:
    """(kind, axes, bytes) of every exchange of rows, of forward and backward."""
    mesh = init_device_mesh("cpu", tuple(EP_ESP.values()), mesh_dim_names=tuple(EP_ESP))
    with closing(moefx.compile(case.build(), mesh, split="s3")) as compiled:
        compiled(**batches[rank]).loss.backward()
        return [(t.kind, t.axes, t.num_bytes) for t in compiled._session.trace
                if t.axes in (("ep",), ("esp",)) and t.kind != "all_reduce"]  # fmt: skip


@FULL
@pytest.mark.parametrize("options", [
    {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"}, {"chunks": 3, "alltoall": "2dh", "verify": 2},
    {"chunks": 2, "scheduler": "heuristic", "alltoall": "1dh"},
], ids=["optsche pipe", "2dh", "1dh"])  # fmt: skip
@pytest.mark.parametrize("name", ["mixtral-grouped_mm", "gshard-swiglu"])
def test_pipelines(name, options):
    _check({"ep": 4, "esp": 2}, shallow(name), ranks_per_node=4, **options)


@FULL
@pytest.mark.parametrize("name", ["gpt_oss-grouped_mm", "gshard-grouped", "mixtral-router_logits"])
def test_level_2(name):
    _check({"mp": 4}, shallow(name), ep=2, esp=2, verify=2)


@FULL
@pytest.mark.parametrize("check", [check_accumulation, check_in_flight])
def test_several_forwards(check):
    _check({"mp": 4}, shallow("mixtral-router_logits"), check, 2, ep=2, esp=2)


@FULL
def test_skewed_and_idle_experts():
    case = replace(shallow("gpt_oss-grouped_mm"), edit=partial(skew, experts=[0, 1]))
    _check(EP_ESP, case)
    _check({"mp": 4}, case, change=partial(one_token, token=7), ep=2, esp=2)
