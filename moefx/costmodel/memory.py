"""Memory that a graph needs while it runs in the order written, by a sweep over what is alive."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule, Node

from moefx.costmodel.amounts import at, is_view, unstarted
from moefx.ir.memory import taken
from moefx.ir.op import expr, lookup, value
from moefx.ir.ops.order import start, unsplit, wait

Storage = tuple[Node, int]  # a piece of memory: the node that made it, and which of its results it is
DEVICE = "device"


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once, and the node that runs then."""

    bytes: float
    node: str


@dataclass(frozen=True)
class LiveMemory:
    """Bytes alive while each node runs, in order, by space ("device", "host"). resident: what of the device's belongs
    to others and is there from the beginning to the end. marked: by mark, how many bytes with it come and go before a
    node of that number runs."""

    spaces: Mapping[str, tuple[tuple[str, sympy.Expr], ...]]
    resident: sympy.Expr
    marked: Mapping[Hashable, Mapping[int, sympy.Expr]] = field(default_factory=dict)

    @property
    def points(self) -> tuple[tuple[str, sympy.Expr], ...]:
        """Those of the device."""
        return self.spaces[DEVICE]

    def alive(self, mark: Hashable, sizes: Mapping[str, float]) -> NDArray[np.float64]:
        """Of the device's bytes at every point, those with a mark."""
        changes = np.zeros(len(self.points))
        for place, change in self.marked.get(mark, {}).items():
            if place < len(changes):
                changes[place] += at(change, sizes)
        return np.cumsum(changes)

    def peak(self, sizes: Mapping[str, float], space: str = DEVICE) -> Peak:
        """The peak at these sizes (symbols by name); the first node that reaches it."""
        found = [Peak(at(alive, sizes), name) for name, alive in self.spaces[space]]
        return max(found, key=lambda peak: peak.bytes)


def live_memory(gm: GraphModule, *, lies_in: Mapping[Node, Storage] | None = None,
                outside: Collection[Storage] | None = None, beside: sympy.Expr | int = 0,
                mark: Callable[[Storage], Hashable] = lambda storage: None) -> LiveMemory:  # fmt: skip
    """Sweep over `gm` in the order written. Views share the memory of what they look at, results that of an operand
    that they take; what a started collective reads stays until it is waited for, and its result is there from its
    start. An op's own workspace is there while it runs, or is under way.

    lies_in: of inputs that share memory with one another, where. outside: memory of inputs that others keep through the
    whole run, by default those that say where they come from (parameters, the user's inputs); all others, such as the
    saved values of a backward, go after their last use. beside: bytes of what is kept in the same way and is no input.
    mark: of a piece of memory; None: none.
    """
    nodes = list(gm.graph.nodes)
    made = storages(gm, lies_in or {})
    if outside is None:
        outside = {each for node in nodes if node.op == "placeholder" and "moefx" in node.meta for each in made[node]}
        beside += sum(map(nbytes_of, outside))
    births, deaths = _lifetimes(nodes, made)
    changes: dict[str, list[sympy.Expr]] = {DEVICE: [sympy.S.Zero] * (len(nodes) + 1)}
    changes[DEVICE][0] += beside
    marks: dict[Hashable, dict[int, sympy.Expr]] = {}
    for storage in births.keys() - outside:
        mine = changes.setdefault(space := _space(storage[0]), [sympy.S.Zero] * (len(nodes) + 1))
        mine[births[storage]] += nbytes_of(storage)
        mine[deaths[storage] + 1] -= nbytes_of(storage)
        if space == DEVICE and (found := mark(storage)) is not None:
            also = marks.setdefault(found, defaultdict(lambda: sympy.S.Zero))
            also[births[storage]] += nbytes_of(storage)
            also[deaths[storage] + 1] -= nbytes_of(storage)
    place = {node: index for index, node in enumerate(nodes)}
    for node in (node for node in nodes if node.target is start):
        held = unsplit(node)[0].under_way(unstarted(node))
        changes[DEVICE][place[node]] += held
        changes[DEVICE][max(map(place.__getitem__, node.users), default=place[node]) + 1] -= held
    spaces = {}
    for space, mine in changes.items():
        alive, points = sympy.S.Zero, []
        for node, change in zip(nodes, mine):
            alive = sympy.expand(alive + change)
            points.append((node.name, alive + _workspace(node) if space == DEVICE else alive))
        spaces[space] = tuple(points)
    return LiveMemory(spaces, sympy.sympify(beside), marks)


