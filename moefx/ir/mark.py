"""A graph as it is before a rewrite: to be put back, or to be looked at. Unlike a copy it makes no nodes."""

from __future__ import annotations

import operator
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.ir.op import value
from moefx.ir.writes import writes


class Mark:
    """nodes: (op, target, args, kwargs) of every node, in order; values: what its value was; idle: those that
    nobody reads but such."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = {node: (node.op, node.target, node.args, node.kwargs) for node in gm.graph.nodes}
        self.values = {node: value(node) for node in self.nodes}
        self.idle: set[Node] = set()
        for node in reversed(self.nodes):
            is_end = node.op == "output" or (not node.users and writes(node))
            if not is_end and self.idle.issuperset(node.users):
                self.idle.add(node)

    def put_back(self) -> None:
        """Take back all edits of the graph: what was erased is there again, as the same nodes."""
        compat.put_back(self.gm.graph, self.nodes)
        for node, before in self.values.items():
            if value(node) is not before:
                node.meta["val"] = before

    def args(self, node: Node) -> tuple:
        """What they were; of a node that was not there, what they are."""
        return self.nodes[node][2] if node in self.nodes else node.args

    def inputs(self, node: Node) -> list[Node]:
        found: list[Node] = []
        map_arg(self.nodes[node][2:], found.append)
        return found

    def writes(self, node: Node) -> list[Node]:
        """The assignments to places of a node's value."""
        return self._writes.get(node, [])

    @cached_property
    def _writes(self) -> dict[Any, list[Node]]:
        found: dict[Any, list[Node]] = {}
        for node, (_, target, args, _) in self.nodes.items():
            if target is operator.setitem:
                found.setdefault(args[0], []).append(node)
        return found
