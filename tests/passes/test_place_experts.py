"""The step place-experts as a whole; its four files have tests of their own beside this one."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.verify import Facts, verify
from tests.support.graphs import short
from tests.support.placing import BUFFER, FIXED, MIXED, OUTSIDE, RICH, STACK_OUTSIDE, STATIC, placed
from tests.support.small import MOE


def test_golden():
    _, gm, result, ctx = placed(MOE, dp=2, ep=4)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[8, 16]",
    up: "f32[2, 24, 16]",
    down: "f32[2, 16, 24]",
    r0_table: "i64[8, 1]",
):
    use_gate = materialize(gate, 'identity', 'dp+ep', 0.125, 1)  # f32[8, 16]
    linear = F.linear(x, use_gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    route = m.route.default(idx, 8, r0_table)  # (i64[2*s0], i64[8])
    perm = route[0]  # i64[2*s0]
    counts = route[1]  # i64[8]
    r0_traffic = m.exchange_counts.default(counts, 4, 'ep')  # i64[4, 8]
    r0_host = m.counts_to_host.default(r0_traffic, 'ep')  # i64[4, 8]
    r0_rows = m.received_rows.default(r0_host, 4, 'ep')  # u0
    r0_slots = m.slot_counts.default(r0_traffic, 4, 'ep')  # i64[2]
    r0_sent = perm.size(0)  # 2*s0
    rows = m.dispatch.default(x, perm, 2)  # f32[2*s0, 16]
    r0_enter_a2a = m.all_to_all.default(rows, r0_host, r0_rows, 4, 'ep', False)  # f32[u0, 16]
    r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_host, 4, 'ep', False)  # f32[u0, 16]
    use_up = materialize(up, 'identity', 'dp', 0.125, 2)  # f32[2, 24, 16]
    grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, use_up, r0_slots, False)  # f32[u0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[u0, 24]
    use_down = materialize(down, 'identity', 'dp', 0.125, 3)  # f32[2, 16, 24]
    out = m.grouped_linear.default(hidden, use_down, r0_slots, False)  # f32[u0, 16]
    r0_leave_regroup = m.regroup.default(out, r0_host, 4, 'ep', True)  # f32[u0, 16]
    r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_host, r0_sent, 4, 'ep', True)  # f32[2*s0, 16]
    result = m.combine.default(r0_leave_a2a, perm, 2, weights)  # f32[s0, 16]
    return (result, r0_traffic, idx)  # (f32[s0, 16], i64[4, 8], i64[s0, 2])
""")
    assert result.changes[0] == "region 0 over 4 ranks"
    assert (ctx.decisions.num_user_outputs, ctx.decisions.regions[0].experts) == (1, 8)


def test_golden_of_separate_experts():
    _, gm, _, _ = placed(RICH, ep=2)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[4, 16]",
    stacked_input: "f32[2, 16, 16]",
    bias: "f32[2, 16]",
    shared: "f32[16, 16]",
    r0_table: "i64[4, 1]",
):
    use_gate = materialize(gate, 'identity', 'ep', 0.5, 1)  # f32[4, 16]
    linear = F.linear(x, use_gate)  # f32[s0, 4]
    topk = torch.topk(linear, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    idx = topk[1]  # i64[s0, 2]
    route = m.route.default(idx, 4, r0_table)  # (i64[2*s0], i64[4])
    perm = route[0]  # i64[2*s0]
    counts = route[1]  # i64[4]
    r0_traffic = m.exchange_counts.default(counts, 2, 'ep')  # i64[2, 4]
    r0_host = m.counts_to_host.default(r0_traffic, 'ep')  # i64[2, 4]
    r0_rows = m.received_rows.default(r0_host, 2, 'ep')  # u0
    r0_slots = m.slot_counts.default(r0_traffic, 2, 'ep')  # i64[2]
    r0_sent = perm.size(0)  # 2*s0
    rows = m.dispatch.default(x, perm, 2)  # f32[2*s0, 16]
    r0_enter_a2a = m.all_to_all.default(rows, r0_host, r0_rows, 2, 'ep', False)  # f32[u0, 16]
    r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_host, 2, 'ep', False)  # f32[u0, 16]
    pairs = ops.aten.sym_size.int(perm, 0)  # 2*s0
    use_bias = materialize(bias, 'identity', '', 0.5, 3)  # f32[2, 16]
    biases = m.expert_rows.default(use_bias, r0_slots, r0_rows)  # f32[u0, 16]
    use_w0 = materialize(stacked_input, 'identity', '', 0.5, 2)  # f32[2, 16, 16]
    grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, use_w0, r0_slots, False)  # f32[u0, 16]
    out = grouped_linear_default + biases  # f32[u0, 16]
    r0_leave_regroup = m.regroup.default(out, r0_host, 2, 'ep', True)  # f32[u0, 16]
    r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_host, r0_sent, 2, 'ep', True)  # f32[2*s0, 16]
    combined = m.combine.default(r0_leave_a2a, perm, 2)  # f32[s0, 16]
    use_shared = materialize(shared, 'identity', 'ep', 0.5, 4)  # f32[16, 16]
    linear_1 = F.linear(combined, use_shared)  # f32[s0, 16]
    linear_2 = F.linear(x, use_shared)  # f32[s0, 16]
    result = linear_1 + linear_2  # f32[s0, 16]
    return (result, r0_traffic, idx)  # (f32[s0, 16], i64[2, 4], i64[s0, 2])
