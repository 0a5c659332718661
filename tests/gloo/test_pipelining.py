"""Regions in chunks, on processes joined by gloo. tests/test_pipelining.py has the rest, on threads."""

from __future__ import annotations

from functools import partial

import pytest

import moefx
from tests.support.models import CASES, chosen, shallow
from tests.support.ranks import run_ranks
from tests.support.scenarios import EP2, EP4, check_steps
from tests.support.scenarios import steps_of as steps

EVEN, UNEVEN = [(2, 8), (2, 8)], [(1, 2), (3, 10)]  # one rank has fewer tokens than some have chunks
NODES = {"ranks_per_node": 2}
FULL = pytest.mark.full


def compiled(options, model, mesh):
    return moefx.compile(model, mesh, **options)


def check(rank, world, layout, case, wanted, options):
    check_steps(rank, world, layout, case, wanted, partial(compiled, options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral-grouped_mm", {"chunks": 3}),
        pytest.param("loop-before", {"chunks": 8, "scheduler": "optimal"}, marks=FULL),
        pytest.param("mixtral-grouped_mm", {"chunks": 8, "scheduler": "heuristic"}, marks=FULL),
        pytest.param("deepseek_v3-grouped_mm", {"chunks": 2}, marks=FULL),
        pytest.param("gpt_oss-grouped_mm", {"chunks": 4}, marks=FULL),
    ],
)
def test_dropless_on_two_ranks(name, options):
    case = shallow(name)
    run_ranks(2, check, EP2, case, steps(case, [EVEN, UNEVEN]), options)


def test_capacity_on_two_ranks():
    case = shallow("gshard-top2")
    run_ranks(2, check, EP2, case, steps(case, [EVEN]), {"chunks": 3, "scheduler": "heuristic", "dynamic": False})


@pytest.mark.parametrize("alltoall", chosen(["pipe"], ["1dh", "2dh", "pipe"]))
def test_every_all_to_all_on_two_nodes_of_two_ranks(alltoall):
    case = shallow("loop-counting")
    wanted = steps(case, [EVEN * 2, UNEVEN * 2])
    run_ranks(4, check, EP4, case, wanted, {"chunks": 2, "alltoall": alltoall, **NODES})


@FULL
@pytest.mark.parametrize("name", ["loop-counting", "gpt_oss-grouped_mm", "gshard-top2"])
@pytest.mark.parametrize(("alltoall", "ranks_per_node"), [("direct", 8), ("2dh", 4), ("pipe", 2)])
def test_eight_ranks(name, alltoall, ranks_per_node):
    case = CASES[name]
    options = {"chunks": 3, "alltoall": alltoall, "ranks_per_node": ranks_per_node}
    shapes = [EVEN * 4] if name.startswith("gshard") else [UNEVEN * 4]
    run_ranks(8, check, ((8,), ("ep",)), case, steps(case, shapes), options)
