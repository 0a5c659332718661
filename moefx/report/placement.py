"""Who has copies of which experts, in words and as a picture: what `moefx.explain` says, and rows per rank."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from moefx.compiler.variant import Variant
from moefx.context.region_facts import RegionFacts
from moefx.errors import MoefxError
from moefx.model.stats import RegionStats
from moefx.placement import decide

_WIDTH, _LEFT, _MARGIN, _HEIGHT, _BAR = 760, 60, 20, 90, 16
_COLORS = {"at home": "#c3c9d1", "with copies": "#3a6ea5"}


def words_of(variant: Variant, facts: RegionFacts) -> tuple[str, ...]:
    """The policy of a region, and why experts have copies in the plan that is in force; nothing if there is none."""
    home, options = variant.program.home, variant.context.options
    region = home.session.placements.regions.get(facts.placed_as(home.path)) if facts.counted else None
    if options.placement is None or facts.slots is None:
        return ()
    room = f"{options.placement}, room for {facts.slots.room} experts and {facts.slots.spare} copies on every rank"
    is_exact = variant.context.is_exact(facts.number)
    room += ", corrected" if variant.context.is_calibrated else ", planned" if is_exact else ""
    room += " in the call, after the gate" if is_exact else ""
    loads = None if region is None else region.counted if is_exact else region.tables.loads
    if loads is None:
        return (f"{room}; no copies were planned yet",)
    plan = home.session.placements.exact(region, loads) if is_exact else region.tables.plan
    return (room, *decide.reasons(plan, loads, region.cap))


def draw(stats: Mapping[str, RegionStats], path: str | Path) -> Path:
    """Write an SVG picture of what `moe_stats()` gave: rows of every rank, region by region, as they were and as they
    would have been without copies. Raises MoefxError where no region is spread over ranks."""
    shown = {name: each for name, each in stats.items() if each.rows}
    if not shown:
        raise MoefxError("no region has rows by rank", hint="run a training call of a model on a mesh with ep first")
    parts = [_text(_LEFT + 130 * i, 18, words, color) for i, (words, color) in enumerate(_COLORS.items())]
    for number, (name, each) in enumerate(shown.items()):
        parts += _bars(name, each, 40 + number * (_HEIGHT + 50))
    height = 40 + len(shown) * (_HEIGHT + 50)
    picture = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-size="12" '
               'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">',
               '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]  # fmt: skip
    path = Path(path)
    path.write_text("\n".join(picture))
    return path


def _bars(name: str, stats: RegionStats, top: int) -> list[str]:
    """Two bars for every rank, and a line at the mean."""
    most, mean = max(*stats.rows_at_home, *stats.rows, 1), sum(stats.rows) / len(stats.rows)
    step = (_WIDTH - _LEFT - _MARGIN) / len(stats.rows)
    bar, floor = min(_BAR, step / 2.5), top + 20 + _HEIGHT
    busiest = max(stats.rows_at_home) / (mean or 1), max(stats.rows) / (mean or 1)
    parts = [_text(_LEFT, top + 12, f"{name}: the busiest rank has {busiest[0]:.2f} of the mean at home, "
                   f"{busiest[1]:.2f} with {stats.copies} copies")]  # fmt: skip
    for rank, both in enumerate(zip(stats.rows_at_home, stats.rows)):
        for place, (rows, color) in enumerate(zip(both, _COLORS.values())):
            height = _HEIGHT * rows / most
            parts.append(f'<rect x="{_LEFT + rank * step + place * bar:.1f}" y="{floor - height:.1f}" '
                         f'width="{bar:.1f}" height="{height:.1f}" fill="{color}"><title>rank {rank}: {rows} rows'
                         "</title></rect>")  # fmt: skip
    line = floor - _HEIGHT * mean / most
    return [*parts, f'<line x1="{_LEFT}" x2="{_WIDTH - _MARGIN}" y1="{line:.1f}" y2="{line:.1f}" stroke="#e8833a"/>']


def _text(x: float, y: float, words: str, color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}">{escape(words)}</text>'
