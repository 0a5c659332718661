"""LLEP's assignment: by hand, what must hold of its tables, and in training beside one device."""

from __future__ import annotations

import copy
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MoefxError
from moefx.features.exact import transport
from moefx.features.llep.least_loaded import LeastLoaded
from moefx.placement import tables
from moefx.placement.score import Costs
from tests.support.sharing import run_sharing
from tests.support.skewed import NOTED, SPARE, K, Skewed, Step, noting, reference, skews, trained
from tests.support.skews import skews as cases

COSTS = Costs(row=3.0, row_bytes=1.0, expert_bytes=5.0, gradient_bytes=5.0, byte=(0.5, 1.0))


@pytest.mark.parametrize(("how", "least", "spare", "wanted"), [
    # 100 rows on 4 ranks, 25 each; expert 0 keeps what its rank may have, then ranks fill up from the least loaded.
    (LeastLoaded(1.0), 1, 4, [[25, 16, 18, 21], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 0, 4]]),
    # Fewer than 17 rows do not travel, but for the last ones.
    (LeastLoaded(1.0), 17, 4, [[25, 16, 18, 21], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 0, 4]]),
    # Less than 22 is too little everywhere: all to the least loaded rank, whose own expert then finds it full.
    (LeastLoaded(1.0), 22, 4, [[25, 0, 0, 55], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 4, 0]]),
    (LeastLoaded(1.2), 1, 4, [[30, 1, 23, 26], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 0, 4]]),
    (LeastLoaded(1.0), 1, 0, [[80, 0, 0, 0], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 0, 4]]),  # nowhere to go
    (LeastLoaded(1.0, threshold=3.2), 1, 4, [[80, 0, 0, 0], [0, 9, 0, 0], [0, 0, 7, 0], [0, 0, 0, 4]]),
], ids=["evened", "the last rows may be few", "too few to travel", "capacity", "no slots", "even enough"])  # fmt: skip
def test_by_hand(how, least, spare, wanted):
    found = how.assigned(np.array([80, 9, 7, 4]), range(4), 4, spare, least)
    assert found.tolist() == wanted


def test_least_rows_by_the_machine():
    assert LeastLoaded().least(COSTS) == 4  # 10 bytes of 1 s each, and 3 s a row
    assert LeastLoaded(rows=7).least(COSTS) == 7
    assert LeastLoaded().least(None) == 1024


@pytest.mark.parametrize("how", [LeastLoaded(1.0, 1, 1.0), LeastLoaded(1.1, 50, 1.3), LeastLoaded()])
def test_every_row_is_computed_once_and_slots_are_kept(how):
    moved = 0
    for case in cases(3, 60):
        owners, (room, spare), ranks = case.owners, case.slots, len(case.loads)
        homes = tables.homes_only(owners, ranks, room + spare).slots
        slots, quota = how(case.loads, homes, case.slots, 2)
        plan = tables.of_places(quota, np.arange(len(owners)), slots)
        plan.check(owners, room, spare)
        assert (quota.sum(2) == case.loads).all()
        moved += plan.copies
        before = np.bincount(owners, weights=case.loads.sum(0), minlength=ranks)
        if before.max() <= how.threshold * before.mean():
            assert not plan.copies
    assert moved


def test_no_rank_is_above_capacity_where_there_are_slots():
    rng = np.random.default_rng(0)
    for _ in range(40):
        ranks = int(rng.integers(2, 9))
        totals = rng.zipf(1.5, 2 * ranks).clip(max=5000)
        owners = [expert // 2 for expert in range(2 * ranks)]
        found = LeastLoaded(1.25, threshold=1.0).assigned(totals, owners, ranks, 2 * ranks, 1)
        assert found.sum() == totals.sum()
        assert (found.sum(1) == totals).all()
        assert found.sum(0).max() <= max(1, int(1.25 * (totals.sum() // ranks))) + ranks  # rows that do not divide


def test_with_a_machine_copies_come_only_where_they_pay():
    for case in cases(4, 40):
        homes = tables.homes_only(case.owners, len(case.loads), sum(case.slots)).slots
        slots, _ = LeastLoaded(rows=1)(case.loads, homes, case.slots, 2, Costs(1e-9, 1e6, 1e12, 1e12, (1.0, 1.0)))
        assert (slots[:, 1:] < 0).all()  # weights that take for ever


def trains(rank: int, world: int, model: nn.Module, steps: list[Step], wanted: list, options: dict) -> list[list]:
    """Copies, and the rows that every rank computed, in every step."""
    mesh, found, NOTED.seen = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), [], []
    with closing(moefx.compile(copy.deepcopy(model), mesh, placement="llep", copies=SPARE, **options)) as compiled:
        for _, stats in trained(rank, compiled, steps, wanted):
            assert sum(stats.rows) == sum(stats.rows_at_home) == sum(stats.load)
            found.append([stats.copies, list(stats.rows), list(stats.rows_at_home)])
        assert "llep, room for" in str(moefx.explain(compiled))
        assert len(compiled._variants) == 1
    return found


@pytest.mark.parametrize(("stacked", "options"), [
    (True, {"llep_rows": 1}), (False, {"llep_rows": 1, "llep_capacity": 1, "chunks": 2, "verify": 2}),
], ids=["stacked", "modules in chunks"])  # fmt: skip
def test_it_trains_to_the_numbers_of_one_device(stacked, options):
    torch.manual_seed(0)
    model, steps = Skewed(stacked=stacked), skews(3)
    wanted = [reference(model, step) for step in steps]
    with mock.patch.object(transport, "plan", noting(transport.plan)):
        rows = run_sharing(3, trains, model, steps, wanted, options)
    assert rows[0] == rows[1] == rows[2]
    copies, computed, at_home = rows[0][1]  # all rows to two experts of one rank
    total, capacity = K * sum(len(x) for x in steps[1][0]), options.get("llep_capacity", 1.1)
    assert at_home == [total, 0, 0]
    assert copies >= 2
    assert max(computed) <= int(capacity * (total // 3)) + 3


def test_what_cannot_be_is_refused():
    with pytest.raises(MoefxError, match="'llep' with no room"):
        moefx.Options.named(placement="llep", copies=0)
    with pytest.raises(MoefxError, match=r"llep_capacity is 0.5(.|\n)*from 1 on"):
        moefx.Options.named(placement="llep", llep_capacity=0.5)
