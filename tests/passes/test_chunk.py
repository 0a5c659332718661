"""chunk: golden, no-op, refusal, meaning; also through placement and differentiation."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import accumulate_wgrads, chunk
from tests.support.graphs import assert_same_meaning, context, graph, short
from tests.support.small import MOE

STATIC = """
def graph(x: "f32[8, 5, 16]", w: "f32[8, 16, 24]", y: "f32[8, s0, 16]"):
    w_e = expert_parameter(w, 0)
    inside = enter(x, None, 0, 1, 0)
    out = torch.bmm(inside, w_e)
    outside = leave(out, None, 0, 1, 0)
    w_f = expert_parameter(w, 1)
    inside_1 = enter(y, None, 0, 1, 1)
    out_1 = torch.bmm(inside_1, w_f)
    outside_1 = leave(out_1, None, 0, 1, 1)
    return (outside, outside_1)
"""


def chunked(source, n, **axes):
    gm, mode = graph(source)
    before, ctx = copy_of(gm), context(mode, Options(chunks=n), **axes)
    result = chunk.run(gm, ctx)
    gm.graph.lint()
    refresh(gm, ctx)
    return before, gm, result, ctx


def test_golden_by_tokens():
    _, gm, result, ctx = chunked(MOE, 2)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)  # f32[8, 24, 16]
    down_e = expert_parameter(down, 0)  # f32[8, 16, 24]
    linear = F.linear(x, gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    size = idx.size(0)  # s0
    floordiv = size // 2  # (s0//2)
    sub = size - floordiv  # s0 - ((s0//2))
    idx_parts = idx.split([floordiv, sub], 0)  # (i64[(s0//2), 2], i64[s0 - ((s0//2)), 2])
    idx_0of2 = idx_parts[0]  # i64[(s0//2), 2]
    idx_1of2 = idx_parts[1]  # i64[s0 - ((s0//2)), 2]
    route_c0 = m.route.default(idx_0of2, 8)  # (i64[2*((s0//2))], i64[8])
    route_c1 = m.route.default(idx_1of2, 8)  # (i64[2*s0 - 2*((s0//2))], i64[8])
    perm_c0 = route_c0[0]  # i64[2*((s0//2))]
    perm_c1 = route_c1[0]  # i64[2*s0 - 2*((s0//2))]
    counts_c0 = route_c0[1]  # i64[8]
    counts_c1 = route_c1[1]  # i64[8]
    x_parts = x.split([floordiv, sub], 0)  # (f32[(s0//2), 16], f32[s0 - ((s0//2)), 16])
    x_0of2 = x_parts[0]  # f32[(s0//2), 16]
    x_1of2 = x_parts[1]  # f32[s0 - ((s0//2)), 16]
    rows_c0 = m.dispatch.default(x_0of2, perm_c0, 2)  # f32[2*((s0//2)), 16]
    rows_c1 = m.dispatch.default(x_1of2, perm_c1, 2)  # f32[2*s0 - 2*((s0//2)), 16]
    inside_c0 = enter(rows_c0, counts_c0, -1, -1, 0)  # f32[2*((s0//2)), 16]
    inside_c1 = enter(rows_c1, counts_c1, -1, -1, 1)  # f32[2*s0 - 2*((s0//2)), 16]
    grouped_linear_default_c0 = m.grouped_linear.default(inside_c0, up_e, counts_c0, False)  # f32[2*((s0//2)), 24]
    grouped_linear_default_c1 = m.grouped_linear.default(inside_c1, up_e, counts_c1, False)  # f32[2*s0 - 2*((s0//2)), 24]
    hidden_c0 = F.silu(grouped_linear_default_c0)  # f32[2*((s0//2)), 24]
    hidden_c1 = F.silu(grouped_linear_default_c1)  # f32[2*s0 - 2*((s0//2)), 24]
    out_c0 = m.grouped_linear.default(hidden_c0, down_e, counts_c0, False)  # f32[2*((s0//2)), 16]
    out_c1 = m.grouped_linear.default(hidden_c1, down_e, counts_c1, False)  # f32[2*s0 - 2*((s0//2)), 16]
    outside_c0 = leave(out_c0, counts_c0, -1, -1, 0)  # f32[2*((s0//2)), 16]
    outside_c1 = leave(out_c1, counts_c1, -1, -1, 1)  # f32[2*s0 - 2*((s0//2)), 16]
    weights_parts = weights.split([floordiv, sub], 0)  # (f32[(s0//2), 2], f32[s0 - ((s0//2)), 2])
    weights_0of2 = weights_parts[0]  # f32[(s0//2), 2]
    weights_1of2 = weights_parts[1]  # f32[s0 - ((s0//2)), 2]
    result_c0 = m.combine.default(outside_c0, perm_c0, 2, weights_0of2)  # f32[(s0//2), 16]
    result_c1 = m.combine.default(outside_c1, perm_c1, 2, weights_1of2)  # f32[s0 - ((s0//2)), 16]
    result_all = torch.cat([result_c0, result_c1], 0)  # f32[s0, 16]
    return (result_all,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0 in 2 chunks"]
    assert {number: (c.of, c.index, c.n) for number, c in ctx.decisions.chunks.items()} == {0: (0, 0, 2), 1: (0, 1, 2)}


def test_golden_by_capacity():
    _, gm, _, _ = chunked(STATIC, 2)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[8, 5, 16]", w: "f32[8, 16, 24]", y: "f32[8, s0, 16]"):
    w_e = expert_parameter(w, 0)  # f32[8, 16, 24]
    x_parts = x.split([2, 3], 1)  # (f32[8, 2, 16], f32[8, 3, 16])
    x_0of2 = x_parts[0]  # f32[8, 2, 16]
    x_1of2 = x_parts[1]  # f32[8, 3, 16]
    inside_c0 = enter(x_0of2, None, 0, 1, 0)  # f32[8, 2, 16]
    inside_c1 = enter(x_1of2, None, 0, 1, 2)  # f32[8, 3, 16]
    out_c0 = torch.bmm(inside_c0, w_e)  # f32[8, 2, 24]
    out_c1 = torch.bmm(inside_c1, w_e)  # f32[8, 3, 24]
    outside_c0 = leave(out_c0, None, 0, 1, 0)  # f32[8, 2, 24]
    outside_c1 = leave(out_c1, None, 0, 1, 2)  # f32[8, 3, 24]
    outside_all = torch.cat([outside_c0, outside_c1], 1)  # f32[8, 5, 24]
    w_f = expert_parameter(w, 1)  # f32[8, 16, 24]
    size = y.size(1)  # s0
    chunk_rows = m.num_chunk_rows.default(y, 1, 0, 2)  # u0
    sub = size - chunk_rows  # s0 - u0
    y_parts = y.split([chunk_rows, sub], 1)  # (f32[8, u0, 16], f32[8, s0 - u0, 16])
    y_0of2 = y_parts[0]  # f32[8, u0, 16]
    y_1of2 = y_parts[1]  # f32[8, s0 - u0, 16]
    inside_1_c0 = enter(y_0of2, None, 0, 1, 1)  # f32[8, u0, 16]
    inside_1_c1 = enter(y_1of2, None, 0, 1, 3)  # f32[8, s0 - u0, 16]
    out_1_c0 = torch.bmm(inside_1_c0, w_f)  # f32[8, u0, 24]
    out_1_c1 = torch.bmm(inside_1_c1, w_f)  # f32[8, s0 - u0, 24]
    outside_1_c0 = leave(out_1_c0, None, 0, 1, 1)  # f32[8, u0, 24]
    outside_1_c1 = leave(out_1_c1, None, 0, 1, 3)  # f32[8, s0 - u0, 24]
    outside_1_all = torch.cat([outside_1_c0, outside_1_c1], 1)  # f32[8, s0, 24]
    return (outside_all, outside_1_all)  # (f32[8, 5, 24], f32[8, s0, 24])
""")


