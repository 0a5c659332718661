"""Softmax of a softmax, and what is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import moefx
from moefx.analysis.lints import softmax_twice
from tests.support.families import families, tiny_config
from tests.support.models import chosen

D, E, T = 6, 4, 10


class Balanced(nn.Module):
    def __init__(self, again) -> None:
        super().__init__()
        self.router, self.again = nn.Linear(D, E), again

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.router(x)).square().sum()


def findings(again, *shape: int) -> list[str]:
    found = moefx.lint(Balanced(again), torch.randn(*(shape or (2, T, D))))
    return [each.what for each in found if each.name == softmax_twice.NAME]


def of_the_first_rows(logits: Tensor) -> Tensor:
    return F.softmax(F.softmax(logits, dim=-1).reshape(-1, E)[:7].float(), dim=1)


def of_rows_that_a_mask_picks(logits: Tensor) -> Tensor:
    probs = logits.reshape(-1, E).softmax(1)
    return torch.cat([probs[probs[:, 0] > 0.5], probs.detach()], 0).softmax(-1)


def of_two_layers(logits: Tensor) -> Tensor:
    return torch.stack([logits, (2 * logits).softmax(-1)]).softmax(-1)


@pytest.mark.parametrize("again", [of_the_first_rows, of_rows_that_a_mask_picks, of_two_layers])
def test_softmax_of_a_softmax_is_found(again):
    assert findings(again) == ["softmax is taken of what is a softmax already"]


@pytest.mark.parametrize("again", [
    lambda x: x.softmax(-1) + x.reshape(-1, E).softmax(-1).view_as(x),  # two of the same logits
    lambda x: (8 * x.softmax(-1)).softmax(-1),  # a temperature
    lambda x: x.softmax(-1).topk(2).values.softmax(-1),  # of the chosen ones
    lambda x: x.softmax(-1).softmax(1),  # over tokens
    lambda x: x.softmax(-1).transpose(1, 2).reshape(2, E, -1).softmax(-1),
    lambda x: torch.cat([x.softmax(-1), x], -1).softmax(-1),
    lambda x: torch.stack([x.softmax(-1)] * E, -1).softmax(-1),
    lambda x: x.softmax(-1)[..., 0].softmax(-1),
    lambda x: x[0, 0] + torch.ones(E, E).softmax(-1)[:, 0].softmax(-1),
    lambda x: (x.softmax(-1) @ torch.ones(E, E)).softmax(-1),  # attention
])  # fmt: skip
def test_what_is_near_it_is_none(again):
    assert findings(again) == []


def test_it_says_where_both_are():
    (found,) = moefx.lint(Balanced(of_the_first_rows), torch.randn(2, T, D))
    line = of_the_first_rows.__code__.co_firstlineno + 1
    assert found.where.count(f"test_softmax_twice.py:{line}") == 2


def with_loss(family: str) -> list[str]:
    config = tiny_config(family)
    config.output_router_logits = True
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [each.name for each in moefx.lint(model, input_ids=tokens, labels=tokens)]


def test_the_fault_of_routers_of_transformers_that_return_probabilities(monkeypatch):
    """As those of some ten families did."""
    assert with_loss("mixtral") == []
    route = MixtralTopKRouter.forward

    def faulty(self, hidden_states):
        logits, *rest = route(self, hidden_states)
        return F.softmax(logits.float(), dim=-1), *rest

    monkeypatch.setattr(MixtralTopKRouter, "forward", faulty)
    assert with_loss("mixtral") == [softmax_twice.NAME]


FAULTY: frozenset[str] = frozenset()  # families of the installed transformers
LOOPS = {"dbrx", "longcat_flash"}  # which a model without values does not unroll


@pytest.mark.parametrize("family", chosen(["qwen3_moe"], [each for each in families() if each not in LOOPS]))
def test_which_families_have_it(family):
    assert (softmax_twice.NAME in with_loss(family)) is (family in FAULTY)
