"""place_regions: golden, no-op, refusal, meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import refresh
from moefx.errors import RaiseError, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.ways import A2A, BLOCKS, Way, there_and_back
from moefx.passes import assign_slots, place_regions
from tests.support.graphs import context, graph, short
from tests.support.placing import FIXED, placed
from tests.support.small import MOE

# Experts without parameters, so that this pass alone makes a whole program.
ROWS = """
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]"):
    idx = torch.topk(x_gate, 2, dim=-1)[1]
    route = m.route.default(idx, 8)
    perm = route[0]
    counts = route[1]
    inside = enter(m.dispatch.default(x, perm, 2), counts, -1, -1, 0)
    out = inside.tanh()
    y = m.combine.default(leave(out, counts, -1, -1, 0), perm, 2)
    return (y,)
"""
BLOCKS_OF_ROWS = """
def graph(x: "f32[8, s0, 16]"):
    inside = enter(x, None, 0, 1, 0)
    out = inside.tanh() * 2
    y = leave(out, None, 0, 1, 0)
    return (y,)
"""
JOINED = MeshSpec({"a": 2, "b": 2}, {"data": ("a", "b"), "ep": ("a", "b")})


def _run(gm, ctx):
    assign_slots.run(gm, ctx)
    return place_regions.run(gm, ctx)


def moved(source, **axes):
    return placed(source, run=_run, **axes)


def test_golden():
    _, gm, result, ctx = moved(ROWS, ep=4)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]", r0_table: "i64[8, 1]"):
    topk = torch.topk(x_gate, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    idx = topk[1]  # i64[s0, 2]
    route = m.route.default(idx, 8, r0_table)  # (i64[2*s0], i64[8])
    perm = route[0]  # i64[2*s0]
    counts = route[1]  # i64[8]
    r0_traffic = m.exchange_counts.default(counts, 4, 'ep')  # i64[4, 8]
    r0_host = m.counts_to_host.default(r0_traffic, 'ep')  # i64[4, 8]
    r0_rows = m.received_rows.default(r0_host, 4, 'ep')  # u0
    r0_slots = m.slot_counts.default(r0_traffic, 4, 'ep')  # i64[2]
    r0_sent = perm.size(0)  # 2*s0
    dispatch_default = m.dispatch.default(x, perm, 2)  # f32[2*s0, 16]
    r0_enter_a2a = m.all_to_all.default(dispatch_default, r0_host, r0_rows, 4, 'ep', False)  # f32[u0, 16]
    r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_host, 4, 'ep', False)  # f32[u0, 16]
    out = r0_enter_regroup.tanh()  # f32[u0, 16]
    r0_leave_regroup = m.regroup.default(out, r0_host, 4, 'ep', True)  # f32[u0, 16]
    r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_host, r0_sent, 4, 'ep', True)  # f32[2*s0, 16]
    y = m.combine.default(r0_leave_a2a, perm, 2)  # f32[s0, 16]
    return (y,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0 over 4 ranks"]
    region = ctx.decisions.regions[0]
    assert region.way == there_and_back(A2A, "ep")
    assert (region.load.name, [n.name for n in region.choices]) == ("r0_traffic", ["idx"])


def test_golden_of_static_blocks():
    _, gm, _, ctx = moved(BLOCKS_OF_ROWS, dp=2, ep=4)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[8, s0, 16]"):
    capacity = x.size(1)  # s0
    capacities = m.exchange_sizes.default(capacity, 4, 'ep')  # i64[4]
    capacity_sum = m.total_size.default(capacities)  # u0
    r0_enter_a2a = m.all_to_all_capacity.default(x, capacities, capacity_sum, 0, 1, 4, 'ep', False)  # f32[2, u0, 16]
    tanh = r0_enter_a2a.tanh()  # f32[2, u0, 16]
    out = tanh * 2  # f32[2, u0, 16]
    r0_leave_a2a = m.all_to_all_capacity.default(out, capacities, capacity, 0, 1, 4, 'ep', True)  # f32[8, s0, 16]
    return (r0_leave_a2a,)  # (f32[8, s0, 16],)
""")
    assert ctx.decisions.regions[0].way == there_and_back(BLOCKS, "ep")


@pytest.mark.parametrize("source", [ROWS, BLOCKS_OF_ROWS], ids=["rows", "blocks"])
def test_on_one_rank_markers_only_go(source):
    before, gm, _, ctx = moved(source, dp=2, ep=1)
    assert ctx.decisions.regions[0].way == Way()
    ops = [[str(n.target) for n in g.graph.nodes if n.op.startswith("call")] for g in (before, gm)]
    assert ops[1] == [op for op in ops[0] if "enter_experts" not in op and "leave_experts" not in op]


def test_noop():
    before, gm, result, _ = moved("""
        def graph(x: "f32[s0, 16]", w: "f32[4, 16]"):
            y = F.linear(x, w)
            return (y,)
    """, frozen=("w",), dp=2, ep=2)
    assert short(gm) == short(before)
    assert not result.changes


@pytest.mark.parametrize(("source", "axes", "error", "message"), [
    (MOE.replace("F.silu(m.grouped_linear", "F.silu(ops.aten.sym_size.int(x, 0) * m.grouped_linear"), {"ep": 2},
     RaiseError, "of the tokens inside the experts"),
], ids=["sizes of tokens"])  # fmt: skip
def test_refusal(source, axes, error, message):
    with pytest.raises(error) as caught:
        moved(source, **axes)
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


def test_rows_of_a_fixed_number_are_those_received():
    _, gm, _, _ = placed(FIXED, ep=2)
    lines = [line.strip() for line in short(gm).splitlines()]
    assert [line for line in lines if "r0_rows" in line] == [
        "r0_rows = m.received_rows.default(r0_host, 2, 'ep')  # u0",
        "r0_enter_a2a = m.all_to_all.default(rows, r0_host, r0_rows, 2, 'ep', False)  # f32[u0, 16]",
        "biases = m.expert_rows.default(use_bias, r0_slots, r0_rows)  # f32[u0, 16]",
        "heads = out.view(r0_rows, 2, 8)  # f32[u0, 2, 8]",
        "out_1 = heads.reshape((r0_rows, 16))  # f32[u0, 16]",
    ]


def test_a_number_that_only_fits_the_example_is_found():
    with pytest.raises(VerifyError, match="rounded takes 12 rows alone; how many"):
        placed(FIXED.replace("    heads = out.view(12, 2, 8)", "    rounded = out + torch.zeros(12, 16)\n"
                                                               "    heads = rounded.view(-1, 2, 8)"), ep=2)  # fmt: skip


@pytest.mark.parametrize("source", [ROWS, BLOCKS_OF_ROWS], ids=["rows", "blocks"])
@pytest.mark.parametrize("mesh", [MeshSpec.named({"ep": 1}), MeshSpec.named({"ep": 2, "dp": 2}), JOINED],
                         ids=["1", "ep dp", "a+b"])  # fmt: skip
def test_meaning(source, mesh):
    gm, mode = graph(source)
    before, ctx = copy_of(gm), replace(context(mode), mesh=mesh)
    _run(gm, ctx)
    refresh(gm, ctx)
    comparison = Comparison(before, ctx)
    assert comparison.reason is None
    comparison.whole(gm, placed=True, exact=False)
