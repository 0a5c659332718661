"""Placements that are planned after the gate: with "exact" every rank computes as many rows as any other, "calibrated"
corrects a forecast; the numbers are those of one device."""

from __future__ import annotations

import copy
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from moefx.features.exact import transport
from moefx.runtime.plan import RoutePlan
from tests.support.breadth import places
from tests.support.parity import compare, gradients
from tests.support.sharing import run_sharing
from tests.support.skewed import (
    EXPERT,
    MESSAGE,
    NOTED,
    ROW,
    SPARE,
    E,
    K,
    Skewed,
    Step,
    in_flight,
    noting,
    reference,
    sent,
    skews,
    trained,
)


def balanced(rank: int, world: int, model: nn.Module, steps: list[Step], wanted: list, dims: tuple, options: dict,
             ) -> list[int]:  # fmt: skip
    """The rows that this rank computes in every step."""
    mesh, mine, found = init_device_mesh("cpu", dims[0], mesh_dim_names=dims[1]), [], []
    NOTED.seen = mine
    options = moefx.Options.named(placement="exact", copies=SPARE, **options)
    with closing(moefx.compile(copy.deepcopy(model), mesh, options)) as compiled:
        for number, stats in trained(rank, compiled, steps, wanted):
            plans = mine[1:]
            found.append(sum(plan.num_received for plan in plans))
            assert stats.rows[plans[0].rank] == found[-1], (number, rank, stats, mine)
            assert sum(stats.rows) == sum(stats.rows_at_home) == sum(stats.load)
            assert "copied from rank" in str(moefx.explain(compiled)) or not stats.copies
            for kind, count in formulas(mine[0][0], plans).items():
                assert sent(compiled)[kind] == count, (number, rank, kind, sent(compiled), count)
    return found


def formulas(table: np.ndarray, plans: list[RoutePlan]) -> dict[str, int]:
    """The same by what was planned: counts go once; rows go out and back, and the gradients of results go out."""
    me, n = plans[0].rank, table.shape[1]
    home, copies = np.split(np.where(table < 0, -1, table // (E // n + SPARE)), [1], axis=1)
    return {
        "all_gather": (n - 1) * MESSAGE,
        "all_to_all": sum(2 * plan.wire_bytes(ROW) + plan.wire_bytes(ROW, reverse=True) for plan in plans),
        "gather_experts": int((copies[home[:, 0] == me] >= 0).sum()) * EXPERT,
        "scatter_experts": int((copies == me).sum()) * EXPERT,
    }


@pytest.mark.parametrize(("stacked", "dims", "options"), [
    pytest.param(True, ((3,), ("ep",)), {}, marks=pytest.mark.full),
    (False, ((2, 2), ("dp", "ep")), {"chunks": 3, "verify": 2}),
], ids=["stacked, uneven", "modules in chunks"])  # fmt: skip
def test_every_rank_computes_as_many_rows(stacked, dims, options):
    torch.manual_seed(0)
    ranks = torch.Size(dims[0]).numel()
    model, steps = Skewed(stacked=stacked), skews(ranks)
    wanted = [reference(model, step) for step in steps]
    with mock.patch.object(RoutePlan, "of", noting(RoutePlan.of)), mock.patch.object(
        transport, "plan", noting(transport.plan)):
        rows = run_sharing(ranks, balanced, model, steps, wanted, dims, options)
    for number, (tokens, _) in enumerate(steps):
        for group in torch.arange(ranks).view(-1, dims[0][-1]).tolist():  # along ep
            computed = [rows[rank][number] for rank in group]
            assert sum(computed) == K * sum(tokens[rank].shape[0] for rank in group)
            assert max(computed) - min(computed) <= 1, (number, computed)


def calibrated(rank: int, world: int, model: nn.Module, steps: list[Step], wanted: list, options: dict) -> list:
    """Copies before the call and those that came in it, and how uneven ranks were, in every step."""
    mesh, found, NOTED.seen = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), [], []
    options = moefx.Options.named(placement="calibrated", copies=SPARE, **options)
    with closing(moefx.compile(copy.deepcopy(model), mesh, options)) as compiled:
        for _, stats in trained(rank, compiled, steps, wanted):
            (region,) = compiled._session.placements.regions.values()
            before, (after, _) = region.tables.plan.slots, NOTED.seen[0]
            assert stats.copies == (after[:, 1:] >= 0).sum()
            home, copies = np.split(np.where(after < 0, -1, after // region.cap), [1], axis=1)
            assert sent(compiled)["gather_experts"] == int((copies[home[:, 0] == rank] >= 0).sum()) * EXPERT
            assert sent(compiled)["scatter_experts"] == int((copies == rank).sum()) * EXPERT
            assert min(stats.gather_wait_s, stats.scatter_wait_s) > 0
            found.append([int((before[:, 1:] >= 0).sum()), stats.copies, max(stats.rows) - min(stats.rows)])
        assert "corrected in the call, after the gate" in str(moefx.explain(compiled))
        assert len(compiled._variants) == 1
    return found


@pytest.mark.parametrize(("stacked", "options"), places([(True, {}), (False, {"chunks": 2, "verify": 2})], 0))
def test_copies_by_a_forecast_are_corrected_after_the_gate(stacked, options):
    """A routing that stays, then jumps: its copies come before the calls, those of the jump in them."""
    torch.manual_seed(1)
    model, (_, (tokens, hot), *_) = Skewed(stacked=stacked), skews(3)
    jump = [(tokens, hot)] * 4 + [(tokens, hot.roll(4))] * 2
    wanted = [reference(model, step) for step in jump]
    with mock.patch.object(transport, "plan", noting(transport.plan)):
        rows = run_sharing(3, calibrated, model, jump, wanted, options)
    assert rows[0] == rows[1] == rows[2]
    before, after, uneven = zip(*rows[0])
    assert before[0] == 0 < after[0]  # nothing was known
    assert before[3] == after[3] > 0  # all was
    assert after[4] > before[4] > 0
    assert max(uneven) <= 1


class Twice(nn.Module):
    """Two regions that share parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Skewed(stacked=True)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer(x + self.layer(x, bias), bias.roll(3))


@pytest.mark.parametrize("keep", places(["eager", "mpipemoe-s4"], 1))
def test_regions_that_share_parameters_add_copies_of_their_own(keep):
    torch.manual_seed(0)
    model, (_, (tokens, hot), *_) = Twice(), skews(2)
    steps = [(tokens, hot)] * 3 + [(tokens, hot.roll(2))] * 2 + [(tokens, torch.zeros(E))]
    wanted = [reference(model, step) for step in steps]

    def run(rank: int, world: int) -> int:
        mesh, copies = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), 0
        options = moefx.Options.named(placement="calibrated", copies=3, keep=keep)
        with closing(moefx.compile(copy.deepcopy(model), mesh, options)) as compiled:
            for (tokens, bias), (outs, grads) in zip(steps, wanted):
                compiled.zero_grad()
                y = compiled(tokens[rank], bias)
                y.square().sum().backward()
                compare({"y": y.detach()} | gradients(compiled), {"y": outs[rank]} | grads).check(f"rank {rank}")
                copies += sum(stats.copies for stats in compiled.moe_stats().values())
            in_flight(rank, compiled, steps, wanted)
        return copies

    assert run_sharing(2, run)[0] > 0


def test_without_room_for_copies_it_is_refused():
    with pytest.raises(MoefxError, match=r"no room for copies(.|\n)*try: copies=1"):
        moefx.Options.named(placement="exact", copies=0)