""")
    stack = next(n for n in gm.graph.find_nodes(op="placeholder") if n.meta["moefx"].kind == "stack")
    assert stack.meta["moefx"].key == ("w0", "w1", "w2", "w3")
    assert value(stack).requires_grad


def test_golden_of_static_blocks():
    _, gm, _, _ = placed(STATIC, frozen=("w",), ep=4)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[8, 6, 16]", w: "f32[2, 16, 24]"):
    capacities = m.exchange_sizes.default(6, 4, 'ep')  # i64[4]
    capacity_sum = m.total_size.default(capacities)  # u0
    r0_enter_a2a = m.all_to_all_capacity.default(x, capacities, capacity_sum, 0, 1, 4, 'ep', False)  # f32[2, u0, 16]
    out = torch.bmm(r0_enter_a2a, w)  # f32[2, u0, 24]
    r0_leave_a2a = m.all_to_all_capacity.default(out, capacities, 6, 0, 1, 4, 'ep', True)  # f32[8, 6, 24]
    return (r0_leave_a2a,)  # (f32[8, 6, 24],)
""")


def test_one_rank_needs_no_exchange():
    _, gm, _, _ = placed(MOE, ep=1)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    use_gate = materialize(gate, 'identity', '', 1.0, 1)  # f32[8, 16]
    linear = F.linear(x, use_gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    route = m.route.default(idx, 8)  # (i64[2*s0], i64[8])
    perm = route[0]  # i64[2*s0]
    counts = route[1]  # i64[8]
    rows = m.dispatch.default(x, perm, 2)  # f32[2*s0, 16]
    use_up = materialize(up, 'identity', '', 1.0, 2)  # f32[8, 24, 16]
    grouped_linear_default = m.grouped_linear.default(rows, use_up, counts, False)  # f32[2*s0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[2*s0, 24]
    use_down = materialize(down, 'identity', '', 1.0, 3)  # f32[8, 16, 24]
    out = m.grouped_linear.default(hidden, use_down, counts, False)  # f32[2*s0, 16]
    result = m.combine.default(out, perm, 2, weights)  # f32[s0, 16]
    return (result, counts, idx)  # (f32[s0, 16], i64[8], i64[s0, 2])
""")


@pytest.mark.parametrize("source", [MOE, RICH, FIXED, OUTSIDE, STACK_OUTSIDE, MIXED, BUFFER],
                         ids=["moe", "rich", "fixed", "outside", "stack outside", "mixed", "buffer"])  # fmt: skip
@pytest.mark.parametrize("axes", [{"ep": 1}, {"ep": 2}, {"dp": 2, "ep": 2}, {"dp": 2}, {"dp": 2, "ep": 4}])
def test_meaning(source, axes):
    before, gm, _, ctx = placed(source, **axes)
    comparison = Comparison(before, ctx)
    assert comparison.reason is None
    comparison.whole(gm, placed=True, exact=False)
    sources = tuple(n.meta["moefx"] for n in gm.graph.find_nodes(op="placeholder"))
    verify(gm, Level.PLACED, Facts(ctx.mesh, sources=sources))


def test_meaning_of_separate_experts_that_are_cut_on_ranks_that_have_all():
    new = "".join(f'v{expert}: "f32[16, 16]", ' for expert in range(4))
    source = RICH.replace("gate:", f"{new}gate:").replace(
        "    topk =", "    other = expert_parameter(stack([v0, v1, v2, v3]), 0)\n    topk =").replace(
        "    out =", "    hidden = F.silu(m.grouped_linear.default(inside, other, counts, False))\n    out =").replace(
        "default(inside, weight_e", "default(hidden, weight_e")  # fmt: skip
    before, gm, _, ctx = placed(source, esp=2)
    assert not ctx.report.whole_over_esp
    Comparison(before, ctx).whole(gm, placed=True, exact=False)
