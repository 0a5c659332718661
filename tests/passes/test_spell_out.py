"""spell_out: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.passes import spell_out
from tests.support.graphs import assert_same_meaning, short
from tests.support.placing import placed

WRITTEN = """
def graph(x: "f32[s0, 4, 4]", x2: "f32[s0, 2]"):
    y = x.neg()
    first = y[..., 1, :2].clone()
    y[..., 1, :2] = x2
    second = y[..., 2] + first.sum()
    y[:, :, 2] = second
    z = F.silu(y)
    return (z,)
"""
LIKE = """
def graph(x: "f32[s0, 8]", x2: "f32[s0, 2, 4]"):
    y = x.view_as(x2)
    shape = x2.size()
    z = x.reshape(shape)
    w = y * z + x2
    return (w,)
"""
OTHERS = {
    "a view": WRITTEN.replace("x.neg()", "(x * 2.0).view((-1, 4, 4))"),
    "an input": WRITTEN.replace("    y = x.neg()\n", "").replace("y", "x"),
    "a view that is read later": WRITTEN.replace(".clone()", "").replace("first.sum()", "0.0").replace(
        "F.silu(y)", "F.silu(y) + first.sum()"),
    "written otherwise, too": WRITTEN.replace("    z =", "    more = y.mul_(2.0)\n    z ="),
    "places by a mask": WRITTEN.replace("y[:, :, 2] = second", "y[x > 0] = 1.0"),
    "a number": WRITTEN.replace("y[..., 1, :2] = x2", "y[..., 1, :2] = 1.0"),
    "another type": WRITTEN.replace('x2: "f32[s0, 2]"', 'x2: "f64[s0, 2]"'),
    "broadcast": WRITTEN.replace('x2: "f32[s0, 2]"', 'x2: "f32[s0, 1]"'),
}  # fmt: skip


def spelled(source: str, **axes: int):
    return placed(source, run=spell_out.run, **(axes or {"mp": 2}))


def test_golden():
    _, gm, result, _ = spelled(WRITTEN)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 4, 4]", x2: "f32[s0, 2]"):
    y = x.neg()  # f32[s0, 4, 4]
    getitem = y[..., 1, :2]  # f32[s0, 2]
    first = getitem.clone()  # f32[s0, 2]
    select = torch.select(y, 1, 1)  # f32[s0, 4]
    slice_scatter = torch.slice_scatter(select, x2, 1, None, 2, 1)  # f32[s0, 4]
    select_scatter = torch.select_scatter(y, slice_scatter, 1, 1)  # f32[s0, 4, 4]
    getitem_1 = select_scatter[..., 2]  # f32[s0, 4]
    sum_1 = first.sum()  # f32[]
    second = getitem_1 + sum_1  # f32[s0, 4]
    select_scatter_1 = torch.select_scatter(select_scatter, second, 2, 2)  # f32[s0, 4, 4]
    z = F.silu(select_scatter_1)  # f32[s0, 4, 4]
    return (z,)  # (f32[s0, 4, 4],)
""")
    assert result.changes == ["2 writes to slices of y make new tensors"]


def test_golden_like():
    _, gm, *_ = spelled(LIKE)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 8]", x2: "f32[s0, 2, 4]"):
    sym_size_int = ops.aten.sym_size.int(x2, 0)  # s0
    y = x.view((sym_size_int, 2, 4))  # f32[s0, 2, 4]
    sym_size_int_1 = ops.aten.sym_size.int(x2, 0)  # s0
    z = x.reshape((sym_size_int_1, 2, 4))  # f32[s0, 2, 4]
    mul = y * z  # f32[s0, 2, 4]
    w = mul + x2  # f32[s0, 2, 4]
    return (w,)  # (f32[s0, 2, 4],)
""")


@pytest.mark.parametrize("name", OTHERS)
def test_refusal(name):
    before, gm, result, _ = spelled(OTHERS[name])
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize("source", [WRITTEN, LIKE])
def test_noop_without_mp(source):
    before, gm, result, _ = spelled(source, ep=2)
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize("source", [WRITTEN, LIKE, WRITTEN.replace("[..., 1, :2]", "[:, -1, 1:3]")])
def test_meaning(source):
    before, gm, result, _ = spelled(source)
    assert result.changes
    assert_same_meaning(before, gm, s0=3)
