"""How much memory a step needs: the most in each of its graphs, and what regions have to do with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import at
from moefx.costmodel.memory import LiveMemory, Peak, Storage, live_memory, nbytes_of, storages


def step_memory(step: StepGraphs, resident: Mapping[str, float] | None = None,
                mark: Callable[[Storage], Hashable] = lambda storage: None) -> dict[str, LiveMemory]:  # fmt: skip
    """The memory of each graph of a step on one rank.

    Through the whole of it are there: parameters, buffers and the user's inputs. Through the whole backward: the
    outputs, which the user may still hold, and their gradients, which autograd holds. Saved values go after their
    last use; gradients of parameters come as they are made. resident: by graph, bytes of what the program does not
    touch, see `PassContext`. mark: see `live_memory`; of a saved value, that of the forward's. Not in it: what the
    user and the optimizer hold, gradients of earlier micro-steps, and what torch's own kernels and collectives
    allocate for themselves.
    """
    resident = resident or {}
    made, lies_in = storages_of(step)
    inputs = {each for node in step.forward.graph.find_nodes(op="placeholder") for each in made[node]}
    beside = sum(map(nbytes_of, inputs))
    always = beside + resident.get("forward", 0)
    found = {"forward": live_memory(step.forward, outside=inputs, beside=always, mark=mark)}
    if step.backward is None:
        return found
    outputs = {each for node in outputs_of(step) for each in made[node]} - inputs
    given = step.backward.graph.find_nodes(op="placeholder")
    tangents = {(node, 0) for node in given[len(step.saved) :]}
    beside += sum(map(nbytes_of, outputs | tangents)) + resident.get("backward", 0)
    found["backward"] = live_memory(step.backward, lies_in=lies_in, outside=inputs | outputs | tangents, beside=beside,
                                    mark=mark)
    return found


def storages_of(step: StepGraphs) -> tuple[dict[Node, list[Storage]], dict[Node, Storage]]:
    """Where the values of the forward's nodes lie; and of the saved values that the backward is given, the same."""
    made = storages(step.forward)
    if step.backward is None:
        return made, {}
    returned, given = step.forward.graph.output_node().args[0], step.backward.graph.find_nodes(op="placeholder")
    saved = returned[len(returned) - len(step.saved) :]
    return made, {node: made[old][0] for node, old in zip(given, saved) if isinstance(old, Node) and made[old]}


def outputs_of(step: StepGraphs) -> list[Node]:
    """What the forward returns to the user."""
    returned, first = step.forward.graph.output_node().args[0], len(step.mutated_inputs)
    return [node for node in returned[first : first + step.num_user_outputs] if isinstance(node, Node)]


def peaks(step: StepGraphs, ctx: PassContext, sizes: Mapping[str, float]) -> dict[str, Peak]:
    """The most bytes alive in each graph, see `step_memory`, and the node that runs then."""
    return {name: memory.peak(sizes) for name, memory in step_memory(step, ctx.resident).items()}


@dataclass(frozen=True)
class Footprint:
    """Bytes alive in one graph of a program with whole regions: around a region, the most within it, and the most where
    there is no region.

    Chunks alone save nothing: what all of them keep for the backward is there in the end, and their buffers live until
    then. Where only so many chunks are alive at once (`Decisions.rings`, MPipeMoE's ring buffers, section III-C), what
    a region holds beyond what is around it shrinks to their share. `peaks` of the program that is made in the end says
    it exactly. points: where the three come from, (bytes alive, those of rows that arrived, the field's name).
    """

    around: float
    within: float
    elsewhere: float = 0.0
    points: tuple[tuple[float, float, str], ...] = ()

    def with_rows(self, share: float) -> Footprint:
        """If only this share of the rows arrived at all regions."""
        if share == 1 or not self.points:
            return self
        found = {"around": 0.0, "within": 0.0, "elsewhere": 0.0}
        for alive, arrived, where in self.points:
            found[where] = max(found[where], alive - (1 - share) * arrived)
        return replace(self, **{**found, "within": max(found["within"], found["around"])}, points=())

    def peak(self, chunks: int, rings: int = 0) -> float:
        share = min(1.0, rings / chunks) if rings else 1.0
        return max(self.elsewhere, self.around + (self.within - self.around) * share)


def footprint(memory: LiveMemory, names: Collection[str], regions: Iterable[Collection[str]],
              sizes: Mapping[str, float]) -> Footprint:  # fmt: skip
    """Of the region with nodes of these names, of those of all `regions`. What is marked in the memory are rows that
    arrived at any of them."""
    points = [at(alive, sizes) for _, alive in memory.points]
    arrived = sum(memory.alive(mark, sizes) for mark in memory.marked) + np.zeros(len(points))
    place = {name: i for i, (name, _) in enumerate(memory.points)}

    def span(found: Collection[str]) -> range:
        return range(min(map(place.__getitem__, found)), max(map(place.__getitem__, found)) + 1)

    mine, inside = span(names), {i for found in regions for i in span(found)}
    ends = max(mine[0] - 1, 0), min(mine[-1] + 1, len(points) - 1)
    around = max(points[i] for i in ends)
    elsewhere = max((alive for i, alive in enumerate(points) if i not in inside), default=0.0)
    where = [*((i, "around") for i in ends), *((i, "within") for i in mine),
             *((i, "elsewhere") for i in range(len(points)) if i not in inside)]  # fmt: skip
    return Footprint(around, max(around, *(points[i] for i in mine)), elsewhere,
                     tuple((points[i], float(arrived[i]), name) for i, name in where) if memory.marked else ())
