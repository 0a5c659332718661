"""Layers that are recognised once for all: on two ranks every one of them computes and learns what it does in eager."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import RaiseError
from tests.support.breadth import some
from tests.support.handmade import Capacity, D, Loop, make_moe
from tests.support.layered import layered
from tests.support.mask_styles import TopP
from tests.support.models import Case
from tests.support.op_styles import ApartOfAllTokens
from tests.support.ranks import fake_world
from tests.support.scenarios import EP2, check_compiled, compiled_case, steps_of
from tests.support.sharing import run_sharing
from tests.support.styles import Dispatched, FirstOfMore, Gathered, OwnNumbers

STYLES = {"loop": partial(make_moe, Loop()), "capacity": partial(make_moe, Capacity()), "gathered": Gathered,
          "grouped": Dispatched}  # fmt: skip
# Layers behind the first one are written otherwise than flat.
OTHERWISE = {each.__name__: each for each in (OwnNumbers, FirstOfMore, TopP, ApartOfAllTokens)}


def check(rank, world, case, steps):
    compiled = compiled_case(case, EP2)
    check_compiled(rank, EP2, case, steps, compiled)
    (program,) = compiled.prepare(**steps[0][0][rank])
    folded = next(record for record in program.records if record.name == "fold-layers")
    compiled.close()
    return folded.changes


@pytest.mark.parametrize("name", some([*STYLES, *OTHERWISE], *STYLES))
def test_every_layer_is_as_in_eager(name):
    make = (STYLES | OTHERWISE)[name]
    case = Case(f"three layers, {name}", partial(layered, make, 3))
    for changes in run_sharing(2, check, case, steps_of(case, [[(2, 6), (3, 6)]] * 2)):
        assert len(changes) == 1, changes
        assert changes[0].startswith("3 equal layers"), changes


class Mixed(nn.Module):
    """Of four experts one is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        weights, best = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = best == e
            y = expert(x[rows])
            out[rows] = (y.cumsum(0) if e == 1 else y) * weights[rows, None]
        return out


def test_a_refusal_is_one_error_and_no_warning(recwarn):
    case = Case("mixed", partial(layered, Mixed, 3))
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with pytest.raises(RaiseError) as caught:
            moefx.compile(case.build(), mesh, example_inputs=case.batch(0))
    assert "compute different ops" in caught.value.what
    assert not [str(each.message) for each in recwarn if "passes" in str(each.message)]
