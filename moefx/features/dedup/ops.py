"""Ops of a routing by nodes, in which that of the experts is nested: a token crosses to a node once.

Shapes: T tokens, K choices of each, E slots in all, W = min(K, nodes), n ranks on the axis, R rows that came to a node.
None of these ops communicates. Source: de-duplication by node, as in DeepSeek-V3 (section 3.2.2) and HierMoE.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from moefx.features.dedup import runtime
from moefx.ir.factors import factors
from moefx.ir.level import Level
from moefx.ir.meaning import meaning
from moefx.ir.op import Along, Stage, Tokens, Volume, argument, define, free, nbytes, value


@meaning("idx [T< k<], table [..~] -> [T*min(k,nodes)] int64, [nodes+num_slots] int64")
def route_nodes(idx: Tensor, num_slots: int, nodes: int, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort the nodes of the choices `idx` [T, K], each once per token: perm [T*W], counts [nodes + E] of rows per node
    and pairs per slot. `table` is that of `route`, with one replica.

    Constraints: nodes have equally many of the slots.
    """
    return runtime.route_nodes(idx, num_slots, nodes, table)


@meaning("idx [T? k<], perm [p], table [..~] -> [p k] int32")
def dispatch_ids(idx: Tensor, perm: Tensor, num_slots: int, nodes: int, table: Tensor | None = None) -> Tensor:
    """The choices that a row takes along to its node: [T, K] -> [T*W, K], -1 for those of other nodes."""
    return runtime.dispatch_ids(idx, perm, num_slots, nodes, table)


@meaning("traffic [n~ s~] -> [n n]")
def node_traffic(traffic: Tensor, nodes: int, n: int, axis: str) -> Tensor:
    """What all ranks counted, [n, nodes + E] -> rows per (source, rank of the same number on a node) [n, n]."""
    return runtime.node_traffic(traffic, nodes)


@meaning("traffic [n~ s~] -> [n s-nodes]")
def traffic_on_nodes(traffic: Tensor, nodes: int, n: int, axis: str) -> Tensor:
    """The same -> rows per (rank that they crossed to, slot) [n, E]: the traffic of the nested routing."""
    return runtime.traffic_on_nodes(traffic, nodes)


def enter_node(x: Tensor, perm: Tensor, region: int) -> Tensor:
    """Rows [T*W, ..], sorted by node, cross to their nodes. On one device an identity, as `enter_experts` is."""
    return x.view_as(x)


def leave_node(x: Tensor, perm: Tensor, region: int) -> Tensor:
    """Rows come back from their nodes."""
    return x.view_as(x)


def _check_nodes(node: Node) -> str | None:
    slots, nodes = argument(node, "num_slots"), argument(node, "nodes")
    return None if slots % nodes == 0 else f"{slots} slots do not divide by {nodes} nodes"


def _read(node: Node) -> Volume:
    return Volume(hbm_bytes=nbytes(argument(node, "idx")) + nbytes(argument(node, "perm")) + nbytes(node))


def _sorted(node: Node) -> Volume:
    perm, counts = value(node)
    return Volume(hbm_bytes=nbytes(argument(node, "idx")) + nbytes(perm) + nbytes(counts))


_ops, _nodes = torch.ops.moefx, "moefx.features.dedup.runtime"
_marker = partial(define, volume=free, factors=factors("[..], [..-] -> [..]"), levels=frozenset({Level.MOE}))
_traffic = partial(define, volume=lambda node: Volume(hbm_bytes=nbytes(node)), drawn="routing", again=False,
                   stage=Stage.COUNTS, along=Along("I", "I"))  # fmt: skip
define(
    _ops.route_nodes.default, volume=_sorted, drawn="routing", check=_check_nodes, again=False,
    tokens=Tokens(gives=("perm", "counts"), rule="routing", chosen="idx"),
    runtime=f"{_nodes}.route_nodes(idx, num_slots, nodes, table)",
)  # fmt: skip
define(
    _ops.dispatch_ids.default, volume=_read, drawn="routing", check=_check_nodes, again=False,
    tokens=Tokens({"perm": "perm"}, "sorted", moves=True),
    runtime=f"{_nodes}.dispatch_ids(idx, perm, num_slots, nodes, table)",
)  # fmt: skip
_traffic(
    _ops.node_traffic.default, tokens=Tokens({"traffic": "traffic"}, "traffic", rule="node_traffic"),
    runtime=f"{_nodes}.node_traffic(traffic, nodes)",
)  # fmt: skip
_traffic(
    _ops.traffic_on_nodes.default, tokens=Tokens({"traffic": "traffic"}, "traffic", rule="nested_traffic"),
    runtime=f"{_nodes}.traffic_on_nodes(traffic, nodes)",
)  # fmt: skip
_marker(enter_node, tokens=Tokens({"perm": "perm", "x": "sorted"}, "inside", moves=True))
_marker(leave_node, tokens=Tokens({"perm": "perm", "x": "inside"}, "sorted", moves=True))
