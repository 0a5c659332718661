"""Kernels against the plain torch expressions they stand for, and their backwards against autograd of those."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moefx.ir import ops  # noqa: F401  the dialect
from moefx.placement.tables import BITS
from moefx.runtime import kernels

SETTINGS = settings(max_examples=40, deadline=None)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """idx [T, K] and E: even, skewed or all-to-one routing, now and then with ids out of range."""
    T, K, E = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    low, high = draw(st.sampled_from([(0, E - 1), (0, 0), (E - 1, E - 1), (-2, E + 1)]))
    numbers = draw(st.lists(st.integers(low, high), min_size=T * K, max_size=T * K))
    return torch.tensor(numbers, dtype=torch.int64).view(T, K), E


def plain_slots(idx: Tensor, table: Tensor, quota: Tensor) -> list[int | None]:
    """Destination of each pair by the definition: one after the other, None if dropped."""
    used = torch.zeros_like(quota)
    slots: list[int | None] = []
    for expert in idx.flatten().tolist():
        if not 0 <= expert < table.shape[0]:
            slots.append(None)
            continue
        valid = [p for p in range(table.shape[1]) if table[expert, p] >= 0]
        free = [p for p in valid if used[expert, p] < quota[expert, p]]
        replica = free[0] if free else valid[-1]
        used[expert, replica] += 1
        slots.append(int(table[expert, replica]))
    return slots


def assert_routed(perm: Tensor, counts: Tensor, slots: list[int | None], num_slots: int) -> None:
    keys = [num_slots if slot is None else slot for slot in slots]
    assert perm.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    assert counts.tolist() == [keys.count(slot) for slot in range(num_slots)]
    assert perm.dtype == counts.dtype == torch.int64


@SETTINGS
@given(routings())
def test_route_by_expert(routing: tuple[Tensor, int]) -> None:
    idx, E = routing
    slots = [expert if 0 <= expert < E else None for expert in idx.flatten().tolist()]
    assert_routed(*kernels.route(idx, None, None, E), slots, E)
    assert_routed(*kernels.route(idx.to(torch.int32), None, None, E), slots, E)


@SETTINGS
@given(routings(), st.data())
def test_route_by_table_with_replicas(routing: tuple[Tensor, int], data: st.DataObject) -> None:
    idx, E = routing
    P = data.draw(st.integers(1, 3))
    num_slots = E * P
    table = torch.tensor(data.draw(st.permutations(range(num_slots)))).view(E, P)
    for expert in range(E):
        table[expert, data.draw(st.integers(1, P)) :] = -1
    quota = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=num_slots, max_size=num_slots))).view(E, P)
    assert_routed(*kernels.route(idx, table, quota, num_slots), plain_slots(idx, table, quota), num_slots)
    everything = torch.zeros_like(quota)
    everything[:, 0] = idx.numel()
    first = kernels.route(idx, table, None, num_slots)
    assert_routed(*first, plain_slots(idx, table, everything), num_slots)


@SETTINGS
@given(routings(), st.data())
def test_rows_are_shared_out(routing: tuple[Tensor, int], data: st.DataObject) -> None:
    """Of c rows, every slot gets those up to its end; every pair goes to one of them, and the op means the same."""
    idx, E = routing
    P, all_rows = data.draw(st.integers(1, 4)), 1 << BITS
    cut = st.one_of(st.integers(0, all_rows), st.sampled_from([0, all_rows // 2, all_rows]))
    cuts = [sorted(data.draw(st.lists(cut, min_size=P - 1, max_size=P - 1))) for _ in range(E)]
    ends = torch.tensor([[*each, all_rows] for each in cuts])
    quota = kernels.shared_rows(idx, ends)
    rows = [idx.flatten().tolist().count(expert) for expert in range(E)]
    assert quota.cumsum(1).tolist() == [[end * c >> BITS for end in each] for each, c in zip(ends.tolist(), rows)]
    table = torch.arange(E * P).view(E, P)
    perm, counts = kernels.route(idx, table, quota, E * P)
    assert torch.equal(counts.view(E, P), quota)
    assert_routed(perm, counts, plain_slots(idx, table, quota), E * P)
    assert torch.equal(torch.ops.moefx.shared_rows(idx, ends), quota)
    for found, wanted in zip(torch.ops.moefx.route(idx, E * P, table, quota), (perm, counts)):
        assert torch.equal(found, wanted)
    padded = torch.cat([table, torch.full((E, 1), -1)], 1)
    traffic = torch.stack([counts, 2 * counts])
    for load in (kernels.expert_load(traffic, padded), torch.ops.moefx.expert_load(traffic, padded)):
        assert load.tolist() == [rows, [2 * each for each in rows]]


def test_expert_without_a_slot_is_dropped() -> None:
    table = torch.tensor([[1], [-1]])
    perm, counts = kernels.route(torch.tensor([[1, 0], [0, 1]]), table, None, 2)
    assert perm.tolist() == [1, 2, 0, 3]
    assert counts.tolist() == [0, 2]


def assert_same(actual: Tensor, expected: Tensor, exact: bool) -> None:
    assert actual.dtype == expected.dtype
    if exact:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@SETTINGS
@given(routings(), st.integers(1, 5), st.booleans())
def test_dispatch_and_combine_with_their_backwards(routing: tuple[Tensor, int], D: int, weighted: bool) -> None:
    idx, E = routing
    T, K = idx.shape
    torch.manual_seed(D)
    perm, _ = kernels.route(idx, None, None, E)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(T * K, D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    choice_grad = torch.randn(T * K, dtype=torch.float64)

    dispatched = x[perm // K]
    assert_same(kernels.dispatch(x, perm, K), dispatched, True)
    (expected,) = torch.autograd.grad(dispatched, x, rows)
    assert_same(kernels.combine(rows.detach(), None, perm, K), expected, False)

    chosen = weights.flatten()[perm]
    assert_same(kernels.dispatch_choices(weights, perm), chosen, True)
    (expected,) = torch.autograd.grad(chosen, weights, choice_grad)
    assert_same(kernels.dispatch_choices_backward(choice_grad, perm, K), expected, True)

    pairs = rows[torch.argsort(perm)].view(T, K, D)
    combined = (pairs * weights[..., None] if weighted else pairs).sum(1)
    inputs = (rows.detach(), weights.detach() if weighted else None)
    assert_same(kernels.combine(*inputs, perm, K), combined, False)
    wanted = torch.autograd.grad(combined, (rows, weights) if weighted else (rows,), x.detach())
    grads = kernels.combine_backward(x.detach(), *inputs, perm, K)
    assert_same(grads[0], wanted[0], False)
    if weighted:
        assert_same(grads[1], wanted[1], False)
    else:
        assert grads[1] is None


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_combine_promotes_and_rounds_like_torch(rows_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    T, K, D = 16, 4, 8
    perm, _ = kernels.route(torch.randint(0, 8, (T, K)), None, None, 8)
    rows = torch.randn(T * K, D).to(rows_dtype).requires_grad_()
    weights = torch.rand(T, K).to(weights_dtype).requires_grad_()
    kept = rows.detach().clone()
    plain = (rows[torch.argsort(perm)].view(T, K, D) * weights[..., None]).sum(1)
    assert_same(kernels.combine(rows.detach(), weights.detach(), perm, K), plain, True)
    grad = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, (rows, weights), grad)
    actual = kernels.combine_backward(grad, rows.detach(), weights.detach(), perm, K)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, True)
    assert torch.equal(rows, kept)


@SETTINGS
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3), st.sampled_from([(), (3,), (2, 3)]))
def test_expert_rows_and_its_backward(counts: list[int], rest: int, shape: tuple[int, ...]) -> None:
    S, R = len(counts), sum(counts) + rest
    param = torch.randn(S, *shape, dtype=torch.float64, requires_grad=True)
    tail = param.new_zeros(rest, *shape)
    plain = torch.cat([*(param[slot].expand(n, *shape) for slot, n in enumerate(counts)), tail])
    assert_same(kernels.expert_rows(param, torch.tensor(counts), R), plain, True)
    g = torch.randn(R, *shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(plain, param, g)
    assert_same(kernels.expert_rows_backward(g, torch.tensor(counts)), expected, False)


def test_two_runs_are_bit_identical() -> None:
    torch.manual_seed(0)
    T, K, D, E = 200, 3, 17, 8
    idx = torch.randint(-1, E, (T, K))

    def everything() -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(T, D, generator=generator)
        weights = torch.rand(T, K, generator=generator)
        perm, counts = kernels.route(idx, None, None, E)
        rows = kernels.dispatch(x, perm, K)
        out = kernels.combine(rows, weights, perm, K)
        sums = kernels.expert_rows_backward(rows, counts)
        return [perm, counts, out, sums, *kernels.combine_backward(out, rows, weights, perm, K)]

    assert all(torch.equal(a, b) for a, b in zip(everything(), everything(), strict=True))
