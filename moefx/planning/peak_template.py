"""The peak that a program would have if it held less for the backward, from the one program that was compiled.

A unit is a region (its number) or what is around regions in a layer of the model (the layer's path).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.fx import GraphModule, Node

from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import at
from moefx.costmodel.memory import LiveMemory, Storage
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import nbytes
from moefx.ir.regions import region_of

Unit = int | str


class State(NamedTuple):
    """Of a unit: how many bytes less than everything it holds, how many of these are back at once while it runs, how
    many are in use besides while they are restored, the share of what it has in use for a short time that its chunks
    need, and the share of the rows that arrive at it, see `pricing.More`."""

    less: float
    back: float
    passing: float
    share: float
    rows: float = 1.0


class _Points(NamedTuple):
    """Of one graph, node by node: bytes in use besides what is saved for the backward [T], the number of the node's
    unit [T], what is saved, by unit [T, U], and of the bytes besides, those of rows that arrived, by unit [T]."""

    besides: NDArray[np.float64]
    unit: NDArray[np.int64]
    saved: NDArray[np.float64]
    arrived: Mapping[int, NDArray[np.float64]]

    def with_rows(self, rows: Mapping[int, float]) -> NDArray[np.float64]:
        """What is besides if only these shares of the rows arrive at units."""
        return self.besides - sum((1 - share) * self.arrived.get(unit, 0.0) for unit, share in rows.items())

    def span(self, unit: int) -> slice:
        """From a unit's first node to its last one. What else stands there has what the unit has in use beside it."""
        inside = np.flatnonzero(self.unit == unit)
        return slice(inside[0], inside[-1] + 1) if inside.size else slice(0)

    def of_chunks(self, shares: Mapping[int, float], rows: Mapping[int, float]) -> NDArray[np.float64]:
        """What is besides, with these shares of the rows and of what units have in use for a short time: more than is
        in use around them."""
        given = self.with_rows(rows)
        found = given.copy()
        for unit, share in shares.items():
            span = self.span(unit)
            if share < 1 and span.stop:
                around = max(given[max(span.start - 1, 0)], given[min(span.stop, len(given) - 1)])
                found[span] = np.minimum(found[span], around + (given[span] - around) * share)
        return found


class Template:
    """Of a program with whole regions that keeps everything. memory: of its graphs, with the regions as marks of rows
    that arrived; sizes: of its symbols, by name. mark: what these were marked by; saved rows that arrived are counted
    as such only if `of_saved`, else the classes of values say how many there are. times: how many units of a larger
    program one of this program stands for, where it is not 1; what they save is there while anything of the one is."""

    def __init__(self, graphs: StepGraphs, memory: Mapping[str, LiveMemory], sizes: Mapping[str, float],
                 mark: Callable[[Storage], Unit | None] = lambda storage: None, *, of_saved: bool = False,
                 times: Callable[[Unit], int] = lambda unit: 1) -> None:  # fmt: skip
        results = graphs.forward.graph.output_node().args[0]
        self.saved = {place: node for place, node in enumerate(results[len(results) - len(graphs.saved) :])
                      if node.op != "placeholder" and edit.tensor_value(node) is not None}  # fmt: skip
        self.sizes = sizes
        every = {unit_of(node) for gm in graphs.graphs.values() for node in gm.graph.nodes}
        self.units: dict[Unit, int] = {unit: number for number, unit in enumerate(sorted(every, key=str))}
        nodes = {"forward": self.saved}
        if graphs.backward is not None:
            given = graphs.backward.graph.find_nodes(op="placeholder")
            nodes["backward"] = {place: given[place] for place in self.saved}
        self.by_classes = {node: None if of_saved else mark((node, 0)) for node in self.saved.values()}
        self.times = {unit: times(unit) for unit in self.units}
        of_one = sum(self._bytes(node) * np.eye(len(self.units))[self.units[unit_of(node)]]
                     for node in self.saved.values()) + np.zeros(len(self.units))  # fmt: skip
        self.totals = np.array([*self.times.values()]) * of_one
        self.points = [self._points(gm, memory[name], nodes[name]) for name, gm in graphs.graphs.items()]
        for points in self.points:
            points.saved[...] += (points.saved > 0) * (self.totals - of_one)

    def _bytes(self, node: Node) -> float:
        return at(nbytes(node), self.sizes)

    def _points(self, gm: GraphModule, memory: LiveMemory, saved: Mapping[int, Node]) -> _Points:
        names = {node.name: node for node in gm.graph.nodes}
        places = {node: place for place, node in enumerate(names.values())}
        found = [(names[name], at(alive, self.sizes)) for name, alive in memory.points]
        changes = np.zeros((len(places) + 1, len(self.units)))
        arrived = {self.units[unit]: memory.alive(unit, self.sizes) for unit in memory.marked if unit in self.units}
        for place, node in saved.items():
            unit = self.units[unit_of(self.saved[place])]
            first, last = 0, len(places)
            if node.op == "placeholder":
                last = 1 + max((places[user] for user in node.users), default=0)
            else:
                first = places[node]
            changes[first, unit] += self._bytes(self.saved[place])
            changes[last, unit] -= self._bytes(self.saved[place])
            if (marked := self.units.get(self.by_classes[self.saved[place]], -1)) in arrived:
                arrived[marked][first:last] -= self._bytes(self.saved[place])
        alive = np.cumsum(changes, axis=0)[[places[node] for node, _ in found]]
        return _Points(np.array([size for _, size in found]) - alive.sum(axis=1),
                       np.array([self.units[unit_of(node)] for node, _ in found]), alive,
                       {unit: np.maximum(mine, 0.0) for unit, mine in arrived.items()})  # fmt: skip

    def transient(self, unit: Unit, shares: Mapping[Unit, float], rows: float = 1.0) -> float:
        """Bytes in use while a unit runs, besides what is saved: a region from its first node to its last, others where
        no region runs. shares: of regions, as in their `State`; rows: of the unit."""
        number, most = self.units.get(unit, -1), 0.0
        known = {self.units[key]: share for key, share in shares.items() if key in self.units}
        regions = [place for key, place in self.units.items() if not isinstance(key, str)]
        for points in self.points:
            where = points.unit == number
            for region in regions if isinstance(unit, str) else [number]:
                where[points.span(region)] = region == number
            most = max(most, points.of_chunks(known, {number: rows})[where].max(initial=0.0))
        return float(most)

    def peak(self, states: Mapping[Unit, State]) -> float:
        """The most bytes in use where units are in these states."""
        most, less = 0.0, np.zeros(len(self.units))
        known = {self.units[unit]: state for unit, state in states.items() if unit in self.units}
        for number, state in known.items():
            less[number] = state.less
        for points in self.points:
            besides = points.of_chunks({number: state.share for number, state in known.items()},
                                       {number: state.rows for number, state in known.items()})  # fmt: skip
            fewer = points.saved / np.maximum(self.totals, 1) * less
            alive = besides + points.saved.sum(axis=1) - fewer.sum(axis=1)
            for unit, state in states.items():
                inside = points.unit == self.units.get(unit, -1)
                alive[inside] += np.minimum(fewer[inside, self.units.get(unit, 0)], state.back) + state.passing
            most = max(most, alive.max(initial=0.0))
        return float(most)


def unit_of(node: Node) -> Unit:
    region = region_of(node)
    return layer_of(module_path(node)) if region is None else region
