"""unstack_experts: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_loop, unstack_experts
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = """
def graph(x: "f32[s0, 16]", gate: "f32[3, 16]", up0: "f32[16, 16]", up1: "f32[16, 16]", up2: "f32[16, 16]"):
    topk = torch.topk(F.softmax(F.linear(x, gate), dim=-1), 2, dim=-1)
    w = topk[0]
    idx = topk[1]
    y0 = F.linear(x, up0)
    y1 = F.linear(x, up1)
    y2 = F.linear(x, up2)
    full = torch.zeros(x.size(0), 3).scatter(1, idx, w)
    y = torch.stack([y0, y1, y2], 1)
"""
EINSUM = HEAD + """    out = torch.einsum("te,ted->td", full, y)
    return (out,)
"""
LETTERS = HEAD + """    out = torch.einsum("abc, ab -> ac", y, full)
    return (out,)
"""
SUM = HEAD + """    out = (y * full.unsqueeze(-1)).sum(1)
    return (out,)
"""
LAST = HEAD.replace("[y0, y1, y2], 1)", "[y0, y1, y2], -1)") + """    out = (full[:, None, :] * y).sum(dim=2)
    return (out,)
"""
GATHER = HEAD + """    out = (y.gather(1, idx.unsqueeze(-1).expand(-1, -1, 16)) * w.unsqueeze(-1)).sum(dim=1)
    return (out,)
"""
ALONG = HEAD + """    out = (torch.take_along_dim(y, idx[:, :, None], 1) * w[..., None]).sum(1)
    return (out,)
"""
# Tokens that are numbered by two dims.
HEAD_3 = HEAD.replace("f32[s0, 16]", "f32[s0, s1, 16]").replace("x.size(0), 3", "x.size(0), x.size(1), 3").replace(
    "scatter(1", "scatter(2"
)
EINSUM_3 = HEAD_3.replace("[y0, y1, y2], 1)", "[y0, y1, y2], 2)") + """    out = torch.einsum("bse,bsed->bsd", full, y)
    return (out,)
"""
LAST_3 = HEAD_3.replace("[y0, y1, y2], 1)", "[y0, y1, y2], -1)") + """    out = (full.unsqueeze(-2) * y).sum(-1)
    return (out,)
"""
GATHER_3 = HEAD_3.replace("[y0, y1, y2], 1)", "[y0, y1, y2], -2)") + """    pick = idx[..., None].expand(-1, -1, -1, 16)
    out = (y.gather(2, pick) * w.unsqueeze(-1)).sum(dim=-2)
    return (out,)
"""
CHOSEN = HEAD + """    rows = torch.arange(x.size(0))
    sel = y[rows.unsqueeze(1), idx]
    out = torch.einsum("tk,tkd->td", w, sel)
    return (out,)
"""
FORMS = {"einsum": EINSUM, "letters": LETTERS, "sum": SUM, "last axis": LAST, "gather": GATHER, "along": ALONG,
         "index": CHOSEN, "einsum, two dims": EINSUM_3, "last axis, two dims": LAST_3, "gather, two dims": GATHER_3}


def unstacked(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = unstack_experts.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = unstacked(EINSUM)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[3, 16]",
    up0: "f32[16, 16]",
    up1: "f32[16, 16]",
    up2: "f32[16, 16]",
):
    linear = F.linear(x, gate)  # f32[s0, 3]
    softmax = F.softmax(linear, dim=-1)  # f32[s0, 3]
    topk = torch.topk(softmax, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    w = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    y0 = F.linear(x, up0)  # f32[s0, 16]
    y1 = F.linear(x, up1)  # f32[s0, 16]
    y2 = F.linear(x, up2)  # f32[s0, 16]
    eq = idx == 0  # bool[s0, 2]
    mul = w * eq  # f32[s0, 2]
    sum_1 = mul.sum(-1, keepdim=True)  # f32[s0, 1]
    mul_1 = y0 * sum_1  # f32[s0, 16]
    eq_1 = idx == 1  # bool[s0, 2]
    mul_2 = w * eq_1  # f32[s0, 2]
    sum_2 = mul_2.sum(-1, keepdim=True)  # f32[s0, 1]
    mul_3 = y1 * sum_2  # f32[s0, 16]
    add = mul_1 + mul_3  # f32[s0, 16]
    eq_2 = idx == 2  # bool[s0, 2]
    mul_4 = w * eq_2  # f32[s0, 2]
    sum_3 = mul_4.sum(-1, keepdim=True)  # f32[s0, 1]
    mul_5 = y2 * sum_3  # f32[s0, 16]
    add_1 = add + mul_5  # f32[s0, 16]
    return (add_1,)  # (f32[s0, 16],)
""")
    assert_expected_inline("\n".join(result.changes), """out: 3 stacked experts added one by one""")


