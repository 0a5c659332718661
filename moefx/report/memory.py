"""`moefx.memory`: how much memory a step is predicted to need, node by node, and for what.

    moefx.memory(compiled, optimizer=optimizer).draw("memory.html")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from moefx.analysis.sizes import typical_sizes
from moefx.compiler.variant import Variant
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import at
from moefx.costmodel.memory import DEVICE, LiveMemory, Peak, Storage, nbytes_of, storages
from moefx.model.api import CompiledModule
from moefx.planning.memory import outputs_of, step_memory, storages_of
from moefx.report import page
from moefx.report.charts import PARTS
from moefx.report.inspection import title_of
from moefx.report.reports import programs_of

PARAMETERS, OPTIMIZER, OUTSIDE, GRADIENTS, KEPT, IN_USE = PARTS
_PARAMETERS = ("param", "experts", "stack", "buffer")

Points = tuple[tuple[str, float], ...]
"""(node, bytes), in the order in which nodes run."""


@dataclass(frozen=True)
class StepMemory:
    """Predicted bytes in use on one rank while each node of a step runs.

    spaces: {"device", and "host" if anything waits there: {"forward", "backward": points}}. parts: {graph: {part of the
    device's: bytes at each point}}, see `PARTS`; they add up to the device's points. "kept for the backward": values
    that the forward saves, from when they are made to their last use. "in use": all else that comes and goes.
    resident: bytes of the device's that parameters, buffers, inputs and, where it is known, the optimizer's state take
    all the time. title: of the program.
    """

    spaces: Mapping[str, Mapping[str, Points]]
    resident: float
    title: str = ""
    parts: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def peak(self, graph: str, space: str = DEVICE) -> Peak:
        """The most bytes in a graph, and the first node that needs them. Raises KeyError for an unknown name."""
        return max((Peak(alive, name) for name, alive in self.spaces[space][graph]), key=lambda peak: peak.bytes)

    def to_dict(self, measured: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Any]:
        """measured: {graph: {node: the most bytes beyond what is resident}}, of a run."""
        found = {graph: [self.resident + of_graph[name] if name in of_graph else None for name, _ in points]
                 for graph, points in self.spaces[DEVICE].items() for of_graph in [(measured or {}).get(graph, {})]}
        host = self.spaces.get("host", {})
        return {"title": self.title, "resident_bytes": self.resident,
                "peaks": {graph: {"bytes": peak.bytes, "node": peak.node}
                          for graph in self.spaces[DEVICE] for peak in [self.peak(graph)]},
                "device": {graph: [list(point) for point in points] for graph, points in self.spaces[DEVICE].items()},
                "parts": {graph: {part: list(sizes) for part, sizes in parts.items()}
                          for graph, parts in self.parts.items()},
                "host": {graph: [size for _, size in host[graph]] for graph in host},
                "measured": found if measured else {}}  # fmt: skip

    def draw(self, path: str | Path, measured: Mapping[str, Mapping[str, float]] | None = None) -> Path:
        """Write a page with the memory over the step. measured: as in `to_dict`. Raises MoefxError without plotly."""
        return page.write({"title": f"Memory of a step: {self.title}", "memory": self.to_dict(measured)}, path)


def memory(compiled: CompiledModule, *args: Any, sizes: Mapping[str, float] | None = None,
           optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> StepMemory:  # fmt: skip
    """What a step needs in memory, predicted, node by node. `explain` shows its peaks. With arguments it is the step of
    the program for a call with them, else of the newest program. It assumes balanced routing.

    sizes: by symbol; by default those that the program was compiled for. optimizer: also count its present state on
    this rank. Compiles if `explain` would. Raises UnsupportedUse if nothing was compiled.
    """
    return memory_of(programs_of(compiled, args, kwargs)[-1], sizes, optimizer)


def memory_of(variant: Variant, sizes: Mapping[str, float] | None = None,
              optimizer: torch.optim.Optimizer | None = None) -> StepMemory:  # fmt: skip
    """`memory` of one program."""
    sizes = typical_sizes(variant.scheduled.values(), variant.context) if sizes is None else sizes
    found = step_memory(variant.step, variant.context.resident, _mark(variant.step))
    state = _nbytes(optimizer)
    spaces: dict[str, dict[str, Points]] = {}
    for graph, alive in found.items():
        for space, points in alive.spaces.items():
            more = state if space == DEVICE else 0.0
            spaces.setdefault(space, {})[graph] = tuple((name, at(size, sizes) + more) for name, size in points)
    always = _always(variant, sizes) | {OPTIMIZER: state}
    parts = {graph: _parts(alive, sizes, [size for _, size in spaces[DEVICE][graph]], always, graph)
             for graph, alive in found.items()}  # fmt: skip
    return StepMemory(spaces, at(found["forward"].resident, sizes) + state, title_of(variant), parts)


def _mark(step: StepGraphs) -> Callable[[Storage], str | None]:
    """Which part a piece of memory belongs to, of all that comes and goes."""
    made, lies_in = storages_of(step)
    found = dict.fromkeys(lies_in.values(), KEPT)
    found |= {each: OUTSIDE for node in outputs_of(step) for each in made[node]}
    if step.backward is not None:
        given = step.forward.graph.find_nodes(op="placeholder")
        there = storages(step.backward, lies_in)
        for node, number in zip(step.backward.graph.output_node().args[0], step.grad_inputs):
            if isinstance(node, Node):
                part = GRADIENTS if _is_parameter(given[number]) else OUTSIDE
                found |= {each: part for each in there[node] if each not in found}
    return found.get


def _is_parameter(node: Node) -> bool:
    return getattr(node.meta.get("moefx"), "kind", "") in _PARAMETERS


def _always(variant: Variant, sizes: Mapping[str, float]) -> dict[str, float]:
    """Bytes of parameters and buffers; and of gradients that other programs make, through the whole backward."""
    resident, given = variant.context.resident, variant.step.forward.graph.find_nodes(op="placeholder")
    mine = sum(at(nbytes_of((node, 0)), sizes) for node in given if _is_parameter(node))
    before = resident.get("forward", 0.0)
    return {PARAMETERS: mine + before, GRADIENTS: resident.get("backward", before) - before}


def _parts(alive: LiveMemory, sizes: Mapping[str, float], whole: Sequence[float], always: Mapping[str, float],
           graph: str) -> dict[str, list[float]]:  # fmt: skip
    constant = dict(always) if graph == "backward" else {**always, GRADIENTS: 0.0}
    constant[OUTSIDE] = at(alive.resident, sizes) + constant[OPTIMIZER] - sum(constant.values())
    found = {part: [constant.get(part, 0.0) + more for more in alive.alive(part, sizes)] for part in PARTS}
    found[IN_USE] = [total - sum(found[part][i] for part in PARTS if part != IN_USE) for i, total in enumerate(whole)]
    return found


def _nbytes(optimizer: torch.optim.Optimizer | None) -> float:
    held = tree_leaves(list(optimizer.state.values())) if optimizer is not None else ()
    local = (each.to_local() if isinstance(each, DTensor) else each for each in held)
    return float(sum(each.nbytes for each in local if isinstance(each, torch.Tensor)))
