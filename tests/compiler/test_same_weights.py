"""Ranks that begin with other weights are told so before a program runs."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import DivergenceError
from tests.support.breadth import some
from tests.support.handmade import Loop, OneLayer, with_layer
from tests.support.op_styles import StackedLoop
from tests.support.ranks import run_threads
from tests.support.sharing import run_sharing
from tests.support.weight_styles import QuantizedBuffers

pytestmark = pytest.mark.usefixtures("cached")
TOKENS = torch.arange(12).view(2, 6)


def model(seed: int = 0, **style) -> nn.Module:
    torch.manual_seed(seed)
    return OneLayer(Loop(num_experts=4, **style))


def errors(models: list[nn.Module], run=run_sharing, **axes: int) -> list[str | None]:
    """What every rank is told. run: `run_threads` where programs may differ, too."""

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

    return run(len(models), body)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2}])
def test_another_seed(axes):
    first, second = errors([model(0), model(1)], **axes)
    assert first == second
    assert "rank 1 of the mesh has different values of embed.weight than rank 0" in first
    assert "set one seed on all ranks" in first


def test_one_parameter_of_one_rank_alone():
    models = [model() for _ in range(4)]
    with torch.no_grad():
        models[2].mlp.experts[0].up.weight[0, 0] += 1e-6
    for text in errors(models, dp=2, ep=2):
        assert "rank 2 of the mesh has different values of mlp.experts.0.up.weight than rank 0 (1 of " in text


def test_another_model():
    for text in errors([model(), model(bias=True)], run_threads, ep=2):
        assert "rank 1 of the mesh has the parameter mlp.experts.0.up.bias where rank 0 has mlp" in text


def test_equal_weights_in_every_dtype():
    models = [model(), model()]
    for each in models:
        each.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
        each.register_parameter("thin", nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t()))
        each.register_parameter("none", nn.Parameter(torch.zeros(0, 3)))
        each.register_parameter("wave", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
    assert errors(models, ep=2) == [None, None]


class Masked(StackedLoop):
    """Weights of experts that are masked before use, by buffers and a plain tensor; and a buffer elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(self.up.shape) > 0.5)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.zeros(()))
        self.keep = torch.rand(self.down.shape[0], 1, 1)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.silu(rows @ (self.up * self.mask)[e]) @ (self.down * self.keep / self.scale)[e]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def masked(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return with_layer(Masked)


@pytest.mark.parametrize("name", some(["mask", "scale", "keep"], "scale", "keep"))
def test_other_buffers_of_experts(name):
    models = [masked() for _ in range(4)]
    getattr(models[3].mlp, name).zero_()
    for text in errors(models, run_threads if name == "keep" else run_sharing, dp=2, ep=2):  # no parameter, no buffer
        assert f"rank 3 of the mesh has different values of {'' if name == 'keep' else 'mlp.'}" in text
        assert f"{name} than rank 0 (1 of 3 tensors differ)" in text


def test_other_buffers_of_the_rest_are_each_ranks_own():
    models = [masked(), masked()]
    models[1].mlp.shift += 1
    assert errors(models, ep=2) == [None, None]


class Twice(nn.Module):
    """A buffer of the rest between two mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Masked(), Masked()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_buffers_between_two_mixtures_are_each_ranks_own():
    torch.manual_seed(0)
    models = [with_layer(Twice)]
    models.append(copy.deepcopy(models[0]))
    models[1].mlp.second.shift += 1
    others = copy.deepcopy(models)
    assert errors(models, ep=2) == [None, None]
    others[1].mlp.second.scale += 1
    for text in errors(others, ep=2):
        assert "rank 1 of the mesh has different values of mlp.second.scale than rank 0 (1 of " in text


def test_weights_of_experts_kept_in_buffers():
    torch.manual_seed(0)
    models = [with_layer(QuantizedBuffers)]
    models.append(copy.deepcopy(models[0]))
    next(module for name, module in models[1].named_modules() if hasattr(module, "q")).q[0, 0] += 1
    for text in errors(models, ep=2):
        assert "rank 1 of the mesh has different values of mlp." in text
        assert ".q than rank 0" in text


def test_buffers_of_experts_that_come_apart_later():
    models = [masked(), masked()]

    def body(rank: int, world: int) -> str | None:
        compiled = moefx.compile(models[rank], init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
        optimizer = torch.optim.SGD(compiled.parameters(), lr=1e-3)
        with closing(compiled):
            compiled(TOKENS).logits.square().mean().backward()
            optimizer.step()
            models[rank].mlp.scale += rank
            with pytest.raises(DivergenceError) as caught:
                compiled(TOKENS)
            return str(caught.value)

    for text in run_sharing(2, body):
        assert "rank 1 of the mesh has different values of mlp.scale than rank 0" in text
