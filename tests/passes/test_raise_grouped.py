"""raise_grouped: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_grouped
from tests.support.graphs import assert_same_meaning, context, graph, short
from tests.support.small import CAPTURED

# Rows in the order of their experts come back by the inverse order, and biases are looked up by sorted ids.
BIASED = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 16, 24]", bias: "f32[8, 24]", down: "f32[8, 24, 16]"):
    topk = torch.topk(F.linear(x, gate).sigmoid(), 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    flat = idx.reshape(-1)
    ordered = torch.sort(flat, stable=True)
    ids = ordered[0]
    perm = ordered[1]
    counts = torch.bincount(flat, minlength=8)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    hidden = (grouped_mm_fallback(x[perm // 2], up, offsets) + bias[ids]).relu()
    out = grouped_mm_fallback(hidden, down, offsets) * weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    result = out[inverse].view(-1, 2, 16).sum(dim=1)
    return (result,)
"""


def raised(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = raise_grouped.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = raised(CAPTURED)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    r0_up = expert_parameter(up, 0)  # f32[8, 24, 16]
    r0_down = expert_parameter(down, 0)  # f32[8, 16, 24]
    linear = F.linear(x, gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    r0_route = m.route.default(idx, 8)  # (i64[2*s0], i64[8])
    r0_perm = r0_route[0]  # i64[2*s0]
    r0_counts = r0_route[1]  # i64[8]
    r0_dispatch = m.dispatch.default(x, r0_perm, 2)  # f32[2*s0, 16]
    r0_enter = enter(r0_dispatch, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_linear = m.grouped_linear.default(r0_enter, r0_up, r0_counts, False)  # f32[2*s0, 24]
    hidden = F.silu(r0_linear)  # f32[2*s0, 24]
    r0_linear_1 = m.grouped_linear.default(hidden, r0_down, r0_counts, False)  # f32[2*s0, 16]
    r0_leave = leave(r0_linear_1, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    zeros_like = torch.zeros_like(x)  # f32[s0, 16]
    r0_combine = m.combine.default(r0_leave, r0_perm, 2, weights)  # f32[s0, 16]
    result_1 = zeros_like + r0_combine  # f32[s0, 16]
    return (result_1,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0: 8 experts, 2 grouped matmuls (grouped_mm_fallback)"]


def test_golden_with_biases_and_an_inverse_order():
    _, gm, _ = raised(BIASED)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[8, 16]",
    up: "f32[8, 16, 24]",
    bias: "f32[8, 24]",
    down: "f32[8, 24, 16]",
):
    r0_up = expert_parameter(up, 0)  # f32[8, 16, 24]
    r0_bias = expert_parameter(bias, 0)  # f32[8, 24]
    r0_down = expert_parameter(down, 0)  # f32[8, 24, 16]
    linear = F.linear(x, gate)  # f32[s0, 8]
    sigmoid = linear.sigmoid()  # f32[s0, 8]
    topk = torch.topk(sigmoid, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    r0_route = m.route.default(idx, 8)  # (i64[2*s0], i64[8])
    r0_perm = r0_route[0]  # i64[2*s0]
    r0_counts = r0_route[1]  # i64[8]
    r0_dispatch = m.dispatch.default(x, r0_perm, 2)  # f32[2*s0, 16]
    r0_enter = enter(r0_dispatch, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_linear = m.grouped_linear.default(r0_enter, r0_up, r0_counts, True)  # f32[2*s0, 24]
    size = r0_perm.size(0)  # 2*s0
    r0_expert_rows = m.expert_rows.default(r0_bias, r0_counts, size)  # f32[2*s0, 24]
    add = r0_linear + r0_expert_rows  # f32[2*s0, 24]
    hidden = add.relu()  # f32[2*s0, 24]
    r0_linear_1 = m.grouped_linear.default(hidden, r0_down, r0_counts, True)  # f32[2*s0, 16]
    r0_leave = leave(r0_linear_1, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_combine = m.combine.default(r0_leave, r0_perm, 2, weights)  # f32[s0, 16]
    return (r0_combine,)  # (f32[s0, 16],)
""")


def test_noop():
    before, gm, result = raised("""
        def graph(x: "f32[s0, 16]", gate: "f32[8, 16]"):
            topk = torch.topk(F.linear(x, gate), 2, dim=-1)
            order = torch.argsort(topk[1].reshape(-1), stable=True)
            return (topk[0], x[order // 2])
    """)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize(("edit", "message"), [
    (("    offsets = torch.cumsum(counts, 0, dtype=torch.int32)", "    offsets = torch.cumsum(flat[:8], 0).int()"),
     "offsets are not running counts of a routing"),
    (("    hidden = F.silu(", "    sums = rows.sum()\n    hidden = F.silu(sums + "),
     "mixes rows of different tokens or experts"),
], ids=["offsets", "mixed rows"])  # fmt: skip
def test_refusal(edit, message):
    assert edit[0] in CAPTURED
    with pytest.raises(RaiseError) as caught:
        raised(CAPTURED.replace(*edit))
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


@pytest.mark.parametrize("source", [CAPTURED, BIASED])
def test_meaning(source):
    before, gm, _ = raised(source)
    for rows in (1, 2, 7):  # most experts are idle for the first two
        assert_same_meaning(before, gm, exact=False, s0=rows)
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
