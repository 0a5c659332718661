"""Which ep x esp is fastest by closed forms, on a mesh that names neither."""

from __future__ import annotations

import pytest

from moefx.axes import MeshSpec
from moefx.costmodel.machines import preset
from moefx.planning.folding import Fold, Layer, folds
from moefx.planning.planner import decide
from moefx.report.explanation import _fold
from tests.planning.test_planner import machine, whole

MESH = {"dp": 4, "mp": 2}


def test_all_that_nest_and_divide_the_experts():
    found = folds(MESH, Layer(4, 2, 1e6, 1e8), machine(ranks_per_node=4))
    pairs = {(fold.ep, fold.esp) for fold in found}
    assert (1, 1) in pairs
    assert {ep for ep, _ in pairs} == {1, 2, 4}  # 8 does not divide 4 experts
    for ep, esp in pairs:
        MeshSpec.folded(MESH, ep, esp)
    assert [fold.seconds for fold in found] == sorted(fold.seconds for fold in found)
    assert all(fold.weight_bytes == 1e8 / (fold.ep * fold.esp) for fold in found)


@pytest.mark.parametrize(("tokens", "weights", "spread"), [(1e3, 1e9, True), (1e9, 1e3, False)])
def test_large_experts_are_spread_and_small_ones_kept(tokens, weights, spread):
    """Gradients of whole experts against exchanges of tokens."""
    best = folds(MESH, Layer(8, 2, tokens, weights), machine(ranks_per_node=4))[0]
    assert (best.ep * best.esp > 1) == spread


def test_no_parts_across_nodes_where_links_between_them_are_slow():
    best = folds({"dp": 8}, Layer(8, 2, 1e8, 1e9), preset("emulated-200mbit"))[0]
    assert best.esp <= 2


def test_the_plan_says_it_where_experts_are_whole():
    step, ctx = whole(ep=1)
    assert decide(step, ctx, machine()).folds == {}  # the mesh names `ep`
    ctx.mesh = MeshSpec.named({"dp": 8}, ranks_per_node=8)
    found = decide(step, ctx, machine()).folds
    assert found[0] == found[1]
    assert found[0][0].weight_bytes * found[0][0].ep * found[0][0].esp == 2 * 32 * 64 * 96 * 4
    text = _fold([Fold(4, 2, "s1", 1e-3, 1e6), Fold(1, 1, "s1", 4e-3, 8e6)])
    assert "ep=4, esp=2" in text
    assert "1.000 ms instead of 4.000 ms" in text
    assert "1.0 MB of them instead of 8.0 MB" in text
    assert _fold([Fold(1, 1, "s1", 1e-3, 8e6)]) == ""