@pytest.mark.parametrize("source", [
    SUM.replace("full.unsqueeze(-1)", "F.softmax(F.linear(x, gate), dim=-1).unsqueeze(-1)"),
    SUM.replace("full.unsqueeze(-1)).sum(1)", "full.unsqueeze(-1)).sum(2)"),
    EINSUM.replace("te,ted->td", "te,ted->tde"),
    EINSUM.replace("te,ted->td", "te,ted->d"),
    EINSUM.replace("idx = topk[1]", "idx = topk[1].clamp(max=1)"),
    GATHER.replace(".expand(-1, -1, 16)", ""),
    GATHER.replace("idx = topk[1]", "idx = topk[1].clamp(max=1)"),
    CHOSEN.replace("idx = topk[1]", "idx = topk[1].clamp(max=1)"),
    CHOSEN.replace("torch.arange(x.size(0))", "torch.arange(x.size(0)).flip(0)"),
], ids=["weights of all experts", "sum over D", "no sum", "sum over tokens", "equal choices", "one column",
        "equal choices gathered", "equal choices by index", "other rows"])  # fmt: skip
def test_other_sums_are_left_alone(source):
    before, gm, result = unstacked(source)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)
def test_meaning(source):
    before, gm, result = unstacked(source)
    assert len(result.changes) == 1
    assert "stack" not in short(gm)
    for rows in (1, 2, 7):
        assert_same_meaning(before, gm, exact=False, s0=rows)
    raise_loop.run(gm, context(next(iter(gm.graph.nodes)).meta["val"].fake_mode, ep=1))
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
    assert sum("grouped_linear" in str(n.target) for n in gm.graph.nodes) == 1
    assert_same_meaning(before, gm, exact=False, s0=7)


WEIGHED = """
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up0: "f32[16, 16]", up1: "f32[16, 16]"):
    g = F.softmax(F.linear(x, gate), dim=-1)
    y0 = F.linear(x, up0) * g[:, 0:1]
    y1 = g[:, 1:2] * F.linear(x, up1) * 2.0
    out = torch.stack([y0, y1]).sum(0)
    return (out,)
"""


@pytest.mark.parametrize("source", [
    WEIGHED,
    WEIGHED.replace("[y0, y1]).sum(0)", "[y0, y1], dim=-1).sum(dim=(-1,))"),
    WEIGHED.replace("torch.stack([y0, y1])", "torch.cat([y0.unsqueeze(0), y1[None]])"),
    WEIGHED.replace("sum(0)", "mean(0)"),
    WEIGHED.replace("torch.stack([y0, y1])", "torch.cat([y0, y1]).view(2, -1, 16)"),
], ids=["first", "last", "cat", "mean", "cat and view"])  # fmt: skip
def test_products_that_are_stacked_are_added(source):
    before, gm, result = unstacked(source)
    assert result.changes == ["out: 2 stacked experts added one by one"]
    assert "add = y0 + y1" in short(gm).replace("mul_2", "y1")
    assert "stack" not in short(gm)
    assert "cat" not in short(gm)
    assert_same_meaning(before, gm, exact=False, s0=7)


@pytest.mark.parametrize("source", [
    WEIGHED.replace("sum(0)", "sum(1)"), WEIGHED.replace("sum(0)", "sum(0, keepdim=True)"),
    WEIGHED.replace("sum(0)", "amax(0)"), WEIGHED.replace("g[:, 1:2] * F.linear(x, up1) * 2.0", "F.linear(x, up1)"),
    WEIGHED.replace("g[:, 1:2] * F.linear(x, up1) * 2.0", "(g[:, 1:2] * F.linear(x, up1)).relu()"),
    WEIGHED.replace("torch.stack([y0, y1])", "y.view(2, -1, 16)").replace(
        "    out =", "    y = torch.cat([y0, y1])\n    y[0] = 1.0\n    out ="),
], ids=["over tokens", "kept dim", "maximum", "no product", "behind a function",
        "a cat that is written to"])  # fmt: skip
def test_other_stacks_are_left_alone(source):
    before, gm, result = unstacked(source)
    assert short(gm) == short(before)
    assert result.changes == []
