"""A model whose experts have copies on other ranks, others in every call: it gives what the eager model gives."""

from __future__ import annotations

import gc

import moefx
from moefx.placement.tables import contiguous
from moefx.runtime import gather_experts
from tests.support.models import shallow
from tests.support.scenarios import DP2_EP2, check_accumulation, check_in_flight, steps_of
from tests.support.sharing import run_sharing
from tests.support.tables import changing_tables


def _body(rank, world, layout, case, steps, options):
    def compiled(model, mesh):
        return moefx.compile(model, mesh, options=options)

    check_in_flight(rank, world, layout, case, steps, compiled)
    check_accumulation(rank, world, layout, case, steps, compiled)


def test_parity_under_tables_that_change_with_every_call():
    """Two forwards in flight in both orders, and no_sync; nobody keeps room for copies in the end."""
    case = shallow("loop-plain")
    steps = steps_of(case, [[(1, 6), (3, 10)] * 2] * 2)
    options = moefx.Options(placement="balanced", spare=2, chunks=2, scheduler="optsche")
    with changing_tables(contiguous(8, 2)):
        run_sharing(4, _body, DP2_EP2, case, steps, options)
    gc.collect()
    assert not gather_experts._lent
