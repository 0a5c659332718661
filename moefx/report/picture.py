"""The picture of a plan: where one way to run a layer becomes faster than another, as SVG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moefx.report.what_if import Plan

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_WIDTH, _HEIGHT, _LEFT, _RIGHT = 820, 240, 80, 200
_ABOVE, _BELOW, _LINE = 34, 84, 15  # of a panel's axes: room for its title, for numbers and names; of a line of text
_CHARACTER = 6.6  # its width, or a little more
_STYLES = (("#3a6ea5", ""), ("#e8833a", "7 3"), ("#3f8a3f", "2 3"), ("#8a5aa8", "9 3 2 3"), ("#b04a4a", "4 4"),
           ("#6b7280", "1 5"))  # fmt: skip
_FAR = 5  # what takes more than so many times the fastest everywhere is named and not drawn


@dataclass(frozen=True)
class Panel:
    """lines: {name: {x: milliseconds}}; below: {x: words}, which stand where they change. A logarithmic x axis."""

    title: str
    across: str
    up: str
    lines: Mapping[str, Mapping[int, float]]
    below: Mapping[int, str]


def draw(plan: Plan, path: str | Path) -> Path:
    """Panels one below the other: of every kind of layer with experts the batch, then the ranks."""
    panels = panels_of(plan)
    parts, top = [], 12.0
    for line in _wrapped(f"{plan.model} on {plan.ranks} ranks of {plan.machine.name}, predicted", _WIDTH - 40):
        top += _LINE + 3
        parts.append(_text(20, top, line, size=14))
    if not panels:
        parts.append(_text(20, top + 24, "nothing is exchanged in this model, so there is nothing to choose"))
        top += 24
    for panel in panels:
        more, height = _panel(panel, top + 14)
        parts += more
        top += height + 14
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top + 20:.0f}" font-family="{_FONT}" '
            'font-size="12"><rect width="100%" height="100%" fill="white"/>')  # fmt: skip
    target = Path(path)
    target.write_text("\n".join([head, *parts, "</svg>\n"]), encoding="utf-8")
    return target


def panels_of(plan: Plan) -> list[Panel]:
    found = []
    for layer in (layer for layer in plan.layers if layer.curves):
        lines: dict[str, dict[int, float]] = {}
        for batch, ways in layer.curves.items():
            for way, seconds in ways.items():
                lines.setdefault(way, {})[batch] = 1e3 * seconds / batch
        found.append(Panel(f"{layer.name}: its experts, forward and backward, by all-to-all; below: what is chosen",
                           "sequences of a rank (batch)", "ms per sequence", lines, layer.chosen))  # fmt: skip
    if plan.ranks_curve:
        line = {n: 1e3 * seconds for n, (_, _, seconds) in plan.ranks_curve.items()}
        named = {n: f"ep={ep}" + (f" esp={esp}" if esp > 1 else "") for n, (ep, esp, _) in plan.ranks_curve.items()}
        found.append(Panel("exchanges and gradients of a layer's experts, which are spread as is fastest; below: how",
                           "GPUs", "ms of a step", {"closed form, one chunk": line}, named))  # fmt: skip
    return found


def _panel(panel: Panel, top: float) -> tuple[list[str], float]:
    """(elements, height)."""
    best = {x: min(line[x] for line in panel.lines.values() if x in line)
            for x in sorted({x for line in panel.lines.values() for x in line})}  # fmt: skip
    far = [name for name, line in panel.lines.items() if all(y > _FAR * best[x] for x, y in line.items())]
    lines = {name: line for name, line in panel.lines.items() if name not in far}
    xs, high = list(best), 1.08 * max(y for line in lines.values() for y in line.values())
    parts, titles = [], _wrapped(panel.title, _WIDTH - _LEFT - 20)
    for number, line in enumerate(titles):
        parts.append(_text(_LEFT, top + _LINE * (number + 1), line, weight="bold"))
    roof = top + _LINE * len(titles) + _ABOVE - _LINE
    floor, wide = roof + _HEIGHT, _WIDTH - _LEFT - _RIGHT

    def across(x: float) -> float:
        return _LEFT + wide * (math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0))

    def up(y: float) -> float:
        return floor - _HEIGHT * y / high

    for tick in _ticks(high):
        parts.append(f'<path d="M{_LEFT} {up(tick):.1f}h{wide}" stroke="#e5e5e5"/>')
        parts.append(_text(_LEFT - 8, up(tick) + 4, f"{tick:g}", anchor="end"))
    parts += [_text(across(x), floor + 16, str(x), anchor="middle") for x in xs]
    parts.append(_text(_LEFT + wide / 2, floor + 34, panel.across, anchor="middle", color="#555"))
    parts.append(f'<g transform="translate(24,{roof + _HEIGHT / 2:.1f}) rotate(-90)">'
                 f"{_text(0, 0, panel.up, anchor='middle', color='#555')}</g>")  # fmt: skip
    parts += _changes(panel.below, xs, across, roof, floor)
    ends = {name: up(line[max(line)]) for name, line in lines.items()}
    places = _apart(ends)
    for number, (name, line) in enumerate(lines.items()):
        color, dashes = _STYLES[number % len(_STYLES)]
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(line.items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" '
                     f'stroke-dasharray="{dashes}"/>')  # fmt: skip
        end, place = _LEFT + wide, places[name]
        parts.append(f'<path d="M{end + 3} {ends[name]:.1f}L{end + 16} {place:.1f}h22" fill="none" stroke="{color}" '
                     f'stroke-width="2" stroke-dasharray="{dashes}"/>')  # fmt: skip
        parts.append(_text(end + 44, place + 4, name, color=color))
    if far:
        words = f"not drawn, more than {_FAR} times the fastest: {', '.join(far)}"
        parts.append(_text(_LEFT, roof - 6, words, color="#555"))
    return parts, floor + _BELOW - top


def _changes(below: Mapping[int, str], xs: Sequence[int], across: Callable[[float], float], roof: float, floor: float,
             ) -> Iterator[str]:  # fmt: skip
    before, number = None, 0
    for x in xs:
        if below.get(x) != before:
            before = below.get(x)
            yield f'<path d="M{across(x):.1f} {roof:.1f}V{floor:.1f}" stroke="#999" stroke-dasharray="3 3"/>'
            yield _text(across(x) - 6, floor + 52 + _LINE * (number % 2), f"from {x} on: {before}")
            number += 1


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Heights of labels, so that none lies on another: in the order of the lines' ends, the lowest at its own."""
    found: dict[str, float] = {}
    above = math.inf
    for name in sorted(ends, key=ends.__getitem__, reverse=True):
        found[name] = above = min(ends[name], above - _LINE)
    return found


def _ticks(high: float) -> list[float]:
    """About five round numbers from 0 on."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough)
    return [step * n for n in range(int(high / step) + 1)]


def _wrapped(words: str, room: float) -> list[str]:
    return textwrap.wrap(words, int(room / _CHARACTER))


def _text(x: float, y: float, words: str, *, color: str = "#222", anchor: str = "start", size: int = 12,
          weight: str = "normal") -> str:  # fmt: skip
    return (f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}">{escape(words)}</text>')  # fmt: skip
