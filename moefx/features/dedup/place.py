"""What `passes.place_regions` asks of a routing by nodes: the way of its rows, and what tells how many cross."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moefx.axes import MeshSpec
from moefx.ir import edit
from moefx.ir.ways import GATHER, INTER, INTRA, SCATTER, Hop, Way

_ops = torch.ops.moefx


def way(places: str, parts: str, mesh: MeshSpec) -> Way:
    """Rows of tokens cross to nodes, and rows of pairs go on to their experts there, unless a node has one place; ranks
    along `parts`, all of them on the node, gather these."""
    is_there = parts != "" and mesh.nodes_of(places)[1] == 1
    out = (Hop(INTER, f"{places}+{parts}" if parts else places), *(() if is_there else (Hop(INTRA, places),)))
    gather, scatter = ((Hop(GATHER, parts),), (Hop(SCATTER, parts),)) if parts else ((), ())
    return Way(out=out + gather, back=scatter + out[::-1])


def counts(nodes: Node, table: Node) -> Node:
    """The counts of a routing by nodes, which finds experts by the table from here on."""
    for node in (nodes, *(u for u in _part_of(nodes, 0).users if u.target is _ops.dispatch_ids.default)):
        node.args = (*node.args, table)
    return _part_of(nodes, 1)


def cross(nodes: Node, counted: Node, n: int, axis: str,
          named: Callable[[str], str]) -> tuple[Node, tuple[Node, Any, Node], Node]:  # fmt: skip
    """What follows from counts of all ranks for the exchange between nodes, and the traffic within them."""
    graph, (_, experts, places) = counted.graph, nodes.args[:3]
    load = graph.create_node("call_method", "narrow", (counted, 1, places, experts), name=named("load"))
    crossing = edit.call(graph, _ops.node_traffic.default, counted, places, n, axis, name=named("crossing"))
    host = edit.call(graph, _ops.counts_to_host.default, crossing, axis, name=named("crossing_host"))
    crossed = edit.call(graph, _ops.received_rows.default, host, n, axis, name=named("crossed"))
    rows = graph.create_node("call_method", "size", (_part_of(nodes, 0), 0), name=named("crossing_rows"))
    pairs = edit.call(graph, _ops.traffic_on_nodes.default, counted, places, n, axis, name=named("pairs_on_nodes"))
    return load, (host, rows, crossed), pairs


def _part_of(nodes: Node, number: int) -> Node:
    """The order of a routing's pairs (0), or its counts (1)."""
    return next(u for u in nodes.users if u.target is operator.getitem and u.args[1] == number)
