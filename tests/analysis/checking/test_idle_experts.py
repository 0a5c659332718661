"""idle_experts: what a model does for an expert without tokens is compared with what is captured for it."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.analysis.checking import idle_experts
from moefx.capture.trace import trace
from moefx.errors import CaptureError
from tests.support.breadth import places, some
from tests.support.ranks import one_rank
from tests.support.styles import D, E, K, Layer


class Skipping(Layer):
    """A loop over experts; subclasses say what becomes of an expert."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weights, ids = self.router(rows).softmax(-1).topk(K, dim=-1)
        return self.loop(rows, weights, ids)

    def one(self, e: int, rows: Tensor, weights: Tensor, token: Tensor, choice: Tensor) -> Tensor:
        return self.experts[e](rows[token]) * weights[token, choice, None]


class ByRows(Skipping):
    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.one(e, rows, weights, token, choice))
        return out


class ByCounts(Skipping):
    def loop(self, rows, weights, ids):
        counts, out = torch.bincount(ids.flatten(), minlength=E).tolist(), torch.zeros_like(rows)
        for e in range(E):
            if counts[e] > 0:
                token, choice = torch.where(ids == e)
                out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class BySlices(Skipping):
    def loop(self, rows, weights, ids):
        order, found, start = ids.flatten().argsort(), [], 0
        picked, scale = rows[order // K], weights.flatten()[order, None]
        for e, count in enumerate(torch.bincount(ids.flatten(), minlength=E).tolist()):
            if count == 0:
                continue
            found.append(self.experts[e](picked[start : start + count]) * scale[start : start + count])
            start += count
        return torch.zeros_like(rows).index_add(0, order // K, self.joined(found))

    def joined(self, found):
        return torch.cat(found)


class ByKeywords(BySlices):
    def joined(self, found):
        pieces = torch.cat(tensors=found, dim=0)
        return pieces + 0.0 * torch.sum(input=pieces)


class InOwnZeros(Skipping):
    """Rows are put into zeros of their own, which are added; `filled` says what else they hold."""

    def loop(self, rows, weights, ids):
        out = 0
        for e in range(E):
            token, choice = torch.where(ids == e)
            if token.numel() > 0:
                own = torch.zeros_like(rows)
                own[token] = self.one(e, rows, weights, token, choice)
                out = out + self.filled(own)
        return out

    def filled(self, own: Tensor) -> Tensor:
        return own


class InOwnNumbers(InOwnZeros):
    def filled(self, own: Tensor) -> Tensor:
        own[0].add_(1.0)
        return own


class TouchesIdle(Skipping):
    """As is usual where every parameter needs a gradient."""

    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if len(token) == 0:
                out = out + 0.0 * self.experts[e](rows[:1]).sum()
            else:
                out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class AddsForIdle(Skipping):
    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                out = out + 0.5
                continue
            out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class WritesForIdle(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("idle", torch.zeros(E))

    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                self.idle[e] += 1
                continue
            out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class CountsVisits(Skipping):
    def loop(self, rows, weights, ids):
        out, visits = torch.zeros_like(rows), 0
        for e in range(E):
            token, choice = torch.where(ids == e)
            if token.numel() > 0:
                out, visits = out.index_add(0, token, self.one(e, rows, weights, token, choice)), visits + 1
        return out / visits


class CountsOnHost(Skipping):
    def loop(self, rows, weights, ids):
        counts, out = torch.bincount(ids.flatten(), minlength=E).tolist(), torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.one(e, rows, weights, token, choice))
        return out / sum(1 for count in counts if count > 0)


class AsksTheNext(Skipping):
    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if torch.where(ids == (e + 1) % E)[0].numel() == 0:
                continue
            out.index_add_(0, token, self.one(e, rows, weights, token, choice))
        return out


class CountsTheNext(Skipping):
    def loop(self, rows, weights, ids):
        counts, out = torch.bincount(ids.flatten(), minlength=E).tolist(), torch.zeros_like(rows)
        for e in range(E):
            if counts[(e + 1) % E] == 0:
                continue
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class FirstOnly(Skipping):
    def loop(self, rows, weights, ids):
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            if e == 0 and token.numel() == 0:
                out = out + 0.5
                continue
            out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        return out


class NobodyThere(Skipping):
    """Asks for tokens before there are experts."""

    def loop(self, rows, weights, ids):
        if (rows[:, 0] > 9).nonzero().numel() == 0:
            return rows * 3
        return ByRows.loop(self, rows, weights, ids)


class WithBound(Skipping):
    """A loop over experts that take some of their tokens, or are left out (None); subclasses say which. The bound
    depends on the input."""

    def loop(self, rows, weights, ids):
        out, bound = torch.zeros_like(rows), int(rows.shape[0] * K / E * 0.8)
        gates = rows.new_zeros(rows.shape[0], E).scatter(1, ids, weights)
        for e in range(E):
            token = (ids == e).any(-1).nonzero().squeeze(-1)
            token = self.taken(token, bound, rows)
            if token is None:
                continue
            out = out.index_add(0, token, self.experts[e](rows[token]) * gates[token, e, None])
        return out


class ByTernary(WithBound):
    limit = True

    def taken(self, token, bound, rows):
        return token[:bound] if self.limit and token.numel() > bound else token


class ByStatement(WithBound):
    def taken(self, token, bound, rows):
        if len(token) >= bound:
            token = token[0:bound]
        return token


class TheOtherWay(WithBound):
    def taken(self, token, bound, rows):
        return token if bound >= token.shape[0] else token[:bound]


class OneNumber(WithBound):
    def taken(self, token, bound, rows):
        return token[:3] if token.size(0) > 3 else token


class AndIdle(WithBound):
    """Both kinds of conditions."""

    def taken(self, token, bound, rows):
        if token.numel() > bound:
            token = token[:bound]
        return None if token.numel() == 0 else token


class Dropped(WithBound):
    """As labml's Switch without shuffling: what is above the bound passes as it is."""

    def loop(self, rows, weights, ids):
        out, bound = torch.zeros_like(rows), int(rows.shape[0] * K / E * 0.8)
        gates = rows.new_zeros(rows.shape[0], E).scatter(1, ids, weights)
        tokens = [(ids == e).any(-1).nonzero().squeeze(-1) for e in range(E)]
        dropped = []
        for e in range(E):
            if len(tokens[e]) <= bound:
                continue
            dropped.append(tokens[e][bound:])
            tokens[e] = tokens[e][:bound]
        for e in range(E):
            out = out.index_add(0, tokens[e], self.experts[e](rows[tokens[e]]) * gates[tokens[e], e, None])
        if dropped:
            dropped = torch.cat(dropped)
            out = out.index_add(0, dropped, rows[dropped])
        return out


class AnotherBound(WithBound):
    def taken(self, token, bound, rows):
        return token[: bound - 1] if token.numel() > bound else token


class NoneCut(WithBound):
    """What is sliced fits."""

    def taken(self, token, bound, rows):
        return token[:bound] if token.numel() < bound else token


class AnotherCount(WithBound):
    def taken(self, token, bound, rows):
        other = (rows[:, 0] > 0).nonzero().squeeze(-1)
        return token[:bound] if other.numel() > bound else token


class TheLast(WithBound):
    def taken(self, token, bound, rows):
        return token[-bound:] if token.numel() > bound else token


class Nothing(WithBound):
    def taken(self, token, bound, rows):
        return token[:bound] if token.numel() > bound else token[:0]


class Backwards(WithBound):
    def taken(self, token, bound, rows):
        return token[:bound] if token.numel() > bound else token.flip(0)


class IdleFirst(WithBound):
    """Those without tokens are not asked for more."""

    def taken(self, token, bound, rows):
        if token.numel() == 0:
            return None
        return token[:bound] if token.numel() > bound else token


class IdleElse(WithBound):
    """Asks for no tokens only where there are few, and then takes one."""

    def taken(self, token, bound, rows):
        if token.numel() > bound:
            return token[:bound]
        return token.new_zeros(1) if token.numel() == 0 else token


class IdleFlagged(WithBound):
    """The same, asked for everywhere."""

    def taken(self, token, bound, rows):
        many = token.numel() > bound
        token = token[:bound] if many else token
        return token.new_zeros(1) if token.numel() == 0 and not many else token


class BothIdle(Skipping):
    """Does something if two experts are idle."""

    def loop(self, rows, weights, ids):
        out, found = torch.zeros_like(rows), [torch.where(ids == e) for e in range(E)]
        for e, (token, choice) in enumerate(found):
            out = out.index_add(0, token, self.one(e, rows, weights, token, choice))
        if found[0][0].numel() == 0 and found[1][0].numel() == 0:
            out = out + 0.5
        return out


class TwoBounds(WithBound):
    def taken(self, token, bound, rows):
        if token.numel() > bound:
            return token[:bound]
        return token[1:] if token.numel() > 2 else token


def check(layer: nn.Module, asked: int = E) -> None:
    leaves, spec = pytree.tree_flatten(((torch.randn(2, 6, D),), {}))
    full, *parts = trace(layer, layer, leaves, spec, torch.device("cpu")).idle
    assert (len(full.trust.sizes), len(parts)) == (asked, min(asked, 2))
    for part in parts:
        idle_experts.check(full.gm, full.trust, part.gm, part.trust)


@pytest.mark.parametrize("style", [ByRows, ByCounts, BySlices, ByKeywords, TouchesIdle, InOwnZeros])
def test_leaving_out_is_right(style):
    check(style())


class Checkpointed(nn.Module):
    """All of it in the body of an activation checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("make", places(
    [ByRows, ByCounts, BySlices, TouchesIdle, lambda: Checkpointed(ByRows())], 2, 4),
                         ids=["rows", "counts", "slices", "touches idle", "in another checkpoint"])  # fmt: skip
def test_leaving_out_is_right_in_a_checkpoint(make):
    layer, x = Checkpointed(make()), torch.randn(2, 6, D)
    check(layer)
    plain = copy.deepcopy(layer)
    with one_rank(), closing(moefx.compile(layer, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for rows in (x, x[:1, :1].expand(2, 6, D).contiguous()):
            torch.testing.assert_close(compiled(rows), plain(rows))
        assert "grouped.grouped_linear" in moefx.inspect(compiled).code["forward"]


REFUSED = [
    (AddsForIdle, "does more than leave it out"),
    (WritesForIdle, "does more than leave it out"),
    (InOwnNumbers, "does more than leave it out"),
    (CountsVisits, "does more than leave it out"),
    (CountsOnHost, "does more than leave it out"),
    (AsksTheNext, "asks for its tokens elsewhere"),
    (CountsTheNext, "left out because of the number of tokens of another one"),
]


@pytest.mark.parametrize(("style", "message", "where"), places(
    [(*each, where) for where in (nn.Sequential, Checkpointed) for each in REFUSED], *range(len(REFUSED) + 1)))
def test_anything_else_is_refused(style, message, where):
    with pytest.raises(CaptureError, match=message) as caught:
        check(where(style()))
    assert "test_idle_experts.py:" in str(caught.value)


@pytest.mark.parametrize(("style", "asked"), [(FirstOnly, 1), (NobodyThere, E + 1)])
def test_every_condition_is_taken_both_ways(style, asked):
    with pytest.raises(CaptureError, match="does more than leave it out"):
        check(style(), asked)


def check_all(layer: nn.Module) -> None:
    leaves, spec = pytree.tree_flatten(((torch.randn(2, 6, D),), {}))
    full, *others = trace(layer, layer, leaves, spec, torch.device("cpu")).idle
    for part in others:
        idle_experts.check(full.gm, full.trust, part.gm, part.trust)


@pytest.mark.parametrize(("style", "parts"), [
    (ByTernary, 2), (ByStatement, 2), (TheOtherWay, 2), (OneNumber, 2), (NoneCut, 2), (AndIdle, 4),
    (IdleFirst, 4),
    (Dropped, 2),
])  # fmt: skip
def test_a_slice_to_a_bound_needs_no_condition(style, parts):
    layer = style()
    leaves, spec = pytree.tree_flatten(((torch.randn(2, 6, D),), {}))
    full, *others = trace(layer, layer, leaves, spec, torch.device("cpu")).idle
    assert (len(full.trust.cuts), len(others)) == (E, parts)
    for part in others:
        idle_experts.check(full.gm, full.trust, part.gm, part.trust)


@pytest.mark.parametrize("style", some([ByTernary, ByStatement, TheOtherWay, OneNumber, AndIdle, IdleFirst],
                                       ByStatement, IdleFirst))  # fmt: skip
def test_bounds_hold_above_and_below_them(style):
    layer = style()
    plain = copy.deepcopy(layer)
    with one_rank(), closing(moefx.compile(layer, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))) as compiled:
        for tokens in (6, 9, 3):
            spread = torch.randn(2, tokens, D)
            for x in (spread, spread[:1, :1].expand(2, tokens, D).contiguous()):
                torch.testing.assert_close(compiled(x), plain(x))
        assert "grouped.grouped_linear" in moefx.inspect(compiled).code["forward"]


@pytest.mark.parametrize("style", [
    AnotherBound, AnotherCount, TheLast, Nothing, Backwards, TwoBounds, IdleElse, IdleFlagged, BothIdle,
])  # fmt: skip
def test_other_conditions_on_bounds_are_refused(style):
    with pytest.raises(CaptureError) as caught:
        check_all(style())
    assert "test_idle_experts.py:" in str(caught.value)


def test_nothing_is_compared_where_nothing_was_asked():
    layer = nn.Linear(D, D)
    leaves, spec = pytree.tree_flatten(((torch.randn(6, D),), {}))
    assert trace(layer, layer, leaves, spec, torch.device("cpu")).idle is None
