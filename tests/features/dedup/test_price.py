"""What crosses between nodes where a token does so once, in closed form."""

from __future__ import annotations

import pytest

from moefx.axes import MeshSpec
from moefx.costmodel.ways import FORMS, Q, X, crossing_bytes
from moefx.features.dedup.price import closed_form, crossings, with_dedup


@pytest.mark.parametrize(("nodes", "esp", "experts", "k", "rows"), [
    (2, 4, 8, 2, 0.79), (4, 8, 64, 8, 2.74), (8, 4, 128, 8, 4.67), (16, 8, 256, 8, 6.12),
])  # fmt: skip
def test_rows_between_nodes(nodes, esp, experts, k, rows):
    """Counts of exact simulations of balanced routing; then the same from the legs' bytes."""
    found = float(crossings(experts=experts, k=k, nodes=nodes))
    assert found == pytest.approx(rows, abs=0.01)
    mesh = MeshSpec.folded({"dp": nodes * esp}, nodes, esp, esp)
    form = with_dedup(FORMS["s3"], experts=experts, k=k, nodes=nodes)
    assert float(crossing_bytes(form, mesh).subs({X: 1, Q: k})) / 2 == pytest.approx(found)


@pytest.mark.parametrize(("axes", "ranks_per_node", "k", "schedule"), [
    ({"ep": 4}, 2, 2, "s1"), ({"ep": 2, "esp": 2}, 2, 2, "s3"), ({"ep": 4}, 4, 2, None), ({"ep": 4}, None, 2, None),
    ({"ep": 4}, 2, 1, None),
])  # fmt: skip
def test_where_it_makes_a_difference(axes, ranks_per_node, k, schedule):
    """Several nodes, and several choices."""
    found = closed_form(8, k, MeshSpec.named(axes, ranks_per_node))
    assert (found and found[0]) == schedule
