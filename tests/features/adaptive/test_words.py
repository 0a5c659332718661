"""What `moefx.explain` says of r, and what runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx import rooms
from moefx.compiler import variants
from moefx.errors import UnsupportedUse
from moefx.features.adaptive import prices
from tests.support.models import shallow
from tests.support.ranks import fake_world

CASE = shallow("loop-setitem")


@pytest.fixture(scope="module", autouse=True)
def world():
    with fake_world(4):
        yield


def with_shared_experts():
    """On a mesh where two ranks share every expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    return closing(moefx.compile(CASE.build(), mesh, machine="emulated-200mbit"))


def test_r_has_a_table_formulas_and_a_best_predicted_time():
    with with_shared_experts() as model:
        found = moefx.explain(model, **CASE.batch(0))
    plan, text = found.regions[0].plan, str(found)
    data = found.to_dict()["programs"][0]["regions"][0]["adaptive"]
    assert [row["r"] for row in data["by_r"]] == [1, 2, 0]
    assert [row["best_s"] is not None for row in data["by_r"]] == [True, True, False]  # nobody says that all fit
    for row in data["by_r"]:
        assert f"T({row['r']}) = {1e3 * row['transfers_s']:.3f} ms" in text
    assert f"r* = {data['optimum']:.3g}; with more than f* = {data['crossover']:.3g} times the rows r = 1" in text
    assert plan.adaptive.fastest in (0, 1, 2)
    assert {each["r"] for each in found.to_dict()["programs"][0]["regions"][0]["candidates"]} == {None, 1}


@pytest.mark.parametrize("can", [True, False])
def test_an_r_that_a_program_cannot_have_is_not_chosen(can, monkeypatch):
    """What a pass refuses is left, with a note; where it can, it is what runs."""
    feature, whole = rooms.FEATURES["adaptive"], variants.Chooser

    def only_one(number, split, ctx, *more):
        is_open = ctx.options.parallel.r is None
        return ((1,) if split == "s1" else ()) if is_open else prices.allowed(number, split, ctx, *more)

    def chooser(run, *more):
        def refusing(mesh, decisions):
            if any(choice.r is not None for choice in decisions.choices.values()) and not can:
                raise UnsupportedUse("these rows go to all")
            return run(mesh, decisions)

        return whole(refusing, *more)

    changed = replace(feature, degrees=replace(feature.degrees, allowed=only_one))
    monkeypatch.setitem(rooms.FEATURES, "adaptive", changed)
    monkeypatch.setattr(variants, "Chooser", chooser)
    with with_shared_experts() as model:
        found = moefx.explain(model, **CASE.batch(0))
        code = moefx.inspect(model).code
    assert {region.choice.r for region in found.regions} == {1 if can else None}
    assert ("gather_weights" in code["forward"]) == can
    notes = found.programs[0].notes
    assert any("rows go to all ranks that share an expert: r cannot be chosen: these rows go to all" in note
               for note in notes) != can  # fmt: skip
