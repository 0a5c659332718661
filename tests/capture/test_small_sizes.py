"""Sizes of one, of which torch's symbols know nothing: a forward that does otherwise for them takes another program."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.capture import small_sizes
from moefx.capture.inputs import flatten_call, sizes_of
from moefx.capture.trace import trace
from moefx.errors import DivergenceError
from tests.support.breadth import some
from tests.support.models import shallow
from tests.support.ranks import one_rank, run_threads


class Does(nn.Module):
    """Something with rows [B, S, 6], in a way that says what it does."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what

    def forward(self, x):
        y = self.linear(x)
        if self.what == "branch":
            return y * 2 if x.shape[1] == 1 else y
        if self.what == "squeeze":
            return y.squeeze()
        if self.what == "deviation":
            return y.std(0) if x.shape[0] > 1 else 0 * y[0]
        if self.what == "product":
            return y * 3 if x.shape[0] * x.shape[1] <= 4 else y
        if self.what == "both":
            return y * 3 if x.shape[0] == 1 and x.shape[1] > 5 else y
        if self.what == "expand":  # which says nothing more for a batch of one
            places = torch.arange(x.shape[1])[None]
            places = places if x.shape[0] == 1 else places.expand(x.shape[0], -1)
            return y + places[..., None] / x.shape[0]
        return y.mean(1) / x.shape[1]


def _step(model: nn.Module, x: torch.Tensor) -> tuple:
    model.zero_grad()
    out = model(x)
    (out.square().sum() + out.sum()).backward()
    grad = model.linear.weight.grad
    return out.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


SIZES = [(3, 4), (1, 4), (3, 1), (1, 1), (1, 7), (2, 5), (1, 4)]
PROGRAMS = {"branch": 2, "squeeze": 4, "deviation": 2, "product": 3, "both": 2, "expand": 1, "mean": 1}


@pytest.mark.parametrize(("what", "first"), [
    pytest.param(what, first, marks=[pytest.mark.full] if first and what not in ("squeeze", "both") else [])
    for what in PROGRAMS for first in (0, 1)
])  # fmt: skip
def test_a_size_of_one_is_as_in_eager(what, first):
    torch.manual_seed(0)
    plain = Does(what)
    model = copy.deepcopy(plain)
    with one_rank(), closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))) as compiled:
        for rows, length in SIZES[first:]:
            x = torch.randn(rows, length, 6)
            torch.testing.assert_close(_step(compiled, x), _step(plain, x))
        assert len(compiled._whole.variants) <= PROGRAMS[what] + first


def _on_rank(rank, world, models):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    with closing(moefx.compile(models[rank], mesh)) as compiled:
        with pytest.raises(DivergenceError) as error:
            compiled(torch.randn((3, 1)[rank], 4, 6))
        return str(error.value)


def test_ranks_that_would_do_otherwise_are_told_why():
    models = [Does("deviation") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for said in run_threads(2, _on_rank, models):
        assert "rank 0: sizes ((3, 4, 6),): fits" in said
        assert "rank 1: sizes ((1, 4, 6),): with a size of one the forward does something else: " in said


@pytest.mark.parametrize("name", some(["mixtral-grouped_mm", "gpt_oss-grouped_mm", "loop-setitem"],
                                      "gpt_oss-grouped_mm", "loop-setitem"))  # fmt: skip
def test_models_are_the_same_for_a_batch_of_one(name):
    case = shallow(name)
    model, found = case.build(), []
    for rows, length, fixed in ((2, 6, ""), (1, 6, "ones"), (3, 1, "ones")):
        leaves, spec = flatten_call((), case.batch(0, rows, length))
        found.append((trace(model, model, leaves, spec, torch.device("cpu"), fixed=fixed).recording, sizes_of(leaves)))
    for special, sizes in found[1:]:
        assert small_sizes.compare(found[0][0], special, sizes) == small_sizes.Verdict(None, True)
