"""weigh_inside: golden, no-op, refusals, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import weigh_inside
from tests.support.graphs import assert_same_meaning, context, graph, short
from tests.support.placing import RICH, STATIC
from tests.support.small import MOE

BIASED = RICH.replace("perm, 2)\n    result", "perm, 2, topk[0])\n    result")
OWN_BIAS = BIASED.replace("counts, False) + biases", "counts, False, bias_e)")


def rewritten(text, keep="mpipemoe-s4", table=None):
    gm, mode = graph(text)
    before, ctx = copy_of(gm), context(mode, Options(keep=keep), ep=1)
    ctx.decisions.restoring = table or {}
    result = weigh_inside.run(gm, ctx)
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = rewritten(MOE)
    assert result.changes == ["scores of region 0 inside"]
    assert_expected_inline("".join(short(gm).splitlines(keepends=True)[14:]), """\
    hidden = F.silu(grouped_linear_default)  # f32[2*s0, 24]
    scores_1 = m.dispatch_choices.default(weights, perm)
    scores_inside = enter(scores_1, counts, -1, -1, 0)
    reshape = scores_inside.reshape(-1, 1)
    hidden_weighed = hidden * reshape
    out_1 = m.grouped_linear.default(hidden_weighed, down_e, counts, False)
    outside = leave(out_1, counts, -1, -1, 0)  # f32[2*s0, 16]
    result = m.combine.default(outside, perm, 2)  # f32[s0, 16]
    return (result,)  # (f32[s0, 16],)
""")


@pytest.mark.parametrize(("text", "keep", "table"), [
    (MOE, "eager", {}), (MOE, "mpipemoe-s4", {"0.R": ("keep",)}), (STATIC, "mpipemoe-s4", {}),
    (RICH, "mpipemoe-s4", {}),  # nobody weighs its rows
])  # fmt: skip
def test_noop(text, keep, table):
    before, gm, result = rewritten(text, keep, table)
    assert not result.changes
    assert not result.skipped
    assert short(gm) == short(before)


@pytest.mark.parametrize(("text", "regions"), [(MOE, {0}), (BIASED, {0}), (STATIC, set()), (RICH, set())])
def test_the_planner_learns_where_scores_could_be_inside(text, regions):
    gm, mode = graph(text)
    before, ctx = copy_of(gm), context(mode, ep=1)
    ctx.decisions.whole = True
    assert not weigh_inside.run(gm, ctx).changes
    assert ctx.decisions.weighable == regions
    assert short(gm) == short(before)


@pytest.mark.parametrize(("old", "new", "why"), [
    ("    outside =", "    out = F.relu(out)\n    outside =", "what leaves is no product with a weight of each expert"),
    ("return (result,)", "return (result, outside.sum())", "somebody else reads what leaves"),
    ("perm, 2, weights)", "perm, 2, weights.double())", "scores are torch.float64, rows torch.float32"),
])  # fmt: skip
def test_what_is_not_linear_or_is_read_by_others_stays(old, new, why):
    before, gm, result = rewritten(MOE.replace(old, new))
    assert [reason for _, reason in result.skipped] == [f"scores stay outside of the experts: {why}"]
    assert short(gm) == short(before)


@pytest.mark.parametrize("text", [MOE, BIASED, OWN_BIAS, BIASED.replace("False) + biases", "False).add(biases)")])
def test_meaning(text):
    before, gm, result = rewritten(text)
    assert result.changes
    assert_same_meaning(before, gm, exact=False, seeds=2, s0=5)
