"""What is known of a routing by how it was made."""

from __future__ import annotations

import pytest

from moefx.analysis.recognition.routings import is_distinct
from tests.support.graphs import graph

GROUPS = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1).view(-1, 2, 4)
    best = scores.max(-1)
    place = best[1]
    ids = place + torch.arange(0, 8, 4)
    return (ids,)
"""


@pytest.mark.parametrize(("source", "distinct"), [
    (GROUPS, True),
    (GROUPS.replace("place + torch.arange(0, 8, 4)", "torch.arange(0, 16, 8) + place"), True),
    (GROUPS.replace("arange(0, 8, 4)", "arange(0, 6, 3)"), False),
    (GROUPS.replace("arange(0, 8, 4)", "arange(2)"), False),
    (GROUPS.replace("torch.arange(0, 8, 4)", "3"), False),
    (GROUPS.replace("place + torch.arange(0, 8, 4)", "place"), False),
], ids=["groups", "farther apart", "overlapping", "next to each other", "one number", "inside of groups"])  # fmt: skip
def test_one_of_each_group_is_another_expert(source, distinct):
    gm, _ = graph(source)
    (ids,) = gm.graph.output_node().args[0]
    assert is_distinct(ids) == distinct
