"""dense_mixtures: golden, no-op where it must not act, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.ir.edit import copy_of
from moefx.passes import dense_mixtures, unstack_experts
from tests.support.graphs import assert_same_meaning, context, graph, short

LOOP = """
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up_0: "f32[16, 16]", up_1: "f32[16, 16]"):
    g = F.softmax(F.linear(x, gate), dim=-1)
    y_0 = F.linear(x, up_0)
    y_1 = F.linear(x, up_1)
    out = y_0 * g[:, 0:1] + y_1 * g[:, 1:2]
    return (x + out,)
"""


def rewritten(text, ep=2):
    gm, mode = graph(text)
    before = copy_of(gm)
    ctx = context(mode, ep=ep)
    unstack_experts.run(gm, ctx)
    result = dense_mixtures.run(gm, ctx)
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(LOOP)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up_0: "f32[16, 16]", up_1: "f32[16, 16]"):
    linear = F.linear(x, gate)  # f32[s0, 2]
    g = F.softmax(linear, dim=-1)  # f32[s0, 2]
    y_0 = F.linear(x, up_0)  # f32[s0, 16]
    y_1 = F.linear(x, up_1)  # f32[s0, 16]
    arange = torch.arange(2, device=torch.device('cpu'))  # i64[2]
    expand_as = arange.expand_as(g)  # i64[s0, 2]
    eq = expand_as == 0  # bool[s0, 2]
    mul_2 = g * eq  # f32[s0, 2]
    sum_1 = torch.sum(mul_2, -1, keepdim=True)  # f32[s0, 1]
    mul = y_0 * sum_1  # f32[s0, 16]
    eq_1 = expand_as == 1  # bool[s0, 2]
    mul_3 = g * eq_1  # f32[s0, 2]
    sum_2 = torch.sum(mul_3, -1, keepdim=True)  # f32[s0, 1]
    mul_1 = y_1 * sum_2  # f32[s0, 16]
    out = mul + mul_1  # f32[s0, 16]
    add = x + out  # f32[s0, 16]
    return (add,)  # (f32[s0, 16],)
""")
    assert result.changes == ["g: every token chooses all 2 experts"]


SUM = "y_0 * g[:, 0:1] + y_1 * g[:, 1:2]"
WAYS = {
    "columns": SUM,
    "new axes": "g[:, 0, None] * y_0 + g[:, 1, None] * y_1",
    "unsqueezed": "y_0 * g[:, 0].unsqueeze(-1) + y_1 * g[..., 1].unsqueeze(1)",
    "selected": "y_1 * g.select(-1, 1).unsqueeze(-1) + y_0 * g.select(1, 0).unsqueeze(-1)",
    "narrowed": "y_0 * g.narrow(-1, 0, 1) + y_1 * g.narrow(1, 1, 1)",
    "unbound": "y_0 * g.unbind(-1)[0].unsqueeze(-1) + y_1 * g.unbind(-1)[1].unsqueeze(-1)",
    "split": "y_0 * g.split(1, -1)[0] + y_1 * g.split(1, -1)[1]",
    "rows": "y_0 * g.t()[0].unsqueeze(-1) + y_1 * g.t()[1].unsqueeze(-1)",
    "a number on the way": "y_0 * (g[:, 0:1] * g.new_ones(())) + y_1 * g[:, 1:2]",
    "added to something": "(x * 2 + y_0 * g[:, 0:1]) + y_1 * g[:, 1:2]",
    "stacked": "(torch.stack([y_0, y_1], 1) * g.unsqueeze(-1)).sum(1)",
    "einsum": 'torch.einsum("te,ted->td", g, torch.stack([y_0, y_1], 1))',
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_meaning(way):
    before, gm, result = rewritten(LOOP.replace(SUM, way))
    assert result.changes
    assert "expand_as" in short(gm)
    assert_same_meaning(before, gm, exact=False)


NOOP = {
    "a column twice": LOOP.replace("g[:, 1:2]", "g[:, 0:1]"),
    "a column is left out": LOOP.replace('gate: "f32[2, 16]"', 'gate: "f32[3, 16]"'),
    "other functions": LOOP.replace("y_1 = F.linear(x, up_1)", "y_1 = F.relu(x)"),
    "other tokens": LOOP.replace("F.linear(x, up_1)", "F.linear(x * 2, up_1)"),
    "one function": LOOP.replace("up_1)", "up_0)"),
    "stacked, of other functions": LOOP.replace(SUM, WAYS["stacked"]).replace("F.linear(x, up_1)", "F.relu(x)"),
    "numbers": LOOP.replace(SUM, "y_0 * g.sum() + y_1 * g[0, 0]"),
    "weights of another axis": LOOP.replace('x: "f32[s0, 16]"', 'x: "f32[s0, s0, 16]"').replace(
        "F.linear(x, gate)", "F.linear(x.mean(0), gate)").replace("g[:, 0:1]", "g[:, 0][None, :, None]").replace(
        "g[:, 1:2]", "g[:, 1][None, :, None]"),
    "numbers alone": LOOP.replace(SUM, "y_0 * g.sum() + g.sum() * 2.0"),
}


@pytest.mark.parametrize("text", NOOP.values(), ids=NOOP)
def test_noop(text):
    before, gm, result = rewritten(text)
    assert short(gm) == short(before)
    assert result.changes == []


def test_nothing_to_spread():
    before, gm, result = rewritten(LOOP, ep=1)
    assert short(gm) == short(before)
    assert not result.skipped


def test_fewer_experts_than_ranks_stay_and_say_so():
    before, gm, result = rewritten(LOOP, ep=4)
    assert short(gm) == short(before)
    assert "2 experts that compute all tokens are fewer than 4 ranks" in str(result.skipped)
