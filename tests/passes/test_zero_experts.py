"""zero_experts: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_loop, zero_experts
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = """
def graph(x: "f32[s0, 16]", gate: "f32[6, 16]", up: "f32[4, 16, 16]"):
    topk = torch.topk(F.softmax(F.linear(x, gate), dim=-1), 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    out = torch.zeros_like(x)
"""
TOKENS = """
    found{e} = torch.where(idx == {e})
    token{e} = found{e}[0]
    choice{e} = found{e}[1]
"""
EXPERT = TOKENS + "    rows{e} = F.linear(x[token{e}], up[{e}]) * weights[token{e}, choice{e}].unsqueeze(-1)\n"
COPY = TOKENS + "    rows{e} = x[token{e}] * weights[token{e}, choice{e}].unsqueeze(-1)\n"
PLAIN = TOKENS + "    rows{e} = torch.relu(x[token{e}]) * 0.5\n"
ADD = "    out = out.index_add(0, token{e}, rows{e})\n"
SET = "    out[token{e}] = out[token{e}] + rows{e}\n"


def loop(kinds=(EXPERT, EXPERT, EXPERT, EXPERT, COPY, COPY), add=ADD, order=None, head=HEAD):
    text = head
    for e in range(6) if order is None else order:
        text += kinds[e].format(e=e).lstrip("\n") + add.format(e=e)
    return text + "    return (out,)\n"


def rewritten(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = zero_experts.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(loop((EXPERT, COPY, COPY, COPY, COPY, COPY)))
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[6, 16]", up: "f32[4, 16, 16]"):
    linear = F.linear(x, gate)  # f32[s0, 6]
    softmax = F.softmax(linear, dim=-1)  # f32[s0, 6]
    topk = torch.topk(softmax, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    out = torch.zeros_like(x)  # f32[s0, 16]
    eq = idx == 0  # bool[s0, 2]
    found0 = torch.where(eq)  # (i64[u0], i64[u0])
    token0 = found0[0]  # i64[u0]
    choice0 = found0[1]  # i64[u0]
    getitem = x[token0]  # f32[u0, 16]
    getitem_1 = up[0]  # f32[16, 16]
    linear_1 = F.linear(getitem, getitem_1)  # f32[u0, 16]
    getitem_2 = weights[token0, choice0]  # f32[u0]
    unsqueeze = getitem_2.unsqueeze(-1)  # f32[u0, 1]
    rows0 = linear_1 * unsqueeze  # f32[u0, 16]
    ge = idx >= 1  # bool[s0, 2]
    le = idx <= 5  # bool[s0, 2]
    and_ = ge & le  # bool[s0, 2]
    mul = weights * and_  # f32[s0, 2]
    sum_1 = mul.sum(-1)  # f32[s0]
    unsqueeze_6 = sum_1.unsqueeze(-1)  # f32[s0, 1]
    out_free_rows1 = x * unsqueeze_6  # f32[s0, 16]
    add = out + out_free_rows1  # f32[s0, 16]
    out_1 = add.index_add(0, token0, rows0)  # f32[s0, 16]
    return (out_1,)  # (f32[s0, 16],)
""")
    assert result.changes == ["out_6: experts [1, 2, 3, 4, 5] have no matrices and compute all tokens where "
                              "they are"]  # fmt: skip


@pytest.mark.parametrize("source", [
    loop(),
    loop(add=SET),
    loop((EXPERT, EXPERT, EXPERT, EXPERT, COPY, PLAIN)),
    loop((EXPERT, EXPERT, EXPERT, EXPERT, PLAIN, PLAIN)),
    loop((EXPERT, EXPERT, EXPERT, COPY, PLAIN, COPY)).replace("f32[4, ", "f32[3, "),
    loop(order=(5, 0, 1, 4, 2, 3)),
    loop().replace("out = torch.zeros_like(x)", "out = x * 2.0"),
], ids=["copies", "assigned", "two kinds", "not weighed", "in turns", "other order", "not empty"])  # fmt: skip
def test_meaning(source):
    before, gm, result = rewritten(source)
    assert result.changes
    for rows in (1, 2, 9):
        assert_same_meaning(before, gm, exact=False, s0=rows)
    ctx = context(next(iter(gm.graph.nodes)).meta["val"].fake_mode, ep=1)
    raise_loop.run(gm, ctx)
    assert_same_meaning(before, gm, exact=False)
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
    assert "route.default(idx, " in short(gm)
    assert "where(" not in short(gm)


@pytest.mark.parametrize("source", [
    loop((EXPERT,) * 4 + (EXPERT.replace("up[{e}]", "up[3]"),) * 2),
    loop((EXPERT, EXPERT, COPY, COPY, EXPERT, COPY)).replace("4, 16, 16", "5, 16, 16"),
    loop(add=SET).replace("out = torch.zeros_like(x)", "out = x.clone()"),
], ids=["all have parameters", "in the middle", "written to"])  # fmt: skip
def test_noop(source):
    before, gm, result = rewritten(source)
    assert short(gm) == short(before)
    assert result.changes == []


def test_refusal():
    """What is no multiple of the scores cannot be done with their sum."""
    twice = COPY.replace("x[token{e}] *", "x[token{e}] + ")
    with pytest.raises(RaiseError, match="differs from the original"):
        rewritten(loop((EXPERT, EXPERT, EXPERT, EXPERT, twice, twice)))


def test_a_parameter_with_more_rows_than_experts_stays_whole():
    gm, mode = graph(loop(head=HEAD.replace("f32[4, 16, 16]", "f32[6, 16, 16]")))
    ctx = context(mode, dp=1, ep=2)
    before = copy_of(gm)
    for each in (zero_experts, raise_loop, place_experts):
        each.run(gm, ctx)
        refresh(gm, ctx)
    up = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == "up")
    assert tuple(up.meta["val"].shape) == (6, 16, 16)
    assert up.meta["moefx"].kind == "param"
    assert "own_experts.default(narrow, 2, 'ep')  # f32[2, 16, 16]" in short(gm)
    Comparison(before, ctx).whole(gm, placed=True, exact=False)