@pytest.mark.parametrize("source", [MOE, STATIC])
def test_noop(source):
    before, gm, result, _ = chunked(source, 1)
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return (result,)", "return (result, counts)", "counts depends on the routing, but not through a combine"),
        ("return (result,)", "return (result, outside)", "outside depends on the routing, but not through a combine"),
        ("hidden = F.silu(", "hidden = F.relu(x.repeat(2, 2)[:, :24] + ", "whose size depends on the number of"),
        ("out = m.", "hidden = hidden - hidden.mean(0)\n    out = m.", "mean mixes rows"),
        ("out = m.", "hidden = hidden.cumsum(0)\n    out = m.", "hidden_1 mixes rows"),
    ],
)
def test_refusal(old, new, reason):
    assert old in MOE
    before, gm, result, _ = chunked(MOE.replace(old, new), 2)
    ((where, found),) = result.skipped
    assert reason in found
    assert "inside" in where
    assert short(gm) == short(before)


FIXED = MOE.replace("s0", "4").replace('down: "f32[8, 16, 24]")', 'down: "f32[8, 16, 24]", every: "f32[8]")')


@pytest.mark.parametrize(("code", "reason"), [
    ("hidden = hidden * every[:, None]", "reads getitem, whose size depends on the number of tokens"),
    ("hidden = (hidden.t() * every).t()", "reads every, whose size depends on the number of tokens"),
    ("hidden = hidden.view(8, 2, 12).flatten(1)", "view fixes the number of tokens as 8"),
    ("hidden = (hidden.unflatten(1, (3, 8)) @ every).repeat(1, 8)", None),
    ("hidden = hidden.view(-1, 3, 8) * every\n    hidden = hidden.flatten(1)", None),
])  # fmt: skip
def test_which_dims_run_over_tokens_does_not_depend_on_sizes_alone(code, reason):
    """With as many pairs as experts and as numbers in `every`."""
    before, gm, result, _ = chunked(FIXED.replace("    out = m.", f"    {code}\n    out = m."), 2)
    if reason is not None:
        ((_, found),) = result.skipped
        assert reason in found
        assert short(gm) == short(before)
    else:
        assert result.changes == ["region 0 in 2 chunks"]
        assert_same_meaning(before, gm, exact=False, seeds=1)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_meaning(n, tokens):
    before, gm, _, _ = chunked(MOE, n)
    assert_same_meaning(before, gm, exact=False, seeds=1, s0=tokens)
    before, gm, _, _ = chunked(STATIC, n)
    assert_same_meaning(before, gm, exact=False, seeds=1, s0=tokens)


