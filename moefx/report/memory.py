"""`moefx.memory`: how much memory a step is predicted to need, node by node, and for what.

    moefx.memory(compiled, optimizer=optimizer).draw("memory.svg")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from moefx.report import svg
from moefx.report.inspection import title_of
from moefx.report.reports import programs_of

# From the bottom of the picture, with the color of each.
PARTS = {"parameters and buffers": "#98a3b0", "optimizer's state": "#c3c9d1", "inputs and outputs": "#e3d3ac",
         "gradients": "#b58bc2", "kept for the backward": "#6d94c4", "in use": "#cfdcec"}  # fmt: skip
PARAMETERS, OPTIMIZER, OUTSIDE, GRADIENTS, KEPT, IN_USE = PARTS
_PARAMETERS = ("param", "experts", "stack", "buffer")
_MEASURED, _HOST = "#c65f12", "#7a5a12"
_WIDTH, _HEIGHT, _LEFT, _MARGIN, _TOP = 1100, 300, 86, 20, 84

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

    def draw(self, path: str | Path, measured: Mapping[str, Mapping[str, float]] | None = None) -> Path:
        """Write an SVG picture. measured: {graph: {node: the most bytes beyond what is resident}}, of a run."""
        return svg.write(path, _WIDTH, _TOP + _HEIGHT + 52, _picture(self, measured or {}))


def memory(compiled: CompiledModule, *args: Any, sizes: Mapping[str, float] | None = None,
           optimizer: torch.optim.Optimizer | None = None, **kwargs: Any) -> StepMemory:  # fmt: skip
    """What a step needs in memory, predicted, node by node. `explain` shows its peaks. With arguments it is the step of
    the program for a call with them, else of the newest program. It assumes balanced routing.

    sizes: by symbol; by default those that the program was compiled for. optimizer: also count its present state on
    this rank. Compiles if `explain` would. Raises UnsupportedUse if nothing was compiled.
    """
    variant = programs_of(compiled, args, kwargs)[-1]
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


# -- the picture ----------------------------------------------------------------------------------------------------


def _picture(found: StepMemory, measured: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    graphs = found.spaces[DEVICE]
    line = {graph: [(i, found.resident + measured[graph][name]) for i, (name, _) in enumerate(points)
                    if name in measured.get(graph, {})] for graph, points in graphs.items()}  # fmt: skip
    is_measured, has_host = any(line.values()), "host" in found.spaces
    most = max(found.peak(graph, space).bytes for space, each in found.spaces.items() for graph in each)
    top = 1.05 * max([most, *(size for places in line.values() for _, size in places)])
    scale, unit = next((2**power, unit) for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "bytes"))
                       if top >= 2**power or not power)  # fmt: skip

    def up(size: float) -> float:
        return _TOP + _HEIGHT * (1 - size / top)

    title = f"Memory in use on one rank during a step, predicted{' and measured' if is_measured else ''}"
    yield svg.text(_LEFT, 22, f"{title} ({found.title})", 'font-size="15" font-weight="bold"')
    shown = [part for part in PARTS if any(any(found.parts[graph][part]) for graph in graphs)]
    lines = [*(["measured (line)"] if is_measured else []), *(["in the host's memory (line)"] if has_host else [])]
    colors = {"measured (line)": _MEASURED, "in the host's memory (line)": _HOST} | PARTS
    yield from svg.legend(_LEFT, 34, [(words, colors[words]) for words in (*shown, *lines)])
    for tick in svg.ticks(top / scale, 6):
        yield f'<path d="M{_LEFT} {up(tick * scale):.1f}H{_WIDTH - _MARGIN}" stroke="#e5e5e5"/>'
        yield svg.text(_LEFT - 8, up(tick * scale) + 4, f"{tick:g} {unit}", 'text-anchor="end" fill="#555"')
    x, wide = float(_LEFT), (_WIDTH - _LEFT - len(graphs) * _MARGIN) / sum(map(len, graphs.values()))
    for graph, points in graphs.items():
        yield from _stack(found.parts[graph], shown, x, wide, up)
        if graph in found.spaces.get("host", {}):
            host = [(i, size) for i, (_, size) in enumerate(found.spaces["host"][graph])]
            yield _polyline(host, x, wide, up, _HOST)
        if line[graph]:
            yield _polyline(line[graph], x, wide, up, _MEASURED)
        peak = found.peak(graph)
        place = next(i for i, (name, _) in enumerate(points) if name == peak.node)
        yield f'<circle cx="{x + (place + 0.5) * wide:.1f}" cy="{up(peak.bytes):.1f}" r="3" fill="#222"/>'
        said = f"{graph}: predicted peak {peak.bytes / scale:.1f} {unit} at {peak.node}"
        yield svg.text(x, _TOP - 20, said, 'font-weight="bold"')
        if line[graph]:
            yield svg.text(x, _TOP - 6, f"measured peak {max(size for _, size in line[graph]) / scale:.1f} {unit}")
        yield svg.text(x, _TOP + _HEIGHT + 18, f"{graph}: {len(points)} operators, in the order in which they run",
                       'fill="#555"')  # fmt: skip
        x += wide * len(points) + _MARGIN
    said = "Areas are predicted, one on top of the other; a dot marks the predicted peak."
    yield svg.text(_LEFT, _TOP + _HEIGHT + 38, said + (" The line was measured." if is_measured else ""), 'fill="#555"')


def _stack(parts: Mapping[str, Sequence[float]], shown: Sequence[str], x: float, wide: float,
           up: Callable[[float], float]) -> Iterator[str]:  # fmt: skip
    """An area for every part, on those below it."""
    floor = [0.0] * len(parts[shown[0]])
    for part in shown:
        ceiling = [below + size for below, size in zip(floor, parts[part])]
        there = [f"{x + i * wide:.2f} {up(size):.2f}h{wide:.2f}" for i, size in enumerate(ceiling)]
        back = [f"{x + (i + 1) * wide:.2f} {up(size):.2f}h{-wide:.2f}" for i, size in reversed([*enumerate(floor)])]
        yield f'<path d="M{"L".join([*there, *back])}Z" fill="{PARTS[part]}"><title>{part}</title></path>'
        floor = ceiling


def _polyline(places: Sequence[tuple[int, float]], x: float, wide: float, up: Callable[[float], float],
              color: str) -> str:  # fmt: skip
    points = " ".join(f"{x + (place + 0.5) * wide:.2f},{up(size):.2f}" for place, size in places)
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
