"""What is wrong with a model is said in moefx's words: what, where, and what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from tests.support.ranks import fake_world

D, E, K = 4, 2, 1
TORCHS = re.compile("dynamo|FakeTensor|unbacked|as_proxy|ApplyTemplate|aot|NoneType", re.IGNORECASE)


class Mixture(nn.Module):
    """A loop over experts; every class below changes one thing in it."""

    k = K

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.k, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = self.picked(chosen == e)
            out = out.index_add(0, token, self.expert(expert, x[token]) * weights[token, choice, None])
        return out

    def picked(self, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.where(mask)

    def expert(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows)


class FloatIndex(Mixture):
    def picked(self, mask):
        token, choice = torch.where(mask)
        return token.float(), choice


class MoreThanThereAre(Mixture):
    k = E + 1


class OtherWidth(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = nn.Linear(D, D + 1)


class OtherDtype(Mixture):
    def expert(self, expert, rows):
        return expert(rows.double())


class Branch(Mixture):
    def expert(self, expert, rows):
        return expert(rows) if rows.sum() > 0 else rows


class Raises(Mixture):
    def expert(self, expert, rows):
        raise ValueError("of the user")


class Generator(Mixture):
    generator = torch.Generator()

    def expert(self, expert, rows):
        return expert(rows) + torch.randn(rows.shape, generator=self.generator)


@torch.library.custom_op("moefx_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class NoShapes(Mixture):
    def expert(self, expert, rows):
        return doubled(expert(rows))


class Sparse(Mixture):
    def expert(self, expert, rows):
        return torch.sparse.mm(rows.to_sparse(), expert.weight)


class AroundTheLoop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chosen, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            token, _ = torch.where(chosen == e)
            out.index_add_(0, token, x[token] @ weights[e])
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class InOneFunction(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x):
        return AroundTheLoop.apply(x, self.router(x).topk(K, dim=-1)[1], self.weights)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        ctx.save_for_backward(x, number)
        return x * number

    @staticmethod
    def backward(ctx, grad):
        x, number = ctx.saved_tensors
        return grad * number, (grad * x).sum()


class TrainedNumber(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.ones(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            out = out.index_add(0, token, Times.apply(expert(x[token]), self.numbers[e]) * weights[token, choice, None])
        return out


class TokenByToken(Mixture):
    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        return torch.stack([self.experts[chosen[t]](x[t]) * weights[t] for t in range(6)])


FAULTS = {
    TokenByToken: "takes a module out of a list by a number that a tensor holds.*loop over all experts",
    FloatIndex: "getitem fails on what it is given .tensors used as indices must be long.*plain model runs",
    MoreThanThereAre: "topk fails on what it is given.*plain model runs",
    OtherWidth: "the experts of a loop have parameters of shapes.*one function of different parameters",
    OtherDtype: "must have the same dtype.*plain model runs",
    Branch: "depends on values of tensors.*torch.where instead of if",
    Raises: "raises an exception there.*whether the plain model raises",
    Generator: "an object that no graph can hold, such as a generator.*or move it out of forward",
    NoShapes: "does not know the shape of what an op gives.*register_fake",
    Sparse: "does not know the shape of what an op gives.*sparse tensors have none",
    InOneFunction: "a custom autograd function picks rows.*leave the loop over experts outside",
    TrainedNumber: "gives one number of an expert a gradient.*outside of the function",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_model_is_told_in_words_of_users(fault):
    model, x = fault(), torch.randn(6, D)
    with fake_world(2), pytest.raises(MoefxError) as caught:
        moefx.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), example_inputs=(x,))
    error = caught.value
    assert re.search(FAULTS[fault], f"{error.what} {error.hint}", re.DOTALL)
    assert "test_reasons.py" in error.where
    assert re.search(TORCHS, str(error)) is None
