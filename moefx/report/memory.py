"""`moefx.memory`: how much memory a step needs, node by node, as planned and, where it was measured, as it was.

    moefx.memory(compiled).draw("memory.svg")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from moefx.analysis.sizes import typical_sizes
from moefx.costmodel.amounts import at
from moefx.costmodel.memory import DEVICE, Peak
from moefx.model.api import CompiledModule
from moefx.planning.memory import step_memory
from moefx.report.inspection import title_of
from moefx.report.reports import programs_of

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_WIDTH, _HEIGHT, _LEFT, _MARGIN, _TOP = 1100, 260, 70, 20, 46
_FILLS = {DEVICE: "#c9d8ea", "host": "#efe0c2"}
_LINES = {DEVICE: "#3a6ea5", "host": "#d9a441"}
_MEASURED = "#e8833a"


@dataclass(frozen=True)
class StepMemory:
    """Bytes in use on one rank while each node of a step runs.

    spaces: {"device", and "host" if anything waits there: {"forward", "backward": ((node, bytes), ..) in order}}.
    resident: bytes of the device's that parameters, buffers and inputs take all the time. title: of the program.
    """

    spaces: Mapping[str, Mapping[str, tuple[tuple[str, float], ...]]]
    resident: float
    title: str = ""

    def peak(self, graph: str, space: str = DEVICE) -> Peak:
        """The most bytes in a graph, and the first node that needs them. Raises KeyError for what there is not."""
        return max((Peak(alive, name) for name, alive in self.spaces[space][graph]), key=lambda peak: peak.bytes)

    def draw(self, path: str | Path, measured: Mapping[str, Mapping[str, float]] | None = None) -> Path:
        """Write an SVG picture. measured: {graph: {node: the most bytes beyond what is resident}}."""
        graphs = self.spaces[DEVICE]
        nodes = sum(map(len, graphs.values()))
        top = 1.08 * max(self.peak(graph, space).bytes for space, each in self.spaces.items() for graph in each)
        parts, x, width = list(_scale(top)), _LEFT, _WIDTH - _LEFT - _MARGIN
        for graph, points in graphs.items():
            wide = width * len(points) / nodes - _MARGIN
            for space, each in self.spaces.items():
                parts += _area([alive for _, alive in each.get(graph, ())], x, wide, top, space)
            found = (measured or {}).get(graph, {})
            places = [(i, self.resident + found[name]) for i, (name, _) in enumerate(points) if name in found]
            parts += _line(places, len(points), x, wide, top)
            peak = self.peak(graph)
            said = f"{graph}: {peak.bytes / 2**20:.1f} MiB at {peak.node}"
            said += f", measured {max(alive for _, alive in places) / 2**20:.1f}" if places else ""
            parts.append(_text(x, _TOP - 8, said))
            x += wide + _MARGIN
        base = _TOP + _HEIGHT * (1 - self.resident / top)
        parts.append(f'<path d="M{_LEFT} {base:.1f}H{_WIDTH - _MARGIN}" stroke="#888" stroke-dasharray="4 3"/>')
        parts.append(_text(_LEFT, _TOP + _HEIGHT + 18, "filled: planned; line: measured; dashed: parameters, inputs"))
        parts.append(_text(_LEFT, 20, self.title))
        text = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_TOP + _HEIGHT + 30}" '
                f'font-family="{_FONT}" font-size="12"><rect width="100%" height="100%" fill="white"/>')  # fmt: skip
        target = Path(path)
        target.write_text("\n".join([text, *parts, "</svg>\n"]), encoding="utf-8")
        return target


def memory(compiled: CompiledModule, *args: Any, sizes: Mapping[str, float] | None = None, **kwargs: Any) -> StepMemory:
    """What a step of the program for a call with these arguments needs, without any: of the newest one. It is what
    `explain` has the peaks of: for the sizes that it was compiled for and balanced routing, or for `sizes`, by symbol.

    Compiles where `explain` does. Raises UnsupportedUse if nothing was compiled.
    """
    variant = programs_of(compiled, args, kwargs)[-1]
    sizes = typical_sizes(variant.scheduled.values(), variant.context) if sizes is None else sizes
    found = step_memory(variant.step, variant.context.resident)
    spaces: dict[str, dict[str, tuple[tuple[str, float], ...]]] = {}
    for graph, alive in found.items():
        for space, points in alive.spaces.items():
            spaces.setdefault(space, {})[graph] = tuple((name, at(size, sizes)) for name, size in points)
    return StepMemory(spaces, at(found["forward"].resident, sizes), title_of(variant))


def _scale(top: float) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _TOP + _HEIGHT * (1 - share)
        yield f'<path d="M{_LEFT} {y}H{_WIDTH - _MARGIN}" stroke="#eee"/>'
        yield _text(_MARGIN, y + 4, f"{top * share / 2**20:.1f}")


def _area(alive: list[float], x: float, wide: float, top: float, space: str) -> Iterator[str]:
    if alive:
        step, steps = wide / len(alive), []
        for place, size in enumerate(alive):
            steps.append(f"L{x + place * step:.2f} {_TOP + _HEIGHT * (1 - size / top):.2f}h{step:.2f}")
        yield (f'<path d="M{x:.2f} {_TOP + _HEIGHT}{"".join(steps)}L{x + wide:.2f} {_TOP + _HEIGHT}Z" '
               f'fill="{_FILLS[space]}" stroke="{_LINES[space]}" fill-opacity="0.7"/>')  # fmt: skip


def _line(places: list[tuple[int, float]], count: int, x: float, wide: float, top: float) -> Iterator[str]:
    if places:
        points = [f"{x + (place + 0.5) * wide / count:.2f},{_TOP + _HEIGHT * (1 - size / top):.2f}"
                  for place, size in places]  # fmt: skip
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{_MEASURED}" stroke-width="1.5"/>'


def _text(x: float, y: float, said: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(said)}</text>'
