"""A compiled model whose experts have copies that change from call to call: the same numbers, by one program."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch

import moefx
from moefx.errors import DivergenceError
from moefx.report import charts
from tests.support.models import Batch, Case, shallow
from tests.support.parity import compare, gradients, outputs_of
from tests.support.scenarios import DP2_EP2, Layout, Step, check_compiled, compiled_case, reads, steps_of, sum_of
from tests.support.sharing import run_sharing


def one_word_often(batch: Batch) -> Batch:
    """Zipf's law, steep: most tokens are one word, and go to the same experts."""
    ids = batch["input_ids"].clone()
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(int(ids.sum()))) < 0.7] = 7
    return {**batch, "input_ids": ids}


def steps(case: Case, layout: Layout, count: int) -> list[Step]:
    return steps_of(case, [[(2, 7)] * 4] * count, change=one_word_often)


def placed(compiled: Any) -> list[Any]:
    return list(compiled._session.placements.regions.values())


def check_changing(rank: int, layout: Layout, case: Case, steps: list[Step], compiled: Any) -> None:
    """Copies come, change, and go by what calls counted; the numbers are those of one device."""
    seen = []
    for step in steps:
        check_compiled(rank, layout, case, [step], compiled)
        seen.append([region.tables for region in placed(compiled)])
    assert [tables[0].plan.copies > 0 for tables in seen[:3]] == [False, False, True]
    assert len({tables[0].digest for tables in seen}) > 2
    stats = list(compiled.moe_stats().values())
    assert all(sum(each.rows) == sum(each.rows_at_home) == sum(each.load) for each in stats)
    assert any(max(each.rows) < max(each.rows_at_home) for each in stats)
    assert sum(each.copies for each in stats) > 0


def check_in_flight(rank: int, layout: Layout, steps: list[Step], compiled: Any) -> None:
    """Forwards under other tables than those before, then the backwards, in two orders; and in no_sync."""
    mine = reads(rank, layout)
    for how in (1, -1, 0):
        compiled.zero_grad()
        outs, seen = [], []
        for number, (batches, expected) in enumerate(steps):
            is_held_back = how == 0 and number < len(steps) - 1
            with compiled.no_sync() if is_held_back else nullcontext():
                outs.append(compiled(**batches[mine]))
            seen.append(placed(compiled)[0].tables.digest)
            compare(outputs_of(outs[-1]), expected.outputs[mine]).check(f"in flight, rank {rank}")
            if how == 0:
                outs.pop().loss.backward()
        assert len(set(seen)) > 1
        for out in outs[:: how or 1]:
            out.loss.backward()
        compare(gradients(compiled), sum_of(steps)).check(f"order {how}, rank {rank}")


def check_faults(rank: int, layout: Layout, steps: list[Step], compiled: Any) -> None:
    """Another table on one rank is told on all ranks: by the forward, or by the backward that takes it up."""
    batch, region = steps[0][0][reads(rank, layout)], placed(compiled)[0]
    out = compiled(**batch)
    if rank == 1:
        slots, step = region.tables.moves.clone(), out.loss.grad_fn.call.step
        step._slots = {name: (slots, slots._version) if value is region.tables.moves else (value, version)
                       for name, (value, version) in step._slots.items()}  # fmt: skip
    with pytest.raises(DivergenceError, match=f"rank {int(rank != 1)}: .*, with another placement of experts"):
        out.loss.backward()


def on_threads(rank: int, world: int, layout: Layout, case: Case, steps: list[Step]) -> None:
    options = moefx.Options.named(placement="balanced", copies=2, dynamic=False)
    with closing(compiled_case(case, layout, lambda *given: moefx.compile(*given, options))) as compiled:
        check_changing(rank, layout, case, steps, compiled)
        check_in_flight(rank, layout, steps[:3], compiled)
        report = str(moefx.explain(compiled))
        assert "balanced, room for 4 experts and 2 copies on every rank" in report
        assert "of all rows: copied from rank" in report
        if rank == 0:
            (stats,) = compiled.moe_stats().values()
            home, ran = charts.ranks(asdict(stats))["data"]
            assert (home["x"], home["y"], ran["y"]) == (["0", "1"], stats.rows_at_home, stats.rows)
        assert len(compiled._variants) == 1
        check_faults(rank, layout, steps, compiled)


def test_copies_change_and_numbers_do_not():
    case = shallow("qwen3_moe-grouped_mm")
    run_sharing(4, on_threads, DP2_EP2, case, steps(case, DP2_EP2, 6))
