"""S3 with "dedup": a token crosses once to a node, whose ranks gather its pairs. Golden, refusal, meaning, faults."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import verify
from moefx.ir.ways import GATHER, INTER, INTRA, SCATTER, Hop, Way
from moefx.options import Options
from tests.features.dedup.test_dedup_nodes import MANY, called, changed, doubled, dropped
from tests.ir.test_sharding_rules import BIASED
from tests.passes.test_gather_tokens import WHOLE, check_meaning
from tests.support.graphs import short
from tests.support.placing import facts_of, nested_and_placed, placed
from tests.support.small import MOE

PER_ROW = (
    MOE.replace("perm, 2, weights)", "perm, 2)")
    .replace("    result =", "    scale = m.dispatch_choices.default(weights, perm)\n    result =")
    .replace("default(outside, ", "default(outside * scale.unsqueeze(-1), ")
)
ONCE = Options.named(split="s3", alltoall="dedup")
PLAIN = MeshSpec.named({"ep": 2, "esp": 2}, 2)
FOLDED = MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2, 2)
TWO_PLACES = MeshSpec.named({"ep": 4, "esp": 2}, 4)
MOVES = re.compile(
    r"all_to_all|regroup|_parts|exchange|traffic|across|within|arrived|kept|crossed|r0_rows =|route|combine"
)


def nested(source: str, mesh: MeshSpec) -> tuple[str, Way]:
    _, gm, _, ctx = placed(source, run=nested_and_placed, options=ONCE, mesh=mesh)
    lines = [line.strip() for line in short(gm).splitlines()]
    return "\n".join(line for line in lines if MOVES.search(line)), ctx.decisions.regions[0].way


def test_golden():
    """A node is one place: pairs are where their experts are once their token has crossed."""
    found, way = nested(MOE, PLAIN)
    assert_expected_inline(
        found,
        """\
r0_nodes = m.route_nodes.default(idx, 8, 2, r0_table)  # (i64[2*s0], i64[10])
r0_traffic = m.exchange_counts.default(r0_node_counts, 4, 'ep+esp')  # i64[4, 10]
r0_load = r0_traffic.narrow(1, 2, 8)  # i64[4, 8]
r0_crossing = m.node_traffic.default(r0_traffic, 2, 4, 'ep+esp')  # i64[4, 4]
r0_crossed = m.received_rows.default(r0_crossing_host, 4, 'ep+esp')  # u0
r0_pairs_on_nodes = m.traffic_on_nodes.default(r0_traffic, 2, 4, 'ep+esp')  # i64[4, 8]
r0_rows = m.received_rows.default(r0_host, 4, 'ep+esp')  # u1
r0_across = m.across_places.default(r0_host, 2, 'esp')  # i64[2, 8]
r0_kept = m.sent_rows.default(r0_across, r0_pairs, 2, 'ep')  # u2
r0_within = m.within_place.default(r0_host, 2, 'ep')  # i64[2, 8]
r0_node_ids_there_a2a = m.all_to_all.default(r0_node_ids, r0_crossing_host, r0_crossed, 4, 'ep+esp', False, 'inter', 2)  # i32[u0, 2]
route = m.route.default(r0_node_ids_there_a2a, 8, r0_table)  # (i64[2*u0], i64[8])
counts = route[1]  # i64[8]
perm = route[0]  # i64[2*u0]
x_sent_there_a2a = m.all_to_all.default(x_sent, r0_crossing_host, r0_crossed, 4, 'ep+esp', False, 'inter', 2)  # f32[u0, 16]
rows = m.dispatch.default(x_sent_there_a2a, perm, 2, r0_kept)  # f32[u2, 16]
r0_gather = m.gather_parts.default(rows, r0_within, r0_rows, 0, 2, 'esp')  # f32[u1, 16]
r0_enter_regroup = m.regroup.default(r0_gather, r0_within, 2, 'esp', False)  # f32[u1, 16]
grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, use_up, r0_slots, False)  # f32[u1, 12]
r0_leave_regroup = m.regroup.default(out, r0_within, 2, 'esp', True)  # f32[u1, 16]
r0_scatter = m.scatter_parts.default(r0_leave_regroup, r0_within, r0_kept, 0, 2, 'esp')  # f32[u2, 16]
weights_masked_there_a2a = m.all_to_all.default(weights_masked, r0_crossing_host, r0_crossed, 4, 'ep+esp', False, 'inter', 2)  # f32[u0, 2]
result = m.combine.default(r0_scatter, perm, 2, weights_masked_there_a2a)  # f32[u0, 16]
result_back_a2a = m.all_to_all.default(result, r0_crossing_host, r0_crossing_rows, 4, 'ep+esp', True, 'inter', 2)  # f32[2*s0, 16]
result_all = m.combine.default(result_back_a2a, r0_node_perm, 2)  # f32[s0, 16]""",
    )
    assert way == Way((Hop(INTER, "ep+esp"), Hop(GATHER, "esp")), (Hop(SCATTER, "esp"), Hop(INTER, "ep+esp")))
    assert way.axis == "ep+esp"