def storages(gm: GraphModule, lies_in: Mapping[Node, Storage] | None = None) -> dict[Node, list[Storage]]:
    """The pieces of memory that the values of every node lie in. lies_in: what is known of inputs."""
    made: dict[Node, list[Storage]] = {}
    for node in gm.graph.nodes:
        made[node] = [lies_in[node]] if lies_in and node in lies_in else _storages(node, made)
    return made


def nbytes_of(storage: Storage) -> sympy.Expr:
    """How large a piece of memory is; of a parameter, with the room for copies behind its rows."""
    node, number = storage
    tensor, spare = _tensors(node)[number], getattr(node.meta.get("moefx"), "spare", 0)
    rows = [tensor.shape[0] + spare] if spare else tensor.shape[:1]
    return sympy.prod([expr(s) for s in (*rows, *tensor.shape[1:])]) * tensor.element_size()


def _lifetimes(
    nodes: list[Node], made: Mapping[Node, list[Storage]]
) -> tuple[dict[Storage, int], dict[Storage, int]]:
    """(first, last place where it is alive) of every piece of memory; inputs are there from the start."""
    place = {node: index for index, node in enumerate(nodes)}
    births: dict[Storage, int] = {}
    deaths: dict[Storage, int] = {}
    for node in nodes:
        first = 0 if node.op == "placeholder" else place[node.args[0] if node.target is wait else node]
        for storage in made[node]:
            births.setdefault(storage, first)
            deaths[storage] = max(deaths.get(storage, 0), place[node])
        until = max((place[u] for u in node.users if u.target is wait), default=place[node])
        for argument in node.all_input_nodes:
            for storage in made[argument]:
                deaths[storage] = max(deaths[storage], until)
    return births, deaths


def _storages(node: Node, made: Mapping[Node, list[Storage]]) -> list[Storage]:
    if node.target is start:
        return []
    if node.target is operator.getitem:
        source, index = node.args[0], node.args[1]
        held = made[source]
        return [held[index]] if isinstance(index, int) and index < len(held) else held
    tensors = _tensors(node)
    op, call = unsplit(node.args[0] if node.target is wait else node)
    if op is not None and call.args and isinstance(call.args[0], (list, tuple)) and op.is_view(call):
        return [made[each][0] for each in call.args[0]]
    source, op = taken(node) if tensors else None, lookup(node)
    if source is None and tensors and (is_view(node.target) or (op is not None and op.is_view(node))):
        source = node.all_input_nodes[0]
    if source is not None:
        return [made[source][0]] * len(tensors)
    return [(node, index) for index in range(len(tensors))]


def _space(node: Node) -> str:
    op, _ = unsplit(node.args[0] if node.target is wait else node)
    return DEVICE if op is None else op.space


def _workspace(node: Node) -> sympy.Expr:
    """Bytes that an op needs for itself. What is started needs them when it starts and when it is waited for."""
    begun = node.args[0] if node.target is wait else node
    op, _ = unsplit(begun)
    if op is None:
        return sympy.S.Zero
    needs = op.at_wait if node.target is wait and op.at_wait is not None else op.workspace
    return needs(unstarted(begun) if begun.target is start else begun)


def _tensors(node: Node) -> list[torch.Tensor]:
    found = value(node) if node.op != "output" else None
    return [t for t in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(t, torch.Tensor)]
