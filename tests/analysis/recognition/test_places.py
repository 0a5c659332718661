"""Rows at places of any origin are rows at the places of a mask, in another order."""

from __future__ import annotations

import expecttest
import pytest
import torch

from moefx.analysis.recognition import index_forms, places
from moefx.ir.edit import copy_of
from moefx.ir.text import text
from tests.support.graphs import assert_same_meaning, graph, short

PUT = """
def graph(x: "f32[s0, 16]", x_p: "f32[s0, 4]", up: "f32[16, 16]"):
    picked = torch.topk(x_p, 2)
    w = picked[0]
    ids = picked[1]
    zeros = torch.zeros_like(x)
    g = w[:, 0]
    {places}
    y = F.relu(F.linear(x[t], up)) * g{column}
    out = {put}
    return (out, ids)
"""
FIRST = """where = torch.where(ids == 1)
    t = where[0][:3]
    g = w[t, where[1][:3]]"""
ADD = "zeros.index_add(0, t, y)"


def rewritten(at, column="[:, None]", put=ADD):
    gm, _ = graph(PUT.format(places=at, column=column, put=put))
    before = copy_of(gm)
    return before, gm, places.as_masks(gm)


@pytest.mark.parametrize("put", [ADD, "zeros.index_put((t,), y)", "zeros.index_copy(0, t, y)"])
@pytest.mark.parametrize(("at", "column"), [
    (FIRST, "[:, None]"),
    (FIRST.replace("g = w[", "g = w[").replace("[:3]]", "[:3], None]"), ""),
    ("chosen = torch.topk(x_p[:, 1], 3)\n    t = chosen[1]\n    g = chosen[0]", ".unsqueeze(1)"),
    ("order = torch.argsort(x_p[:, 1])\n    t = order[:4].flip(0)\n    g = torch.flip(x_p[order[:4], 1], [0])",
     "[:, None]"),
    ("pair = torch.argsort(ids.t().flatten(), stable=True)[:2]\n    t = pair % x.shape[0]\n"
     "    g = w.t().flatten()[pair]", "[:, None]"),
], ids=["first", "first, as a column", "best", "an order, backwards", "choice by choice"])  # fmt: skip
def test_meaning(at, column, put):
    before, gm, found = rewritten(at, column, put)
    assert found == 1
    assert "torch.where(index_fill)" in short(gm)
    gm.graph.lint()
    assert_same_meaning(before, gm, exact=False, s0=12)


def test_all_tokens_of_an_expert_are_read_off_the_ids():
    """Then nothing is left of the order that they were found by."""
    at = """t = torch.where(ids == 1)[0].flip(0)
    g = w.flatten()[t]"""
    of_two = PUT.replace("topk(x_p, 2)", "topk(x_p, 1)").replace("[s0, 4]", "[s0, 2]")
    gm, _ = graph(of_two.format(places=at, column="[:, None]", put=ADD))
    before = copy_of(gm)
    assert places.as_masks(gm) == 1
    assert "flip" not in short(gm)
    assert "index_fill" not in short(gm)
    assert_same_meaning(before, gm, exact=False, s0=12)


@pytest.mark.parametrize("at", [
    "t = torch.where((ids == 1).any(-1))[0]\n    g = w[t, 0]",
    "t = torch.argsort(x_p[:, 1])\n    g = w[t, 0]",
    "t = ids.flatten()[:4]\n    g = w[t, 0]",
    "t = torch.where(ids < 3)[0][:5]\n    g = w[t, 0]",
    "t = torch.where((ids == 1).any(-1))[0][:5000]\n    g = w[t, 0]",
    "t = torch.argsort(x_p[:, 1])[:4]\n    g = torch.flip(x_p[t, 1], [0])",
], ids=["places of a mask", "all rows", "experts", "tokens that may come twice", "a bound that no draw exceeds",
        "an order that counts"])  # fmt: skip
def test_noop(at):
    before, gm, found = rewritten(at)
    assert found == 0
    assert short(gm) == short(before)


@pytest.mark.parametrize("expert", range(0, 64, 7))
def test_ids_that_may_name_an_expert_twice_stay(expert):
    """As those of two hashes do, of few tokens."""
    source = PUT.replace('up: "f32', 'own: "i64[s0, 2]", up: "f32').replace("(out, ids)", "(out, own == 63)")
    at = f"t = torch.where(own == {expert})[0][:9]\n    g = w[t, 0]"
    gm, _ = graph(source.format(places=at, column="[:, None]", put=ADD))
    assert places.as_masks(gm) == 0


def test_an_index_that_changes_stays():
    at = "t = torch.argsort(x_p[:, 1])[:4]\n    g = w[t, 0]"
    _, _, found = rewritten(at, "[:, None] + t.add_(0)[:, None]")
    assert found == 0


