"""Volumes of the ops of this room."""

from __future__ import annotations

from moefx.features.exact import ops
from moefx.ir.op import REGISTRY, Volume, lookup
from tests.support.graphs import graph
from tests.support.volumes import check_volume

SOURCE = """
def graph(idx: "i64[6, 2]", counts: "i64[12]", table: "i64[8, 1]", moves: "i64[8, 4]"):
    loads = m.exchange_loads.default([idx, idx], 8, 4, 'ep')
    plan = m.plan_exact.default(loads, table, 2, 1, 4)
    corrected = m.plan_calibrated.default(loads, moves, 2, 1, 4)
    plan_table = m.planned_table.default(plan[0], 'cpu')
    plan_quota = m.planned_quota.default(plan[1], 1, 4, 'ep', 'cpu')
    planned = m.planned_traffic.default(counts, plan[0], plan[1], 1, 3, 4, 'ep')
    held_slots = m.planned_slots.default(planned, 4, 'ep', 'cpu')
    return (corrected[0], plan_table, plan_quota, held_slots)
"""
I64 = 8


def test_volumes():
    gm, _ = graph(SOURCE)
    nodes = {node.name: node for node in gm.graph.nodes}
    own = {op.target for op in REGISTRY.values() if op.name in vars(ops)}
    assert own == {node.target for node in nodes.values()} & own
    assert len(own) == 7
    moved = {
        "plan": 0, "corrected": 0, "planned": 0,  # on the host
        "plan_table": I64 * 8 * 4, "plan_quota": I64 * 8 * 4,  # of 8 experts on up to 4 ranks
        "held_slots": I64 * 3,
    }  # fmt: skip
    for name, nbytes in moved.items():
        check_volume(nodes[name], {})
        assert lookup(nodes[name]).volume(nodes[name]) == Volume(hbm_bytes=nbytes), name
    check_volume(nodes["loads"], {})
    found = lookup(nodes["loads"]).volume(nodes["loads"])
    assert (found.wire_bytes, found.messages) == ({"ep": 3 * 2 * 8 * I64}, {"ep": 3})  # 8 counts of two chunks
