"""S2 whose blocks come back in phases (Parm's SAA): outputs and gradients of the whole model, and what is sent when."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import moefx
from moefx.axes import MeshSpec
from moefx.costmodel.ways import FORMS, Q, sent_bytes
from tests.support.handmade import D
from tests.support.models import CASES, Case, shallow
from tests.support.scenarios import (
    Layout,
    Step,
    check_accumulation,
    check_compiled,
    check_in_flight,
    check_steps,
    compiled_case,
    reads,
    steps_of,
)
from tests.support.sharing import run_sharing

FULL = pytest.mark.full
FOLDED = MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2)


def _check(sizes: dict[str, int], case: Case, check=check_steps, shapes=((2, 8),), **options) -> list:
    """The case is right on a mesh of these sizes. Options are those of the compiler."""
    layout, world = (tuple(sizes.values()), tuple(sizes)), torch.Size(sizes.values()).numel()
    readers = 1 + reads(world - 1, layout)
    compile_fn = partial(moefx.compile, options=moefx.Options.preset("parm-s2", **options))
    steps = steps_of(case, [[shape if r else shapes[0] for r in range(readers)] for shape in shapes])
    return run_sharing(world, check, layout, case, steps, compile_fn)


def _sent(rank: int, world: int, layout: Layout, case: Case, steps: list[Step], compile_fn) -> tuple:
    """(what explain says, exchanges and gathers of rows in the order of their starts)."""
    compiled = compiled_case(case, layout, compile_fn)
    check_compiled(rank, layout, case, steps, compiled)
    found = [(t.kind, t.num_bytes) for t in compiled._session.trace if t.kind == "all_to_all" or t.region == "rows"]
    said = str(moefx.explain(compiled))
    compiled.close()
    return said, found


def test_what_is_sent_and_when():
    """One exchange out, and back in phases; the gather of the first begins behind the start of the second. Together
    they are the closed form, to the byte; the backward is the same."""
    q = 2 * 8 * 2 * D * 4  # groups, experts, capacity
    out, back, gather = (int(sent_bytes(leg, FOLDED).subs(Q, q)) for leg in FORMS["s2"].legs)
    near = back // 3  # one of the three other ranks is near
    for said, found in _check({"dp": 2, "mp": 2}, shallow("gshard-grouped"), _sent, ep=2, esp=2):
        assert "s2, gathered in 2 phases as it comes back" in said
        assert found == 2 * [("all_to_all", out), ("all_to_all", near), ("all_to_all", back - near),
                             ("all_gather", gather // 2), ("all_gather", gather // 2)]  # fmt: skip


@FULL
@pytest.mark.parametrize(("sizes", "options"), [
    ({"ep": 2, "mp": 2}, {"verify": 2}), ({"mp": 2, "ep": 4}, {"scheduler": "optsche"}),
    ({"ep": 2, "esp": 2, "mp": 2}, {}), ({"dp": 2, "ep": 2, "tp": 2}, {"scheduler": "sequential"}),
    ({"dp": 2, "mp": 2}, {"ep": 4}), ({"dp": 4, "mp": 2}, {"ep": 4, "esp": 2, "verify": 2}),
    ({"dp": 2, "mp": 4}, {"ep": 4, "esp": 2}), ({"dp": 4, "mp": 2}, {"ep": 2, "esp": 4}),
    ({"mp": 2, "dp": 2}, {"ep": 2, "esp": 2}), ({"mp": 4}, {"ep": 2, "esp": 2}), ({"dp": 4, "mp": 1}, {"ep": 4}),
    ({"dp": 2, "mp": 2}, {"ep": 2, "esp": 2, "machine": "emulated-200mbit"}),
], ids=str)  # fmt: skip
def test_meshes(sizes, options):
    """Also capacities that do not divide over the ranks along `mp`, or differ between ranks that read other data."""
    _check(sizes, shallow("gshard-top2"), shapes=[(2, 8), (3, 7)], **options)


@FULL
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("gshard")])
def test_every_style(name):
    _check({"dp": 2, "mp": 2}, CASES[name], ep=2, esp=2)


@FULL
@pytest.mark.parametrize("check", [check_accumulation, check_in_flight])
def test_several_forwards(check):
    _check({"ep": 2, "mp": 2}, shallow("gshard-top2"), check, [(2, 8), (3, 7)])


@FULL
@pytest.mark.parametrize("options", [{"codec": "zfp"}, {"alltoall": "pipe", "ranks_per_node": 2}], ids=str)
def test_chunks_of_few_rows_are_packed(options):
    """Where the number of blocks is known only when the program runs. A codec costs digits, which other tests count."""
    check = check_steps if "alltoall" in options else _runs
    _check({"dp": 2, "mp": 2}, shallow("gshard-top2"), check, ep=4, chunks=3, **options)


def _runs(rank: int, world: int, layout: Layout, case: Case, steps: list[Step], compile_fn) -> None:
    compiled = compiled_case(case, layout, compile_fn)
    compiled(**steps[0][0][0]).loss.backward()
    compiled.close()
