"""Rows that are cut into pieces, or put at once, by one index: each piece gets an index of its own."""

from __future__ import annotations

import expecttest
import pytest

from moefx.analysis.recognition import row_pieces
from moefx.ir.edit import copy_of
from tests.support.graphs import assert_same_meaning, graph, short

CUT = """
def graph(x: "f32[s0, 16]", keys: "f32[s0, 4]", w: "f32[s0]", up: "f32[16, 16]", down: "f32[16, 16]"):
    t = torch.argsort(keys[:, 1])
    g = w * 1.0
    rows = x[t]
    parts = rows.split([1, 2, x.size(0) - 3])
    y0 = F.linear(parts[0], up)
    y1 = F.linear(parts[1], down)
    y2 = parts[2]
    y = torch.cat([y0, y1, y2])
    out = torch.zeros_like(x).index_add(0, t, y * g[:, None])
    return (out,)
"""
JOINED = """
def graph(x: "f32[s0, 16]", keys: "f32[s0, 4]", w: "f32[s0]", up: "f32[16, 16]", down: "f32[16, 16]"):
    order = torch.argsort(keys[:, 1])
    a = order[:3]
    b = order[3:7]
    t = torch.cat([a, b])
    y = torch.cat([F.linear(x[a], up), F.linear(x[b], down)])
    g = torch.cat([w[a], w[b]])
    out = torch.zeros_like(x).index_add(0, t, y * g.unsqueeze(1))
    return (out,)
"""


def cut(source):
    gm, _ = graph(source)
    before = copy_of(gm)
    return before, gm, row_pieces.cut_indices(gm)


def test_golden():
    _, gm, found = cut(JOINED)
    assert found == 1
    expecttest.assert_expected_inline(short(gm), """\
def graph(x: "f32[4, 16]", keys: "f32[4, 4]", w: "f32[4]", up: "f32[16, 16]", down: "f32[16, 16]"):
    getitem = keys[:, 1]  # f32[4]
    order = torch.argsort(getitem)  # i64[4]
    a = order[:3]  # i64[3]
    b = order[3:7]  # i64[1]
    getitem_1 = x[a]  # f32[3, 16]
    linear = F.linear(getitem_1, up)  # f32[3, 16]
    getitem_2 = x[b]  # f32[1, 16]
    linear_1 = F.linear(getitem_2, down)  # f32[1, 16]
    getitem_3 = w[a]  # f32[3]
    getitem_4 = w[b]  # f32[1]
    zeros_like = torch.zeros_like(x)  # f32[4, 16]
    unsqueeze_1 = getitem_3.unsqueeze(1)  # f32[3, 1]
    mul_1 = linear * unsqueeze_1  # f32[3, 16]
    out_1 = zeros_like.index_add(0, a, mul_1)  # f32[4, 16]
    unsqueeze_2 = getitem_4.unsqueeze(1)  # f32[1, 1]
    mul_2 = linear_1 * unsqueeze_2  # f32[1, 16]
    out_2 = out_1.index_add(0, b, mul_2)  # f32[4, 16]
    return (out_2,)  # (f32[4, 16],)
""")


@pytest.mark.parametrize("source", [
    CUT,
    CUT.replace("rows.split([1, 2, x.size(0) - 3])", "rows.tensor_split([1, 3])"),
    CUT.replace("index_add(0, t, y * g[:, None])", "index_put((t,), (y * g[:, None]).to(x.dtype))"),
    CUT.replace("torch.zeros_like(x).index_add(0, t, y * g[:, None])", "x.clone()\n    out[t] = y"),
    CUT.replace("y2 = parts[2]", "y2 = parts[2] + rows.sum(0)"),
    JOINED,
    JOINED.replace("g.unsqueeze(1)", "g[:, None]"),
], ids=["split", "tensor_split", "index_put", "setitem", "read by others", "joined", "a new axis"])  # fmt: skip
def test_meaning(source):
    before, gm, found = cut(source)
    assert found == 1
    gm.graph.lint()
    gm.recompile()
    assert_same_meaning(before, gm, exact=False, s0=12)


SQUARE = CUT.replace("s0", "16").replace("x.size(0) - 3", "13")


@pytest.mark.parametrize("source", [
    SQUARE.replace("g[:, None]", "g"),
    CUT.replace("torch.cat([y0, y1, y2])", "torch.cat([y1, y0, y2])"),
    CUT.replace("y * g[:, None]", "y.cumsum(0)"),
    CUT.replace("    out =", "    y.mul_(2)\n    out ="),
    CUT.replace("    y0 =", "    x.mul_(2)\n    y0 ="),
    JOINED.replace("torch.cat([F.linear(x[a], up), F.linear(x[b], down)])", "F.linear(x[t], up)"),
    JOINED.replace("torch.cat([w[a], w[b]])", "w[:7]"),
], ids=["entries, as many as rows", "another order", "mixed", "written", "source written",
        "read at once", "uncut"])  # fmt: skip
def test_no_op(source):
    before, gm, found = cut(source)
    assert found == 0
    assert short(gm) == short(before)
