"""Compiling for more ranks than there are: the fake process group stands in for the others."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.runtime.parameters import distribute_parameters
from tests.support.handmade import Attention, Capacity, Loop, make_moe, with_layer
from tests.support.ranks import fake_world, fork_server

TOKENS = torch.arange(16).view(2, 8)


def _layer(style: Loop | Capacity) -> nn.Module:
    return nn.Sequential(Attention(), make_moe(style))


# All have 8 x 4 ranks for the experts; in those of `dp` and `mp` the 4 are two of dp by the two of mp.
MESHES = [
    ((16, 2, 8, 4), ("dp", "mp", "ep", "esp"), moefx.Options(), Loop()),
    ((512, 2), ("dp", "mp"), moefx.Options.named(ep=8, esp=4, split="s3"), Loop()),
    ((512, 2), ("dp", "mp"), moefx.Options.preset("parm-s2", ep=8, esp=4), Capacity()),
]  # fmt: skip


def code_of(rank: int, number: int) -> dict[str, str]:
    sizes, names, options, style = MESHES[number]
    torch.manual_seed(0)
    with fake_world(1024, rank):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        example = {"input_ids": TOKENS, "labels": TOKENS}
        compiled = moefx.compile(with_layer(partial(_layer, style)), mesh, options, example_inputs=example)
        # Values mean nothing here, but the program runs through.
        compiled(TOKENS, labels=TOKENS).loss.backward()
        local = {name: tuple(p.to_local().shape) for name, p in compiled.named_parameters()}
        shapes = {shape for name, shape in local.items() if ".experts.7." in name}
        assert isinstance(style, Loop) or local["mlp.1.wi"] == (1, 16, 6)
        code = dict(moefx.inspect(compiled).code)
        compiled.close()
    assert {shape for name, shape in local.items() if name.endswith("qkv.weight")} == {(24, 16)}
    if isinstance(style, Loop):
        code["expert 7 is here"] = str((6, 16) in shapes)
    return code


@pytest.mark.parametrize("number", [
    pytest.param(0, id="separate", marks=pytest.mark.full), pytest.param(1, id="folded"),
    pytest.param(2, id="phases", marks=pytest.mark.full)])  # fmt: skip
def test_the_first_and_the_last_of_1024_ranks_make_one_program(number):
    # A process each: torch's caches hold on to the groups of a world that is gone.
    with ProcessPoolExecutor(2, mp_context=fork_server()) as pool:
        first, last = pool.map(partial(code_of, number=number), (0, 1023))
    assert first.pop("expert 7 is here", "False") == "False"
    assert last.pop("expert 7 is here", "True") == "True"
    assert (number == 2) is ("phase=7" in first["forward"])
    assert first == last


def test_parameters_are_on_their_mesh_after_an_equal_one_of_an_earlier_world() -> None:
    for groups_before in (4, 0):
        with fake_world(4):
            for _ in range(groups_before):
                dist.new_group([0, 1])
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
            model = nn.Linear(2, 2)
            distribute_parameters(model, mesh)
            assert all(p.device_mesh is mesh for p in model.parameters())
