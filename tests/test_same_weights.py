"""Ranks that begin with other weights are told so before a program runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import DivergenceError
from tests.support.handmade import LanguageModel, Loop
from tests.support.ranks import run_threads

TOKENS = torch.arange(12).view(2, 6)


def model(seed: int = 0, **style) -> nn.Module:
    torch.manual_seed(seed)
    return LanguageModel(Loop(**style))


def errors(models: list[nn.Module], **axes: int) -> list[str | None]:
    """What every rank is told."""

    def body(rank: int, world: int) -> str | None:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        compiled = moefx.compile(models[rank], mesh)
        try:
            compiled(TOKENS)
        except DivergenceError as error:
            return str(error)
        finally:
            compiled.close()
        return None

    return run_threads(len(models), body)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2}])
def test_another_seed(axes):
    first, second = errors([model(0), model(1)], **axes)
    assert first == second
    assert "rank 1 of the mesh has other values of embed.weight than rank 0" in first
    assert "set one seed on all ranks" in first


def test_one_parameter_of_one_rank_alone():
    models = [model() for _ in range(4)]
    with torch.no_grad():
        models[2].layers[0].mlp.experts[0].up.weight[0, 0] += 1e-6
    for text in errors(models, dp=2, ep=2):
        assert "rank 2 of the mesh has other values of layers.0.mlp.experts.0.up.weight than rank 0 (1 of " in text


def test_another_model():
    for text in errors([model(), model(bias=True)], ep=2):
        assert "rank 1 of the mesh has the parameter layers.0.mlp.experts.0.up.bias where rank 0 has layers.0" in text


def test_equal_weights_in_every_dtype():
    models = [model(), model()]
    for each in models:
        each.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
        each.register_parameter("thin", nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t()))
        each.register_parameter("none", nn.Parameter(torch.zeros(0, 3)))
        each.register_parameter("wave", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
    assert errors(models, ep=2) == [None, None]
