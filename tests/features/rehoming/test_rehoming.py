"""Homes that move while a model trains: the same numbers, by one program."""

from __future__ import annotations

from contextlib import closing

import pytest

import moefx
from moefx.errors import MoefxError
from moefx.options import Options
from tests.passes.test_assign_slots import assigned
from tests.support.models import Case, shallow
from tests.support.placing import RICH
from tests.support.scenarios import DP2_EP2, Layout, Step, check_compiled, compiled_case
from tests.support.sharing import run_sharing
from tests.test_placement import placed, steps


def test_without_a_policy_nothing_is_counted():
    with pytest.raises(MoefxError, match="rehome_every is 3 without a placement"):
        Options.named(rehome_every=3)


@pytest.mark.parametrize(("ranks", "room"), [(2, 4), (3, 4), (6, 2)])
def test_ranks_have_room_for_two_even_shares(ranks, room):
    _, _, slots = assigned(RICH, ep=ranks, options=Options.named(placement="balanced", rehome_every=5))
    assert slots[0][:2] == (room, 2)


def on_threads(rank: int, world: int, layout: Layout, case: Case, steps: list[Step]) -> None:
    """After so many optimizer steps homes move, the same way on all ranks, and go on having copies."""
    options = Options.named(placement="balanced", copies=2, rehome_every=3, dynamic=False)
    with closing(compiled_case(case, layout, lambda *given: moefx.compile(*given, options))) as compiled:
        check_compiled(rank, layout, case, steps[:3], compiled)
        (region, *_), placements = placed(compiled), compiled._session.placements
        before, placements.updates = region.owners, 2
        check_compiled(rank, layout, case, steps[:1], compiled)
        assert region.owners == before
        placements.updates = 3
        check_compiled(rank, layout, case, steps[3:], compiled)
        assert region.owners != before
        assert placements.updates == 0
        assert region.tables.plan.copies > 0
        assert "balanced, room for 8 experts and 2 copies on every rank" in str(moefx.explain(compiled))
        assert len(compiled._variants) == 1


def test_homes_move_and_numbers_do_not():
    case = shallow("qwen3_moe-grouped_mm")
    run_sharing(4, on_threads, DP2_EP2, case, steps(case, DP2_EP2, 5))
