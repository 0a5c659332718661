"""plan_exactly: golden, no-op, meaning, what the verifier says of wrong plans."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.pass_types import PassContext
from moefx.errors import VerifyError
from moefx.features.exact import plan_exactly
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.verify import verify
from moefx.options import Options
from moefx.passes import assign_slots, chunk, gather_experts, place_parameters, place_regions
from tests.passes.test_place_regions import ROWS
from tests.support.graphs import short
from tests.support.placing import STACK_OUTSIDE, facts_of, placed
from tests.support.small import MOE


def planned(source, placement="exact", chunks=1, run=(assign_slots, place_regions, plan_exactly), **axes):
    def passes(gm, ctx: PassContext):
        for each in run:
            result = each.run(gm, ctx)
            if each is chunk:
                refresh(gm, ctx)
        return result

    return placed(source, run=passes, options=Options.named(placement=placement, copies=1, chunks=chunks), **axes)


def test_golden():
    _, gm, result, ctx = planned(ROWS, ep=4)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", x_gate: "f32[s0, 8]", r0_moves: "i64[8, 4]"):
    topk = torch.topk(x_gate, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    idx = topk[1]  # i64[s0, 2]
    r0_loads = m.exchange_loads.default([idx], 8, 4, 'ep')  # i64[4, 1, 8]
    r0_exact = m.plan_exact.default(r0_loads, r0_moves, 2, 1, 4)  # (i64[8, 4], i64[4, 1, 8, 4])
    r0_exact_moves = r0_exact[0]  # i64[8, 4]
    r0_exact_rows = r0_exact[1]  # i64[4, 1, 8, 4]
    r0_exact_table = m.planned_table.default(r0_exact_moves, 'cpu')  # i64[8, 4]
    r0_exact_quota = m.planned_quota.default(r0_exact_rows, 0, 4, 'ep', 'cpu')  # i64[8, 4]
    route = m.route.default(idx, 12, r0_exact_table, r0_exact_quota)  # (i64[2*s0], i64[12])
    perm = route[0]  # i64[2*s0]
    counts = route[1]  # i64[12]
    r0_exact_host = m.planned_traffic.default(counts, r0_exact_moves, r0_exact_rows, 0, 3, 4, 'ep')  # i64[4, 12]
    r0_exact_slots = m.planned_slots.default(r0_exact_host, 4, 'ep', 'cpu')  # i64[3]
    r0_rows = m.received_rows.default(r0_exact_host, 4, 'ep')  # u0
    r0_sent = perm.size(0)  # 2*s0
    dispatch_default = m.dispatch.default(x, perm, 2)  # f32[2*s0, 16]
    r0_enter_a2a = m.all_to_all.default(dispatch_default, r0_exact_host, r0_rows, 4, 'ep', False)  # f32[u0, 16]
    r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_exact_host, 4, 'ep', False)  # f32[u0, 16]
    out = r0_enter_regroup.tanh()  # f32[u0, 16]
    r0_leave_regroup = m.regroup.default(out, r0_exact_host, 4, 'ep', True)  # f32[u0, 16]
    r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_exact_host, r0_sent, 4, 'ep', True)  # f32[2*s0, 16]
    y = m.combine.default(r0_leave_a2a, perm, 2)  # f32[s0, 16]
    return (y,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0 is balanced after the gate, with up to 1 copies on a rank"]
    region = ctx.decisions.regions[0]
    assert (region.load.name, [n.name for n in region.choices]) == ("r0_loads", ["idx"])


def test_golden_of_chunks():
    _, gm, _, ctx = planned(ROWS, chunks=2, run=(chunk, assign_slots, place_regions, plan_exactly), ep=2)
    lines = [line.split("  # ")[0] for line in short(gm).splitlines()]
    lines = [line for line in lines if any(f" m.{op}" in line for op in ("exchange_loads", "plan", "route"))]
    assert_expected_inline("\n".join(lines) + "\n", """\
    r0_loads = m.exchange_loads.default([idx_0of2, idx_1of2], 8, 2, 'ep')
    r0_exact = m.plan_exact.default(r0_loads, r0_moves, 4, 1, 2)
    r0_exact_table = m.planned_table.default(r0_exact_moves, 'cpu')
    r0_exact_quota_c0 = m.planned_quota.default(r0_exact_rows, 0, 2, 'ep', 'cpu')
    route_c0 = m.route.default(idx_0of2, 10, r0_exact_table, r0_exact_quota_c0)
    r0_exact_quota_c1 = m.planned_quota.default(r0_exact_rows, 1, 2, 'ep', 'cpu')
    route_c1 = m.route.default(idx_1of2, 10, r0_exact_table, r0_exact_quota_c1)
    r0_exact_host_c0 = m.planned_traffic.default(counts_c0, r0_exact_moves, r0_exact_rows, 0, 5, 2, 'ep')
    r0_exact_slots_c0 = m.planned_slots.default(r0_exact_host_c0, 2, 'ep', 'cpu')
    r0_exact_host_c1 = m.planned_traffic.default(counts_c1, r0_exact_moves, r0_exact_rows, 1, 5, 2, 'ep')
    r0_exact_slots_c1 = m.planned_slots.default(r0_exact_host_c1, 2, 'ep', 'cpu')
