"""Forwards that write in place to what they are given: their callers, and autograd, see it as they see it in eager."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import moefx
from moefx.errors import UnsupportedUse
from tests.support.handmade import Loop
from tests.support.models import redraw
from tests.support.parity import compare, full, gradients
from tests.support.ranks import one_rank
from tests.support.styles import D, E, K, Layer
from tests.support.uncapturable import TOKENS, Deciding


def compiled_alone(model: nn.Module):
    return closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))))


class Writes(Layer):
    """By operators, methods, indices and functions, to an argument and a view of it, before and after the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        x *= torch.empty_like(x).uniform_(0.9, 1.1)
        x.mul_(self.scale)
        flat = x.view(-1, D)
        flat += 0.1
        x[:, 0] = 0.0
        F.dropout(x, 0.2, True, inplace=True)
        rows = x.reshape(-1, D) * 1.0
        weights, chosen = self.router(rows).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        x += out.view_as(x)
        return out.view_as(x) if more is None else more + 1


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_an_argument_that_is_written_to(needs_gradient):
    torch.manual_seed(0)
    plain = Writes()
    with one_rank(), compiled_alone(copy.deepcopy(plain)) as compiled:
        found = []
        for model in (plain, compiled):
            given = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1)).requires_grad_(needs_gradient)
            x = given * 1.5
            torch.manual_seed(2)
            out = model(x)
            (out.pow(2).sum() + (x * torch.linspace(0, 1, D)).sum()).backward()
            found.append({"x": x.detach(), "out": out.detach(), **gradients(model)})
            if needs_gradient:
                found[-1]["grad"] = given.grad
        assert not compare(*found[::-1]).wrong
        assert sum(compiled.moe_stats().popitem()[1].load) == 2 * 5 * K
        x = torch.randn(2, 5, D)
        with pytest.raises(UnsupportedUse, match="argument 0, which shares memory with argument 1"):
            compiled(x, x[:1])


def in_the_router() -> nn.Module:
    """As Switch Transformers come: noise is multiplied in place to what the experts read, too."""
    model, config = Deciding(Loop()), switch.SwitchTransformersConfig(d_model=D, d_ff=24, num_experts=E)
    assert config.router_jitter_noise > 0
    assert config.dropout_rate > 0
    # The first is a block that writes to its input; in the second another op computes what is written to.
    model.layers = nn.ModuleList([switch.SwitchTransformersSparseMLP(config),
                                  switch.SwitchTransformersLayerFF(config, is_sparse=True)])  # fmt: skip
    redraw(model)
    return model.train()


@pytest.mark.filterwarnings("ignore:compiled block by block")
def test_switch_transformers_train_with_their_noise():
    torch.manual_seed(0)
    plain = in_the_router()
    with one_rank(), compiled_alone(copy.deepcopy(plain)) as compiled:
        for step in range(2):
            found = []
            for model in (plain, compiled):
                model.zero_grad()
                torch.manual_seed(step)
                loss = model(TOKENS, labels=TOKENS).loss
                loss.backward()
                grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                found.append({"loss": loss.detach(), **{name: full(grad) for name, grad in grads.items()}})
            idle = {name for name in found[1].keys() - found[0].keys() if not found[1].pop(name).any()}
            assert not compare(found[1], found[0]).wrong
            assert len(found[0]) + len(idle) > 2 * 2 * E
        assert set(compiled.moe_stats()) == {"layers.0", "layers.1"}
