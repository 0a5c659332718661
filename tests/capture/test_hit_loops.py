"""Loops over hit experts: captured as loops over all where that computes the same, and refused where it does not."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.capture import hit_loops
from moefx.errors import CaptureError
from tests.support.breadth import places, some
from tests.support.ranks import fake_world, one_rank

E, D = 6, 8
FACTOR = 1.0


class Experts(nn.Module):
    """counts: the result tells how many experts were visited. sentinel: so many masks more than experts. item: numbers
    are taken from the tensor."""

    def __init__(self, *, counts: bool = False, sentinel: int = 0, item: bool = False) -> None:
        super().__init__()
        self.counts, self.sentinel, self.item = counts, sentinel, item
        self.router = nn.Linear(D, E)
        self.weight = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).topk(2)
        return self.run(x, weights, idx)

    def run(self, x, weights, idx):
        return self.body(x, weights, idx)


class Body(nn.Module):
    def __init__(self, owner: Experts) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x, weights, idx):
        owner, visited = self.owner[0], 0
        out = torch.zeros_like(x)
        mask = F.one_hot(idx, E + owner.sentinel).permute(2, 1, 0)
        hit = mask.sum((-1, -2)).nonzero()
        for e in hit:
            e = e.item() if owner.item else e[0]
            k, t = torch.where(mask[e])
            out.index_add_(0, t, F.silu(x[t] @ owner.weight[e]) * weights[t, k, None] * FACTOR)
            visited = visited + 1
        return out + visited if owner.counts else out


def model(**how) -> nn.Module:
    torch.manual_seed(0)
    experts = Experts(**how)
    experts.body = Body(experts)
    return nn.Sequential(nn.Linear(D, D), experts)


@pytest.mark.parametrize("how", places([{}, {"sentinel": 1}, {"item": True}], 1, 2), ids=["rows", "sentinel", "item"])
def test_all_experts_are_visited(how):
    with fake_world(2), closing(moefx.compile(model(**how), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)),
                                              verify=2)) as compiled:  # fmt: skip
        compiled.prepare(torch.randn(10, D))
        assert "all_to_all" in moefx.inspect(compiled).code["forward"]


def test_numbers_are_those_of_the_model():
    plain, x = model(), torch.randn(5, D)
    wanted = plain(x)
    wanted.square().sum().backward()
    with one_rank(), closing(moefx.compile(model(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        given = compiled(x)
        given.square().sum().backward()
        torch.testing.assert_close(given, wanted)
        for mine, own in zip(compiled.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.grad.full_tensor(), own.grad)
        assert not any("forward" in module.__dict__ for module in compiled.modules() if module is not compiled)


class ByNumber(nn.Module):
    """Old transformers' Switch without a capacity. how: ways to say which experts were hit, as numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(D, E)
        self.experts = nn.ModuleDict({f"expert_{e}": nn.Linear(D, D) for e in range(E)})

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).max(-1)
        mask = F.one_hot(idx, E).bool()
        out = x.clone()
        counts = mask.reshape(-1, E).sum(0)
        if self.how == "first":
            hit = torch.nonzero(counts, as_tuple=True)[0].tolist()
        if self.how == "tensors":
            hit = counts.nonzero(as_tuple=True)[0]
        if self.how == "where":
            hit = torch.where(counts > 0)[0].tolist()
        if self.how == "flat":
            hit = counts.nonzero().flatten().tolist()
        if self.how == "squeezed":
            hit = torch.nonzero(counts).squeeze(-1).cpu().numpy()
        if self.how == "viewed":
            hit = torch.nonzero(counts).view(-1).tolist()
        for e in hit:
            out[mask[..., e]] = self.experts[f"expert_{e}"](x[mask[..., e]])
        return weights.unsqueeze(-1) * out


@pytest.mark.parametrize("how", some(["first", "tensors", "where", "flat", "squeezed", "viewed"],
                                     "tensors", "where", "viewed"))  # fmt: skip
def test_experts_that_were_hit_by_their_numbers(how):
    torch.manual_seed(0)
    plain, x = ByNumber(how), torch.randn(2, 5, D)
    wanted = plain(x)
    wanted.square().sum().backward()
    with one_rank(), closing(moefx.compile(copy.deepcopy(plain), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)),
                                           )) as compiled:  # fmt: skip
        compiled.zero_grad()
        given = compiled(x)
        given.square().sum().backward()
        torch.testing.assert_close(given, wanted)
        assert len(moefx.explain(compiled).programs[0].regions) == 1
        for mine, own in zip(compiled.parameters(), plain.parameters()):
            assert (mine.grad is None) == (own.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), own.grad)