def test_golden_of_nodes_with_several_places():
    found, way = nested(MOE, TWO_PLACES)
    assert_expected_inline(
        "\n".join(line for line in found.splitlines() if re.search(r"_to_all|regroup|_parts", line)),
        """\
r0_node_ids_there_a2a = m.all_to_all.default(r0_node_ids, r0_crossing_host, r0_crossed, 8, 'ep+esp', False, 'inter', 4)  # i32[u0, 2]
x_sent_there_a2a = m.all_to_all.default(x_sent, r0_crossing_host, r0_crossed, 8, 'ep+esp', False, 'inter', 4)  # f32[u0, 16]
r0_enter_a2a = m.all_to_all.default(rows, r0_across, r0_arrived, 4, 'ep', False, 'intra', 2)  # f32[u3, 16]
r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_across, 4, 'ep', False)  # f32[u3, 16]
r0_gather = m.gather_parts.default(r0_enter_regroup, r0_within, r0_rows, 0, 2, 'esp')  # f32[u1, 16]
r0_enter_regroup_1 = m.regroup.default(r0_gather, r0_within, 2, 'esp', False)  # f32[u1, 16]
grouped_linear_default = m.grouped_linear.default(r0_enter_regroup_1, use_up, r0_slots, False)  # f32[u1, 12]
r0_leave_regroup = m.regroup.default(out, r0_within, 2, 'esp', True)  # f32[u1, 16]
r0_scatter = m.scatter_parts.default(r0_leave_regroup, r0_within, r0_arrived, 0, 2, 'esp')  # f32[u3, 16]
r0_leave_regroup_1 = m.regroup.default(r0_scatter, r0_across, 4, 'ep', True)  # f32[u3, 16]
r0_leave_a2a = m.all_to_all.default(r0_leave_regroup_1, r0_across, r0_kept, 4, 'ep', True, 'intra', 2)  # f32[u2, 16]
weights_masked_there_a2a = m.all_to_all.default(weights_masked, r0_crossing_host, r0_crossed, 8, 'ep+esp', False, 'inter', 4)  # f32[u0, 2]
result_back_a2a = m.all_to_all.default(result, r0_crossing_host, r0_crossing_rows, 8, 'ep+esp', True, 'inter', 4)  # f32[2*s0, 16]""",
    )
    assert way == Way((Hop(INTER, "ep+esp"), Hop(INTRA, "ep"), Hop(GATHER, "esp")),
                      (Hop(SCATTER, "esp"), Hop(INTRA, "ep"), Hop(INTER, "ep+esp")))  # fmt: skip


def test_refusal():
    with pytest.raises(
        UnsupportedUse, match=r"'s3' needs experts that are cut over 'esp', and these are whole: .*softmax"
    ):
        nested(WHOLE, PLAIN)


@pytest.mark.parametrize(("source", "mesh"), [
    (MOE, PLAIN), (MANY, FOLDED), (PER_ROW, PLAIN), (BIASED, MeshSpec.named({"dp": 2, "ep": 2, "esp": 2}, 2)),
    (MANY, TWO_PLACES), (PER_ROW, TWO_PLACES), (MOE, MeshSpec.named({"ep": 2, "esp": 4}, 4)),
], ids=["weights", "folded", "per row", "bias", "two places", "two places per row", "parts of 4"])  # fmt: skip
def test_meaning(source, mesh):
    check_meaning(source, mesh, ONCE, nested_and_placed)


# ---- faults


FAULTS = {
    "not gathered": (dropped("gather_parts"), "regroup: rows"),
    "not scattered": (dropped("scatter_parts"), "belong to another routing"),
    "gathered twice": (doubled("gather_parts"), "gather_parts: x belong to another routing"),
    "scattered twice": (doubled("scatter_parts"), "scatter_parts: x belong to another routing"),
    "ids stay at home": (dropped("all_to_all"), "dispatch: x are in the order 'source'"),
    "tokens cross twice": (doubled("all_to_all", 1), "all_to_all: rows are in the order 'source'"),
    "gathered over ep": (changed("gather_parts", 5, "ep"), "takes the rows of region 0"),
    "tokens cross over ep": (changed("all_to_all", 4, "ep", 1), "takes 'ep' for 4 ranks, it has 2"),
    "tokens within nodes": (changed("all_to_all", 6, "intra", 1), "'intra' nodes of 2 ranks"),
    "nodes of others": (changed("all_to_all", 7, 1, 1), "'inter' nodes of 1 ranks"),
    "gathered by who crosses": (changed("gather_parts", 1, lambda gm: called(gm, "across_places")), "belong to another routing"),
    "counts that are not dumped": (dropped("dump_counts"), "the traffic of rows that are not dumped"),
    "counts of nodes": (dropped("traffic_on_nodes"), "belong to another routing"),
    "as many rows come back as were gathered": (
        changed("scatter_parts", 2, lambda gm: called(gm, "received_rows", 1)), "rows come back"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good():
    before, gm, _, ctx = placed(MOE, run=nested_and_placed, options=ONCE, mesh=PLAIN)
    facts = facts_of(before, gm, ctx)
    verify(gm, Level.PLACED, facts)
    return gm, facts


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, good):
    gm, facts = copy_of(good[0]), good[1]
    damage, message = FAULTS[fault]
    damage(gm)
    with pytest.raises(VerifyError, match=message):
        verify(gm, Level.PLACED, facts)