def test_rows_that_are_read_in_another_way_as_well_stay():
    before, gm, found = rewritten("t = torch.argsort(x_p[:, 1])[:4]\n    g = w[:4, 0]", "[:, None] + x[:4]")
    assert found == 0
    assert short(gm) == short(before)


class Golden(expecttest.TestCase):
    maxDiff = None

    def test_golden(self):
        _, gm, _ = rewritten(FIRST)
        self.assertExpectedInline(text(gm), """\
def graph(x: "f32[s0, 16]", x_p: "f32[s0, 4]", up: "f32[16, 16]"):
    picked = torch.topk(x_p, 2)                                         # (f32[s0, 2], i64[s0, 2])
    w = picked[0]                                                       # f32[s0, 2]
    ids = picked[1]                                                     # i64[s0, 2]
    zeros = torch.zeros_like(x)                                         # f32[s0, 16]
    g = w[:, 0]                                                         # f32[s0]
    eq = ids == 1                                                       # bool[s0, 2]
    where = torch.where(eq)                                             # (i64[u0], i64[u0])
    getitem = where[0]                                                  # i64[u0]
    t = getitem[:3]                                                     # i64[Min(3, u0)]
    getitem_1 = where[1]                                                # i64[u0]
    getitem_2 = getitem_1[:3]                                           # i64[Min(3, u0)]
    g_1 = w[t, getitem_2]                                               # f32[Min(3, u0)]
    size = x.size(0)                                                    # s0
    zeros_1 = torch.zeros(size, dtype=torch.bool, device=torch.device('cpu'))   # bool[s0]
    index_fill = zeros_1.index_fill(0, t, True)                         # bool[s0]
    where_1 = torch.where(index_fill)                                   # (i64[Min(3, u0)],)
    getitem_5 = where_1[0]                                              # i64[Min(3, u0)]
    getitem_3 = x[getitem_5]                                            # f32[Min(3, u0), 16]
    linear = F.linear(getitem_3, up)                                    # f32[Min(3, u0), 16]
    relu = F.relu(linear)                                               # f32[Min(3, u0), 16]
    getitem_4 = g_1[:, None]                                            # f32[Min(3, u0), 1]
    squeeze = getitem_4.squeeze(1)                                      # f32[Min(3, u0)]
    zeros_2 = torch.zeros(size, dtype=torch.float32, device=torch.device('cpu'))        # f32[s0]
    index_put = zeros_2.index_put((t,), squeeze)                        # f32[s0]
    getitem_6 = index_put[getitem_5]                                    # f32[Min(3, u0)]
    unsqueeze = getitem_6.unsqueeze(1)                                  # f32[Min(3, u0), 1]
    y = relu * unsqueeze                                                # f32[Min(3, u0), 16]
    out = zeros.index_add(0, getitem_5, y)                              # f32[s0, 16]
    return (out, ids)                                                   # (f32[s0, 16], i64[s0, 2])
""")


def test_scores_whose_gradients_were_cut_off_have_none():
    """They are equal to those that the ids came with, and stay cut off."""
    source = """
    def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up: "f32[16, 16]"):
        scores = F.linear(x, gate)
        picked = torch.topk(scores, 1)
        w = picked[0]
        ids = picked[1]
        cut = w.detach()
        t = torch.where(ids == 1)[0].flip(0)
        g = cut.flatten()[t]
        again = (w * 1).flatten()
        out = torch.zeros_like(x).index_add(0, t, F.linear(x[t], up) * g[:, None])
        return (out, ids, again)
    """
    gm, _ = graph(source)
    assert places.as_masks(gm) == 1
    values, gate, up = torch.randn(12, 16), torch.randn(2, 16, requires_grad=True), torch.randn(16, 16)
    gm.recompile()
    with torch.enable_grad():
        assert not gm(values, gate, up)[0].requires_grad


BY_MASK = """
def graph(x: "f32[s0, 8]", x_new: "f32[s1, 8]", up: "f32[8, 8]"):
    mask = x[:, 0] > 0
    picked = torch.masked_select(x, mask[:, None]).view(-1, 8)
    made = F.linear(picked, up)
    out = x.masked_scatter(mask[:, None], {rows})
    return (out,)
"""


@pytest.mark.parametrize(("rows", "put"), [("made", True), ("x_new", False)], ids=["picked", "others"])
def test_rows_scattered_by_a_mask_are_put_if_they_were_picked(rows, put):
    """Of others, as of images among words, there may be more than places."""
    gm, _ = graph(BY_MASK.format(rows=rows))
    before = copy_of(gm)
    index_forms.masked_rows(gm)
    assert ("index_put" in short(gm)) == put
    assert_same_meaning(before, gm, s0=9, s1=20)
