"""choices: what is known of ids that change."""

from __future__ import annotations

import pytest

from moefx.analysis.recognition import choices
from moefx.analysis.recognition.facts import Mask
from tests.support.graphs import graph

LOOP = """
def graph(x: "f32[s0, 8]", ids: "i64[s0, 2]"):
    own = ids.clone()
    first = own == 0
    {between}
    second = own == 1
    return (first, second)
"""


@pytest.mark.parametrize(("between", "known"), [
    ("third = own == 2", {"first", "third", "second"}),
    ("own[first] = -1", set()),
    ("filled = own.clamp_(0, 1)", set()),
    ("other = ids.clone()\n    other[first] = -1", {"first", "second"}),
    ("view = own.view(-1)\n    view[0] = 1", set()),
], ids=["steady", "written by a mask", "written in place", "another tensor", "written by a view"])  # fmt: skip
def test_masks_of_ids_that_are_written_to_later_are_not_understood(between, known):
    gm, _ = graph(LOOP.format(between=between))
    assert {node.name for node, fact in choices.facts(gm).items() if isinstance(fact, Mask)} == known