""")
    assert [len(region.choices) for region in ctx.decisions.regions.values()] == [2, 0]


def test_golden_of_a_calibration():
    """The forecast's copies keep their gather; what the plan adds comes to them by another one."""
    run = (assign_slots, gather_experts, place_parameters, place_regions, plan_exactly)
    _, gm, _, _ = planned(MOE, "calibrated", run=run, ep=4)
    lines = [line.split("  # ")[0] for line in short(gm).splitlines()]
    lines = [line for line in lines if any(word in line for word in ("gather", "calibrated", "added", "grouped"))]
    assert_expected_inline("\n".join(lines) + "\n", """\
    r0_exact = m.plan_calibrated.default(r0_loads, r0_moves, 2, 1, 4)
    r0_exact_added = r0_exact[2]
    r0_gather = m.gather_experts.default([up, down], r0_moves, 2, 3, 4, 'ep', None, None)
    up_e_slots = r0_gather[0]
    down_e_slots = r0_gather[1]
    r0_gather_more = m.add_experts.default([up_e_slots_held, down_e_slots_held], [up, down], r0_exact_added, r0_exact_moves, 2, 3, 4, 'ep', None)
    up_e_slots_more = r0_gather_more[0]
    down_e_slots_more = r0_gather_more[1]
    grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, up_e_slots_more, r0_exact_slots, False)
    hidden = F.silu(grouped_linear_default)
    out = m.grouped_linear.default(hidden, down_e_slots_more, r0_exact_slots, False)
""")  # noqa: E501


@pytest.mark.parametrize(("placement", "axes"), [("balanced", {"ep": 4}), ("exact", {"dp": 2, "ep": 1})])
def test_noop(placement, axes):
    _, after, result, _ = planned(ROWS, placement, **axes)
    _, before, _, _ = planned(ROWS, placement, run=(assign_slots, place_regions), **axes)
    assert short(after) == short(before)
    assert not result.changes


@pytest.mark.parametrize("placement", ["exact", "calibrated"])
@pytest.mark.parametrize(("source", "chunks", "axes"), [
    (MOE, 1, {"ep": 3}), (MOE, 3, {"dp": 2, "ep": 2}), (STACK_OUTSIDE, 1, {"ep": 2}),
], ids=["uneven", "chunks", "weights that all have whole"])  # fmt: skip
def test_meaning(source, chunks, axes, placement):
    before, gm, _, ctx = planned(source, placement, chunks, run=(chunk, place_experts), **axes)
    verify(gm, Level.PLACED, facts_of(before, gm, ctx))
    Comparison(before, ctx).whole(gm, placed=True, exact=False)


@pytest.mark.parametrize(("name", "place", "wrong", "message"), [
    ("r0_exact_quota_c1", 1, 0, "route goes by what was planned for other choices"),
    ("r0_exact_host_c1", 3, 0, "the rows of this routing do not go by this plan and chunk"),
    ("r0_loads", 0, ("idx_1of2", "idx_0of2"), "route goes by what was planned for other choices"),
    ("route_c1", 2, "r0_moves", "route takes moves for its table"),
], ids=["quota of another chunk", "traffic of another chunk", "other choices", "another table"])  # fmt: skip
def test_the_verifier_names(name, place, wrong, message):
    before, gm, _, ctx = planned(ROWS, chunks=2, run=(chunk, assign_slots, place_regions, plan_exactly), ep=2)
    nodes = {node.name: node for node in gm.graph.nodes}
    wrong = [nodes[each] for each in wrong] if isinstance(wrong, tuple) else nodes.get(wrong, wrong)
    nodes[name].update_arg(place, wrong)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts_of(before, gm, ctx))


@pytest.mark.parametrize(("name", "place", "wrong", "message"), [
    ("r0_gather_more", 2, "r0_moves", "add_experts takes moves for its added"),
    ("r0_gather_more", 3, "r0_moves", "copies of one plan, and gradients go home by another's table"),
    ("r0_gather", 1, "r0_exact_moves", "adds copies to .*, on whose copies they were not planned"),
    ("r0_exact_table", 0, "r0_exact_added", "r0_exact_table"),
], ids=["all again", "gradients of some alone", "the plan's copies at first", "rows go by what was added"])  # fmt: skip
def test_the_verifier_names_wrong_copies(name, place, wrong, message):
    before, gm, _, ctx = planned(MOE, "calibrated", run=(place_experts,), ep=2)
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes[name].update_arg(place, nodes[wrong])
    edit.move_in_order(gm)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts_of(before, gm, ctx))
