"""Experts that move between steps: the run stays the same bit for bit, and what cannot move is refused on all ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import DivergenceError, UnsupportedUse
from moefx.runtime.expert_tensor import layout_of
from tests.support.handmade import Capacity, OneLayer
from tests.support.parity import full
from tests.support.ranks import fake_world
from tests.support.sharing import run_sharing

D, H, EXPERTS, RANKS = 8, 16, 4, 3
DP2_EP3 = (2, RANKS), ("dp", "ep")  # room for two experts on every rank

# Behind which step, or between its backward and its update, and the homes of both mixtures: a rank may have no experts,
# and optimizers lag behind by two moves.
MOVES = {0.5: [([0, 2, 1, 0], [2, 2, 0, 1])], 1: [([2, 0, 0, 1], [0, 1, 0, 1])],
         2: [([0, 0, 2, 2], [2, 0, 1, 2]), ([2, 2, 1, 1], [1, 2, 2, 1])]}  # fmt: skip


class Mixture(nn.Module):
    def __init__(self, stacked: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        self.stacked = stacked
        if stacked:
            self.up, self.down = nn.Parameter(torch.randn(EXPERTS, H, D)), nn.Parameter(torch.randn(EXPERTS, D, H))
            self.bias = nn.Parameter(torch.randn(EXPERTS, H))
        else:
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(chosen == e)
            if self.stacked:
                rows = F.linear(F.linear(x[token], self.up[e], self.bias[e]).relu(), self.down[e])
            else:
                rows = self.experts[e](x[token]).relu()
            y.index_add_(0, token, rows * weights[token, choice, None])
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixture(), Mixture(stacked=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x))


class ReadOutside(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.mean()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    experts = list(model.second.parameters())
    return [torch.optim.AdamW(model.first.parameters(), lr=0.01, foreach=True),
            torch.optim.SGD(experts[:5], lr=0.1, momentum=0.9), torch.optim.AdamW(experts[5:], lr=0.01, fused=True)]


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor, then: Callable = lambda: None) -> None:
    model(x).square().mean().backward()
    then()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def move(model: nn.Module, homes: list[tuple[list[int], list[int]]]) -> None:
    for first, second in homes:
        model.move_experts({"first": first, "second.experts.2.bias": second})
        assert list(model.placement_state()["homes"].values()) == [first, second]


def values(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    names = {param: name for name, param in model.named_parameters()}
    state = {f"{names[param]} {key}": full(value) for optimizer in optimizers
             for param, each in optimizer.state.items() for key, value in each.items()}  # fmt: skip
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()} | state


def train_with_moves(rank: int, world: int, models: list[nn.Module], batches: Tensor) -> None:
    mesh = init_device_mesh("cpu", DP2_EP3[0], mesh_dim_names=DP2_EP3[1])
    with closing(moefx.compile(models[rank], mesh, example_inputs=(batches[0, 0],))) as model:
        start, objects = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
        runs = []
        for moves in ({}, MOVES):
            model.load_state_dict(start)
            optimizers = optimizers_of(model)
            for number, batch in enumerate(batches[rank]):
                step(model, optimizers, batch, functools.partial(move, model, moves.get(number + 0.5, [])))
                move(model, moves.get(number, []))
            model._replicas.compare(model._homes)
            runs.append(values(model, optimizers))
        check_what_was_saved(rank, model, optimizers[0], start)
        check_refusals(rank, model, batches[rank, 0])
    assert dict(model.named_parameters()) == objects
    different = [name for name, value in runs[0].items() if not torch.equal(value, runs[1][name])]
    assert not different, different


def check_what_was_saved(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, start: dict) -> None:
    """With other homes: it is loaded to where experts live now."""
    saved, param = copy.deepcopy(optimizer.state_dict()), model.first.up
    before = full(optimizer.state[param]["exp_avg"]).clone()
    first = {name: full(value) for name, value in start.items()}
    move(model, [([1, 0, 1, 0], [2, 0, 1, 2])])
    model.load_state_dict(start)
    assert all(torch.equal(full(p.detach()), first[name]) for name, p in model.named_parameters())
    optimizer.load_state_dict(saved)
    assert layout_of(optimizer.state[param]["exp_avg"]) != layout_of(param)
    kept = optimizer.state.pop(param) if rank == 1 else None
    with pytest.raises(DivergenceError, match="rank 1 has other optimizer state"):
        model._moves.follow(model._ranks(), optimizer, model)
    optimizer.state.update({} if kept is None else {param: kept})
    model._moves.follow(model._ranks(), optimizer, model)
    assert layout_of(optimizer.state[param]["exp_avg"]) == layout_of(param)
    assert torch.equal(full(optimizer.state[param]["exp_avg"]), before)


def check_refusals(rank: int, model: nn.Module, x: Tensor) -> None:
    """On all ranks, and nothing has moved."""
    before, there = model.placement_state()["homes"], [0, 1, 2, 0]

    def refused(words: str, owners: dict[str, list[int]], kind: type = UnsupportedUse) -> None:
        with pytest.raises(kind, match=words):
            model.move_experts({"second": [2, 1, 0, 0], **owners})
        assert model.placement_state()["homes"] == before

    refused("3 homes at place 0 of 'ep', at most 2 fit", {"first": [0, 0, 0, 1]})
    refused("cannot live at place 3 of 'ep', which has 3", {"first": [0, 0, 3, 1]})
    refused("2 owners, but there are 4 experts", {"first": [0, 1]})
    refused("no program spreads experts of third\n.*\n.*there are first, second", {"third": there})
    refused(r"(?s)owners are \{'second.*path of a module", {"first": 3})
    refused("share experts", {"second.experts.1.weight": there})
    refused("(?s)rank 1 moves.*rank 0", {"first": there[::-1] if rank == 1 else there}, DivergenceError)
    output = model(x) if rank == 1 else model(x).detach()
    refused("backward of step .* is to come", {})
    del output
    with model.no_sync():
        model(x).sum().backward()
    refused("gradients of .* wait", {})
    model.zero_grad()
    (optimizer, *_) = optimizers = optimizers_of(model)
    step(model, optimizers, x)
    if rank == 2:
        optimizer.state[model.first.up]["rows"] = torch.zeros(EXPERTS)
    refused("AdamW's `rows` of `first.up` could not follow", {"first": there})


def test_a_run_with_moves_is_the_same_bit_for_bit():
    torch.manual_seed(0)
    model = Model()
    run_sharing(6, train_with_moves, [copy.deepcopy(model) for _ in range(6)], torch.randn(6, 4, 7, D))


@pytest.mark.parametrize(("make", "sizes", "options", "why"), [
    (Mixture, (2, 2), {}, "are cut over 'esp'"),
    (ReadOutside, (2, 1), {}, "every rank has some of their weights whole"),
    pytest.param(Mixture, (4, 1), {"alltoall": "dedup", "ranks_per_node": 2}, "to a node", marks=pytest.mark.full),
    pytest.param(lambda: OneLayer(Capacity(num_experts=4)), (2, 1), {}, "static blocks", marks=pytest.mark.full),
])  # fmt: skip
def test_what_has_its_experts_in_order_stays(make, sizes, options, why):
    with fake_world(sizes[0] * sizes[1]):
        mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=("ep", "esp")), make()
        name, x = "the model", torch.randn(6, D)
        if isinstance(model, OneLayer):
            name, x = "mlp", torch.arange(12).view(2, 6)
        with closing(moefx.compile(model, mesh, **options, example_inputs=(x,))) as compiled:
            before = compiled.placement_state()
            with pytest.raises(UnsupportedUse, match=f"the experts of {name} cannot move: .*{why}"):
                compiled.move_experts({name: [1, 1, 0, 0]})
            assert compiled.placement_state() == before
