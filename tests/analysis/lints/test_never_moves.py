"""Parameters that are trained by name and get no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefx
from moefx.analysis.lints.never_moves import CHOICE, OTHER, UNREAD

D, E, K, T = 6, 4, 2, 10


class MoE(nn.Module):
    def __init__(self, weigh: str = "", expert: str = "", bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.correction = nn.Parameter(torch.zeros(E)) if bias else None
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.weigh, self.expert = weigh, expert

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = (scores if self.correction is None else scores + self.correction).topk(K, dim=-1).indices
        with torch.set_grad_enabled(self.weigh != "no_grad"):
            weights = scores.gather(1, chosen)
        if self.weigh == "detach":
            weights = weights.detach()
        if self.weigh == "indices":
            weights = torch.ones_like(weights)
        if self.weigh == "straight":  # ones, by which the gradient passes
            weights = torch.ones_like(weights) + weights - weights.detach()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            y = expert(x[rows])
            y = y.detach() if self.expert == "detach" and number == 1 else y
            if self.expert == "put":
                out[rows] += y * weights[rows, place, None]
            else:
                out.index_add_(0, rows, y * weights[rows, place, None])
        return out


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(D, D), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Adapted(nn.Module):
    """An expert with an adapter beside its frozen weight, as PEFT puts it there."""

    def __init__(self, *, is_called: bool) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.base.requires_grad_(False)
        self.is_called = is_called

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight) + (self.b(self.a(x)) if self.is_called else 0)


def findings(*layers: nn.Module, edit=lambda model: model) -> dict[str, str]:
    model = Model(*layers)
    edit(model)
    return {each.name: each.what for each in moefx.lint(model, torch.randn(T, D))}


@pytest.mark.parametrize("weigh", ["no_grad", "detach", "indices"])
def test_a_router_that_no_gradient_reaches(weigh):
    found = findings(MoE(weigh))
    assert list(found) == [CHOICE]
    assert found[CHOICE].endswith("layers.0.router.weight")


@pytest.mark.parametrize("weigh", ["", "straight"])
def test_a_router_that_learns(weigh):
    assert findings(MoE(weigh)) == {}


def test_a_router_that_is_meant_to_stay():
    assert findings(MoE("detach"), edit=lambda model: model.layers[0].router.requires_grad_(False)) == {}


def test_a_bias_that_only_chooses():
    assert findings(MoE(bias=True)) == {CHOICE: "no gradient reaches what routes or picks tokens: layers.0.correction"}


def test_an_expert_that_no_gradient_reaches():
    found = findings(MoE(expert="detach"))
    assert found == {OTHER: "no gradient reaches layers.0.experts.1.weight, layers.0.experts.1.bias"}


def test_gradients_go_through_what_is_written_in_place():
    assert findings(MoE(expert="put")) == {}


def test_an_adapter_that_nobody_calls():
    found = findings(Adapted(is_called=False))
    assert found == {UNREAD: "a call like this never reads layers.0.a.weight, layers.0.b.weight"}
    assert findings(Adapted(is_called=True)) == {}


def test_other_towers_and_layers_may_have_their_turn_in_other_calls():
    def edit(model: Model) -> None:
        model.other, model.towers = nn.Linear(D, D), nn.ModuleList([MoE(), MoE()])

    assert findings(MoE(), edit=edit) == {}


def test_equal_layers_are_one_finding_that_says_where():
    (found,) = moefx.lint(Model(*(MoE("detach") for _ in range(3))), torch.randn(T, D))
    assert "layers.0 to 2.router.weight" in found.what
    assert "test_never_moves.py:" in found.where
    assert "requires_grad_(False)" in found.hint


class Evaluated(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def test_a_call_that_nobody_trains_by_has_none():
    assert moefx.lint(Evaluated(MoE()), torch.randn(T, D)) == []


def test_a_model_that_is_frozen_has_none():
    assert findings(MoE("detach"), edit=lambda model: model.requires_grad_(False)) == {}
