"""Graphs that become again what they were."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node


def put_back(graph: Graph, nodes: Mapping[Node, tuple]) -> None:
    """Make a graph consist of these nodes of it again, in this order and with this (op, target, args, kwargs) each.
    torch.fx erases nodes for good; the list of its nodes, and what else knows of them, is private."""
    added = [node for node in graph.nodes if node not in nodes]
    last = graph._root
    for node in nodes:
        if node._erased:
            node._prev = node._next = node  # it still points to those that it stood between
            node._erased = False
            graph._find_nodes_lookup_table.insert(node)
            graph._len += 1
        if last.next is not node:
            last.append(node)
        last = node
    for node, (op, target, args, kwargs) in nodes.items():
        if node.op != op or node.target != target:
            node.op, node.target = op, target
        if node.args is not args or node.kwargs is not kwargs:
            node.args, node.kwargs = args, kwargs
    for node in reversed(added):
        graph.erase_node(node)
