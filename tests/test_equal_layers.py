"""Layers that are recognised once for all: on two ranks every one of them computes and learns what it does in eager."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.handmade import Capacity, Loop, make_moe
from tests.support.layered import layered
from tests.support.models import Case
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing
from tests.support.styles import Dispatched, Gathered

STYLES = {"loop": partial(make_moe, Loop()), "capacity": partial(make_moe, Capacity()), "gathered": Gathered,
          "grouped": Dispatched}  # fmt: skip


def check(rank, world, case, steps):
    compiled = compiled_case(case, EP2)
    check_compiled(rank, EP2, case, steps, compiled)
    (program,) = compiled.prepare(**steps[0][0][rank])
    folded = next(record for record in program.records if record.name == "fold-layers")
    compiled.close()
    return folded.changes


@pytest.mark.parametrize("name", STYLES)
def test_every_layer_is_as_in_eager(name):
    make = STYLES[name]
    case = Case(f"three layers, {name}", partial(layered, make, 3))
    for changes in run_sharing(2, check, case, steps_of(case, [[(2, 6), (3, 6)]] * 2)):
        assert len(changes) == 1, changes
        assert changes[0].startswith("3 equal layers"), changes