def test_globals_of_what_was_rewritten_are_looked_at(monkeypatch):
    plain, x = model(), torch.randn(5, D)
    with one_rank(), closing(moefx.compile(model(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for factor in (1.0, 3.0, 1.0):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            torch.testing.assert_close(compiled(x), plain(x))
        assert len(compiled._variants) == 2


class AllWithoutGradient(nn.Module):
    """DeepSeek-MoE's code for inference: all under no_grad, by a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).topk(2)
        return x + self.add_up(x, idx.view(-1), weights.view(-1, 1))

    @torch.no_grad()
    def add_up(self, x, idx, weights):
        out, order = torch.zeros_like(x), idx.argsort()
        ends, tokens = idx.bincount().cpu().numpy().cumsum(0), order // 2
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            mine = tokens[start:end]
            y = self.experts[e](x[mine])
            y.mul_(weights[order[start:end]])
            out.scatter_reduce_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), y, reduce="sum")
        return out


def test_what_is_rewritten_stays_without_gradients():
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(D, D), AllWithoutGradient()), torch.randn(3, D)
    again = copy.deepcopy(plain)
    with one_rank(), closing(moefx.compile(again, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for batch in (x, torch.randn(20, D)):
            given, wanted = compiled(batch), plain(batch)
            torch.testing.assert_close(given, wanted)
            given.square().sum().backward()
            wanted.square().sum().backward()
        for mine, own in zip(compiled.parameters(), plain.parameters()):
            assert (mine.grad is None) == (own.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), own.grad)


def test_what_an_idle_expert_changes_is_not_rewritten():
    with one_rank():
        compiled = moefx.compile(model(counts=True), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        with pytest.raises(CaptureError, match="for e in hit"):
            compiled(torch.randn(3, D))
        compiled.close()


def test_only_loops_over_hits_are_found():
    plain = nn.Sequential(nn.Linear(D, D), nn.ReLU())
    assert hit_loops.find(plain, {"0": [((torch.randn(2, D),), {})], "1": [((torch.randn(2, D),), {})]}) == {}


class Conditions(nn.Module):
    """A loop that leaves experts out by a condition on the mask of their tokens; hits: counts visits in a buffer."""

    def __init__(self, *, hits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E)
        self.weight = nn.Parameter(torch.randn(E, D, D))
        self.register_buffer("hits", torch.zeros(E) if hits else None)

    def call(self) -> dict:
        return {"": [((torch.randn(20, D),), {})]}


class FewerThanThree(Conditions):
    def forward(self, x):
        _, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.sum() < 3:
                continue
            out[mask] += x[mask] @ self.weight[e]
        return out


class FewerThanOne(Conditions):
    def forward(self, x):
        _, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.sum() < 1 or not mask.any():
                continue
            if self.hits is not None:
                self.hits[e] += 1
            out[mask] += x[mask] @ self.weight[e]
        return out


def test_only_conditions_that_ask_for_emptiness_are_rewritten():
    """A first batch where every expert has many tokens says nothing of a threshold."""
    found = {kind: hit_loops.find(layer := kind(), layer.call()) for kind in (FewerThanThree, FewerThanOne)}
    assert [len(forwards) for forwards in found.values()] == [0, 1]


def test_what_a_visit_leaves_in_a_buffer_counts():
    layer = FewerThanOne(hits=True)
    assert hit_loops.find(layer, layer.call()) == {}
    assert not layer.hits.any(), "trying it out changed the buffer"


def test_a_rewritten_forward_keeps_its_lines():
    layer = FewerThanOne()
    (loops,) = hit_loops.find(layer, layer.call()).values()
    assert loops.methods["forward"].__code__.co_firstlineno == FewerThanOne.forward.__code__.co_firstlineno


class InHelpers(Conditions):
    def forward(me, x):
        weights, idx = me.router(x).softmax(-1).topk(2)
        return me.experts(x, weights, idx)

    def experts(self, x, weights, idx):
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.any():
                out[mask] += self.one(e, x[mask])
        return out

    def one(self, e, rows):
        return rows @ self.weight[e]


def test_loops_in_helpers_are_rewritten():
    layer = InHelpers()
    (loops,) = hit_loops.find(layer, layer.call()).values()
    assert list(loops.methods) == ["experts"]
    x = torch.randn(9, D)
    wanted = layer(x)
    with one_rank(), closing(moefx.compile(layer, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        torch.testing.assert_close(compiled(x), wanted)
        assert "grouped.grouped_linear" in moefx.inspect(compiled).code["forward"]


class TouchesIdle(Conditions):
    """An idle expert's parameters get a gradient of zeros."""

    def forward(self, x):
        _, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.any():
                out[mask] += x[mask] @ self.weight[e]
            elif self.training:
                out[0, 0] += self.nothing(e)
        return out

    def nothing(self, e):
        return 0 * self.weight[e].sum()


class TouchesIdleInPlace(TouchesIdle):
    def forward(self, x):
        _, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.any():
                out[mask] += x[mask] @ self.weight[e]
            elif self.training:
                out[0, 0] += 0 * self.weight[e].sum()
            else:
                out = out + self.weight[e].sum() * 0.0
        return out


def test_what_is_multiplied_by_zero_for_an_idle_expert_is_left_out():
    """A call says nothing of its gradient: the product has to be written there."""
    found = {kind: hit_loops.find(layer := kind(), layer.call()) for kind in (TouchesIdle, TouchesIdleInPlace)}
    assert [len(forwards) for forwards in found.values()] == [0, 1]


class ModulesByRow(Conditions):
    """As Qwen3-MoE was written in transformers 4: lists of modules and masks are indexed by a tensor of one number."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        mask = F.one_hot(idx, num_classes=E).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit:
            layer = self.experts[expert_idx]
            k, token = torch.where(mask[expert_idx].squeeze(0))
            rows = layer(x[None, token].reshape(-1, D)) * weights[token, k, None]
            out.index_add_(0, token, rows.to(x.dtype))
        return out


def test_rows_of_nonzero_may_index_lists_of_modules():
    layer, x = ModulesByRow(), torch.randn(9, D)
    wanted = layer(x)
    with one_rank(), closing(moefx.compile(layer, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        torch.testing.assert_close(compiled(x), wanted)
        assert "grouped.grouped_linear" in moefx.inspect(compiled).code["forward"]


class AnotherInEvaluation(Conditions):
    """As DeepSeek's: evaluation sorts, and leaves out idle experts by numbers of numpy."""

    def forward(self, x):
        weights, idx = self.router(x).softmax(-1).topk(2)
        if not self.training:
            return self.sorted(x, weights, idx)
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(idx == e)
            out = out.index_add(0, token, x[token] @ self.weight[e] * weights[token, choice, None])
        return out

    @torch.no_grad()
    def sorted(self, x, weights, idx):
        order, start, found = idx.view(-1).argsort(), 0, []
        for e, count in enumerate(torch.bincount(idx.view(-1), minlength=E).cpu().numpy()):
            if count == 0:
                continue
            found.append(x[order[start : start + count] // 2] @ self.weight[e])
            start += count
        rows = torch.cat(found)
        new = torch.empty_like(rows)
        new[order] = rows
        return new.view(*idx.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)


def on_one(model):
    return moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))


class AddsInEvaluation(AnotherInEvaluation):
    """Every visit adds something."""

    def sorted(self, x, weights, idx):
        out = torch.zeros_like(x)
        for count in torch.bincount(idx.view(-1), minlength=E).cpu().numpy():
            if count == 0:
                continue
            out = out + 1
        return out


@pytest.mark.parametrize("first", ["train", "eval"])
def test_loops_of_either_mode_are_rewritten(first):
    x, plain = torch.randn(9, D), AnotherInEvaluation()
    with one_rank(), closing(on_one(AnotherInEvaluation())) as compiled:
        for training in ((True, False) if first == "train" else (False, True)) * 2:
            torch.testing.assert_close(compiled.train(training)(x), plain.train(training)(x))
        assert len(compiled._whole.variants) == 2


def test_loops_of_the_other_mode_that_add_something_are_refused():
    x = torch.randn(1, D)
    with one_rank(), closing(on_one(AddsInEvaluation())) as compiled:
        compiled(x)
        with pytest.raises(CaptureError, match="values of tensors"):
            compiled.eval()(x)


class CountsInEvaluation(Conditions):
    """Loops over hit experts, and only evaluation adds something for each visit."""

    def forward(self, x):
        _, idx = self.router(x).softmax(-1).topk(2)
        out, visited = torch.zeros_like(x), 0
        for e in range(E):
            mask = (idx == e).any(-1)
            if mask.any():
                out[mask] += x[mask] @ self.weight[e]
                visited += 1
        return out if self.training else out + visited


def test_what_was_tried_out_in_training_is_not_taken_for_evaluation():
    x = torch.randn(1, D)
    with one_rank(), closing(on_one(CountsInEvaluation())) as compiled:
        torch.testing.assert_close(compiled(x), CountsInEvaluation()(x))
        with pytest.raises(CaptureError, match="values of tensors"):
            compiled.eval()(x)
    with one_rank(), closing(on_one(InHelpers())) as compiled:
        for training in (True, False):
            torch.testing.assert_close(compiled.train(training)(x), InHelpers()(x))
