"""Memory that a graph needs while it runs in the order written, by a sweep over what is alive."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.fx import GraphModule, Node

from moefx.costmodel.amounts import at, is_view
from moefx.ir.op import expr, value
from moefx.ir.ops.order import start, wait

_Storage = tuple[Node, int]  # the node that made it, and which of its results it is


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once, and the node that runs then."""

    bytes: float
    node: str


@dataclass(frozen=True)
class LiveMemory:
    """Bytes alive while each node runs, in order."""

    points: tuple[tuple[str, sympy.Expr], ...]

    def peak(self, sizes: Mapping[str, float]) -> Peak:
        """The peak at these sizes (symbols by name); the first node that reaches it."""
        found = [Peak(at(alive, sizes), name) for name, alive in self.points]
        return max(found, key=lambda peak: peak.bytes)


def live_memory(gm: GraphModule) -> LiveMemory:
    """Sweep over `gm` in the order written. Views share the memory of what they look at; what a started collective
    reads stays until it is waited for, and its result is there from its start.

    Placeholders that say where they come from (parameters, the user's inputs) are kept by somebody else through the
    whole run; all others, such as the saved values of a backward, go after their last use.
    """
    nodes = list(gm.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    births, deaths, size = _lifetimes(nodes, place)
    alive = sympy.S.Zero
    changes = [sympy.S.Zero] * (len(nodes) + 1)
    for storage, nbytes in size.items():
        node = storage[0]
        if (node.op == "placeholder" and "moefx" in node.meta) or node.op == "get_attr":
            alive += nbytes
            continue
        changes[births[storage]] += nbytes
        changes[deaths[storage] + 1] -= nbytes
    points = []
    for node, change in zip(nodes, changes):
        alive = sympy.expand(alive + change)
        points.append((node.name, alive))
    return LiveMemory(tuple(points))


def _lifetimes(
    nodes: list[Node], place: Mapping[Node, int]
) -> tuple[dict[_Storage, int], dict[_Storage, int], dict[_Storage, sympy.Expr]]:
    """(first, last place where it is alive, bytes) of every piece of memory; placeholders are there from the start."""
    births: dict[_Storage, int] = {}
    deaths: dict[_Storage, int] = {}
    size: dict[_Storage, sympy.Expr] = {}
    made: dict[Node, list[_Storage]] = {}
    for node in nodes:
        made[node] = _storages(node, made)
        first = 0 if node.op == "placeholder" else place[node.args[0] if node.target is wait else node]
        for storage, tensor in zip(made[node], _tensors(node)):
            if storage not in size:
                births[storage], deaths[storage], size[storage] = first, place[node], _bytes(tensor)
        until = max((place[u] for u in node.users if u.target is wait), default=place[node])
        for argument in node.all_input_nodes:
            for storage in made[argument]:
                deaths[storage] = max(deaths[storage], until)
    return births, deaths, size


def _storages(node: Node, made: Mapping[Node, list[_Storage]]) -> list[_Storage]:
    """The pieces of memory that the values of `node` lie in: new ones, or those of what it looks at."""
    if node.target is start:
        return []
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        held = made[source]
        return [held[index]] if isinstance(index, int) and index < len(held) else held
    tensors = _tensors(node)
    if tensors and is_view(node.target):
        source = made[node.all_input_nodes[0]]
        return [source[0]] * len(tensors)
    return [(node, index) for index in range(len(tensors))]


def _tensors(node: Node) -> list[torch.Tensor]:
    found = value(node) if node.op != "output" else None
    return [t for t in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(t, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> sympy.Expr:
    return sympy.prod([expr(s) for s in tensor.shape]) * tensor.element_size()
