"""Routing without a sort against routing with one: equal to the last pair."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.runtime import kernels
from tests.kernels.cases import DEVICE, Case, cases, triton_kernels

SETTINGS = settings(max_examples=16, deadline=None, derandomize=True)


def assert_routed(*given) -> None:
    for found, meant in zip(triton_kernels.route(*given), kernels.route(*given), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, meant)


@SETTINGS
@given(cases(widths=(1,)), st.sampled_from([torch.int64, torch.int32]))
def test_by_expert(case: Case, dtype: torch.dtype) -> None:
    assert_routed(case.idx.to(dtype), None, None, case.E)
    assert_routed(case.idx.t().contiguous().t().to(dtype), None, None, case.E)


@SETTINGS
@given(cases(widths=(1,)), st.integers(1, 3), st.booleans(), st.data())
def test_by_table(case: Case, replicas: int, has_quota: bool, data: st.DataObject) -> None:
    """Experts have some slots each, or none; a quota may not hold all rows."""
    slots = case.E * replicas
    table = torch.tensor(data.draw(st.permutations(range(slots)))).view(case.E, replicas)
    for expert in range(case.E):
        table[expert, data.draw(st.integers(0 if replicas == 1 else 1, replicas)) :] = -1
    quota = torch.randint(0, 4, table.shape, generator=case.seed) if has_quota else None
    assert_routed(case.idx, table.to(DEVICE), None if quota is None else quota.to(DEVICE), slots)


def test_more_pairs_than_a_scan_takes_at_once(monkeypatch) -> None:
    monkeypatch.setattr(triton_kernels.order, "STEP", 4)  # of 17 blocks
    idx = torch.randint(-1, 4, (700, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_routed(idx, None, None, 3)
    assert_routed(torch.randint(0, 300, (200, 2)).to(DEVICE), None, None, 300)
