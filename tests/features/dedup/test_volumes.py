"""Volumes of the ops of this room."""

from __future__ import annotations

from moefx.features.dedup import ops
from moefx.ir.op import REGISTRY, Volume, lookup
from tests.support.graphs import graph
from tests.support.volumes import check_volume

SOURCE = """
def graph(idx: "i64[6, 2]", table: "i64[8, 1]"):
    by_node = m.route_nodes.default(idx, 8, 2, table)
    perm = by_node[0]
    ids = m.dispatch_ids.default(idx, perm, 8, 2, table)
    crossing = enter_node(ids, perm, 0)
    crossed = leave_node(crossing, perm, 0)
    counted = m.exchange_counts.default(by_node[1], 4, 'ep')
    to_nodes = m.node_traffic.default(counted, 2, 4, 'ep')
    to_slots = m.traffic_on_nodes.default(counted, 2, 4, 'ep')
    return (crossed, to_nodes, to_slots)
"""
I64, I32 = 8, 4


def test_volumes():
    gm, _ = graph(SOURCE)
    nodes = {node.name: node for node in gm.graph.nodes}
    own = {op.target for op in REGISTRY.values() if op.name in vars(ops)}
    assert own == {node.target for node in nodes.values()} & own
    assert len(own) == 6
    moved = {
        "by_node": I64 * (6 * 2 + 6 * 2 + 2 + 8),  # choices, order, counts
        "ids": I64 * (6 * 2 + 6 * 2) + I32 * 6 * 2 * 2,
        "to_nodes": I64 * 4 * 4, "to_slots": I64 * 4 * 8,
    }  # fmt: skip
    for name in (*moved, "crossing", "crossed"):
        check_volume(nodes[name], {})
        assert lookup(nodes[name]).volume(nodes[name]) == Volume(hbm_bytes=moved.get(name, 0)), name
