"""How a plan is shown: as text, as data, and as a picture of the crossovers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moefx.context.decisions import Choice
from moefx.report import adaptive

if TYPE_CHECKING:
    from moefx.report.what_if import LayerPlan, Plan

_SHOWN = 4  # candidates of a layer
_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 240, 80, 60, 90
_COLORS = ("#3a6ea5", "#e8833a", "#5a9a5a", "#8a5aa8", "#b04a4a", "#6b7280")


def way_of(choice: Choice, *, with_chunks: bool = True) -> str:
    """A way to run a region in a few words, such as "2dh, 4 chunks"."""
    words = [choice.alltoall]
    if choice.codec != "identity":
        words.append(choice.codec)
    if choice.schedule is not None:
        words.append(choice.schedule)
    if choice.r is not None:
        words.append(f"r = {choice.r}")
    if with_chunks:
        words.append(f"{choice.chunks} chunk{'s' * (choice.chunks > 1)}")
    return ", ".join(words)


def text(plan: Plan) -> Group:
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    parts: list[Any] = [
        Text(f"{plan.model} on {math.prod(plan.mesh.values())} ranks of {plan.machine.name}", style="bold"),
        Text(f"mesh {mesh}, experts over ep={plan.ep}, esp={plan.esp}; every rank gets {list(plan.batch)}"),
        Text(f"machine: {plan.machine.provenance.kind}: {plan.machine.provenance.text}, "
             f"{plan.machine.ranks_per_node} ranks per node"),
        _step(plan), _memory(plan), _kinds(plan),
    ]  # fmt: skip
    for layer in plan.layers:
        parts += _choice(layer)
    if plan.within is not None and plan.within.rows:
        parts.append(Text("not kept for the backward as eager autograd does:"))
        parts += [Text(f"    {times} x {name}: {ways}") for name, ways, times in plan.within.rows]
    parts.append(Text(_programs(plan)))
    parts += [Text(note) for note in plan.notes]
    return Group(*parts)


def _step(plan: Plan) -> Table:
    table = Table(title=f"a step takes {_ms(plan.step_s)}, predicted", title_justify="left")
    words = {"forward": "forward", "backward": "backward", "exposed": "reductions and gathers, not hidden",
             "optimizer": "AdamW, bound by memory"}  # fmt: skip
    for column in ("part", "time", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in plan.seconds.items():
        table.add_row(words[name], _ms(seconds), f"{seconds / plan.step_s:.1%}")
    return table


def _memory(plan: Plan) -> Table:
    limit = f", of {gb(plan.limit)}" if plan.limit is not None else ""
    table = Table(title=f"a rank needs {gb(plan.memory['peak'])} at the peak{limit}", title_justify="left")
    words = {"parameters": "parameters", "gradients": "gradients", "optimizer": "AdamW's moments, in their dtype",
             "kept": "kept for the backward", "peak": "at the peak, with what is in use then"}  # fmt: skip
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    for name, nbytes in plan.memory.items():
        table.add_row(words[name], gb(nbytes))
    return table


def _kinds(plan: Plan) -> Table:
    table = Table(title="layers", title_justify="left")
    for column in ("kind", "layers", "time of one", "parameters", "kept"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for each in plan.layers:
        table.add_row(each.name, str(each.count), "" if each.seconds is None else _ms(each.seconds),
                      *("" if size is None else gb(size) for size in (each.bytes_parameters, each.bytes_kept)))
    return table


def _choice(layer: LayerPlan) -> Iterator[Any]:
    for plan in layer.regions[:1]:
        yield Text(f"{layer.name}: {_stars(plan.module)}: {plan.reason}")
        table = Table()
        for column in ("", "way", "forward", "backward", "exposed"):
            table.add_column(column, justify="left" if column in ("", "way") else "right")
        best = {way_of(each.choice): each for each in reversed((plan.chosen, *plan.candidates))}  # of several orders
        best[way_of(plan.chosen.choice)] = plan.chosen
        ranked = sorted(best.values(), key=lambda each: each.seconds)
        for each in ranked[: max(_SHOWN, ranked.index(plan.chosen) + 1)]:
            table.add_row("->" if each is plan.chosen else "", way_of(each.choice),
                          *map(_ms, (each.forward_s, each.backward_s, each.exposed_s)))  # fmt: skip
        yield table
        yield from (Text(line) for line in (*adaptive.lines_of(plan), *plan.notes))
        if layer.chosen:
            changes = "; ".join(f"from batch {batch} on {new}, before {old}" for batch, old, new in layer.crossovers)
            first, last = min(layer.chosen), max(layer.chosen)
            yield Text(f"batches of {first} to {last}: {changes or f'always {layer.chosen[first]}'}")


def _programs(plan: Plan) -> str:
    took = ", ".join(f"{f'{count} layers' if count else 'all layers'} in {seconds:.0f} s"
                     for count, seconds in plan.programs)  # fmt: skip
    if len(plan.programs) == 1:
        return f"compiled: {took}"
    total = sum(layer.count for layer in plan.layers)
    return (f"extrapolated to {total} layers: compiled were models with {took}; what one layer more of a kind takes is "
            "what all others of it are taken to take, and peaks grow as they do there")


def to_dict(plan: Plan) -> dict[str, Any]:
    kept = plan.within
    return {
        "model": plan.model, "machine": plan.machine.name, "machine_digest": plan.machine.digest(),
        "mesh": dict(plan.mesh), "ep": plan.ep, "esp": plan.esp, "batch": list(plan.batch), "step_s": plan.step_s,
        "seconds": dict(plan.seconds), "memory": dict(plan.memory), "memory_limit": plan.limit,
        "layers": [_as_dict(layer) for layer in plan.layers],
        "programs": [{"layers": count, "seconds": seconds} for count, seconds in plan.programs],
        "notes": list(plan.notes),
        "not_kept": [{"class": name, "ways": ways, "times": times} for name, ways, times in kept.rows] if kept else [],
        "over_ranks": {str(n): {"ep": ep, "esp": esp, "seconds": s} for n, (ep, esp, s) in plan.ranks_curve.items()},
    }  # fmt: skip


def _as_dict(layer: LayerPlan) -> dict[str, Any]:
    return {
        "name": layer.name, "count": layer.count, "seconds": layer.seconds,
        "parameter_bytes": layer.bytes_parameters, "kept_bytes": layer.bytes_kept,
        "regions": [{"module": _stars(plan.module), "reason": plan.reason, "choice": plan.chosen.choice.to_dict(),
                     "forward_s": plan.chosen.forward_s, "backward_s": plan.chosen.backward_s,
                     "exposed_s": plan.chosen.exposed_s,
                     "candidates": [{**each.choice.to_dict(), "seconds": each.seconds} for each in plan.candidates]}
                    for plan in layer.regions],
        "over_batches": {str(batch): {"chosen": layer.chosen[batch], "seconds": dict(ways)}
                         for batch, ways in layer.curves.items()},
    }  # fmt: skip


def draw(plan: Plan, path: str | Path) -> Path:
    """Panels one below the other: of every kind of layer with experts the batch, then the ranks."""
    panels = [(f"{layer.name}: seconds of its experts, forward and backward, by the batch of a rank",
               _by_way(layer.curves), layer.chosen) for layer in plan.layers if layer.curves]  # fmt: skip
    if plan.ranks_curve:
        line = {"exchanges and gradients of experts, spread as is fastest":
                {n: seconds for n, (_, _, seconds) in plan.ranks_curve.items()}}  # fmt: skip
        named = {n: f"ep={ep}" + (f" esp={esp}" if esp > 1 else "") for n, (ep, esp, _) in plan.ranks_curve.items()}
        panels.append(("seconds of a layer's exchanges, forward and backward, by the number of ranks", line, named))
    parts = [_text(_LEFT, 22, f"{plan.model} on {plan.machine.name}, predicted")]
    for number, (title, lines, chosen) in enumerate(panels):
        parts += _panel(title, lines, chosen, _TOP + number * (_HEIGHT + _GAP))
    height = _TOP + max(1, len(panels)) * (_HEIGHT + _GAP)
    target = Path(path)
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="{_FONT}" '
            'font-size="12"><rect width="100%" height="100%" fill="white"/>')  # fmt: skip
    target.write_text("\n".join([head, *parts, "</svg>\n"]), encoding="utf-8")
    return target


def _by_way(curves: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for batch, ways in curves.items():
        for way, seconds in ways.items():
            found.setdefault(way, {})[batch] = seconds
    return found


def _panel(title: str, lines: Mapping[str, Mapping[int, float]], chosen: Mapping[int, str], top: float,
           ) -> Iterator[str]:  # fmt: skip
    """Both axes are logarithmic. What is chosen stands below the axis, where it changes."""
    xs = sorted({x for line in lines.values() for x in line})
    values = [y for line in lines.values() for y in line.values() if y > 0]
    if not xs or not values:
        return
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    wide, floor = _WIDTH - _LEFT - 190, top + _HEIGHT

    def across(x: float) -> float:
        return _LEFT + wide * (math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0))

    def up(y: float) -> float:
        return floor - _HEIGHT * (math.log(y) - low) / ((high - low) or 1.0)

    yield _text(_LEFT, top - 8, title)
    for tick in _ticks(min(values), max(values)):
        yield f'<path d="M{_LEFT} {up(tick):.1f}h{wide}" stroke="#e5e5e5"/>'
        yield _text(_LEFT - 72, up(tick) + 4, _ms(tick))
    before = None
    for x in xs:
        yield f'<path d="M{across(x):.1f} {top}V{floor}" stroke="#f0f0f0"/>'
        yield _text(across(x) - 6, floor + 16, str(x))
        if chosen.get(x) != before:
            before = chosen.get(x)
            yield f'<path d="M{across(x):.1f} {top}V{floor}" stroke="#999" stroke-dasharray="3 3"/>'
            yield _text(across(x) - 6, floor + 32 + 14 * (xs.index(x) % 2), str(before))
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(line.items()) if y > 0)
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield from _wrapped(_LEFT + wide + 12, top + 14 + 34 * number, name, color)


def _wrapped(x: float, y: float, words: str, color: str) -> Iterator[str]:
    rows = [""]
    for word in words.split(" "):
        rows = [*rows[:-1], f"{rows[-1]} {word}".strip()] if len(rows[-1]) + len(word) < 26 else [*rows, word]
    for number, row in enumerate(rows):
        yield _text(x, y + 14 * number, row, color)


def _ticks(low: float, high: float) -> Sequence[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high] or [low, high]


def _text(x: float, y: float, words: str, color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{escape(words)}</text>'


def _stars(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def gb(nbytes: float) -> str:
    """Bytes in words."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