def test_routing_with_idle_experts_keeps_its_meaning():
    source = MOE.replace("torch.topk(scores, 2", "torch.topk(scores * 0 + gate[:, 0], 2")
    assert source != MOE
    before, gm, _, _ = chunked(source, 3)
    assert_same_meaning(before, gm, exact=False, seeds=2, s0=5)


def step_of(n, **axes):
    gm, mode = graph(MOE)
    ctx = context(mode, Options(chunks=n), **axes)
    check = Comparison(gm, ctx)
    for one in (chunk, place_experts):
        one.run(gm, ctx)
        refresh(gm, ctx)
    check.whole(gm, placed=True, exact=False)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    return check, step, ctx


@pytest.mark.parametrize("n", [1, 3])
def test_weight_gradients_of_chunks_add_up_in_place(n):
    check, step, ctx = step_of(n, ep=2)
    check.step(step, exact=False)
    result = accumulate_wgrads.run(step.backward, ctx)
    step.backward.graph.lint()
    check.step(step, exact=False)
    wgrads = step.backward.graph.find_nodes(op="call_function", target=torch.ops.moefx.grouped_wgrad.default)
    assert len(wgrads) == 2 * n
    assert sum(len(node.args) == 4 for node in wgrads) == 2
    assert result.changes == ([] if n == 1 else [f"3 weight gradients in {w.name}" for w in wgrads if not any(
        u in wgrads for u in w.users)])
    added = [node for node in step.backward.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert not any(a in wgrads for node in added for a in node.all_input_nodes)


def test_the_chunks_of_a_region_share_its_table_and_its_statistics():
    _, step, ctx = step_of(3, ep=2)
    assert [facts.of for facts in ctx.decisions.regions.values()] == [0, 0, 0]
    assert sum("table" in node.name for node in step.forward.graph.find_nodes(op="placeholder")) == 1
