"""Who has copies of which experts, in words and as a picture: what `moefx.explain` says, and rows per rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from moefx.compiler.variant import Variant
from moefx.context.region_facts import RegionFacts
from moefx.errors import MoefxError
from moefx.model.stats import RegionStats
from moefx.placement import decide
from moefx.report import svg

_WIDTH, _LEFT, _MARGIN, _HEIGHT, _BAR, _TOP, _PANEL = 860, 90, 20, 90, 24, 64, 164
_COLORS = {"if every expert were at home only": "#c3c9d1", "as it ran, with copies of experts": "#3a6ea5"}
_MEAN = "#e8833a"


def words_of(variant: Variant, facts: RegionFacts) -> tuple[str, ...]:
    """The policy of a region, and why experts have copies in the plan that is in force; nothing if there is none."""
    home, options = variant.program.home, variant.context.options
    region = home.session.placements.regions.get(facts.placed_as(home.path)) if facts.counted else None
    if options.placement.policy is None or facts.slots is None:
        return ()
    slots = facts.slots
    room = f"{options.placement.policy}, room for {slots.room} experts and {slots.spare} copies on every rank"
    in_call = variant.context.plans_in_call(facts.number)
    room += ", corrected" if variant.context.corrects else ", planned" if in_call else ""
    room += " in the call, after the gate" if in_call else ""
    loads = None if region is None else region.counted if in_call else region.tables.loads
    if loads is None:
        return (f"{room}; no copies were planned yet",)
    plan = home.session.placements.of_call(region, loads) if in_call else region.tables.plan
    return (room, *decide.reasons(plan, loads, region.cap))


def draw(stats: Mapping[str, RegionStats], path: str | Path) -> Path:
    """Write an SVG picture of what `moe_stats()` gave: rows of every rank, region by region, as they were and as they
    would have been without copies. Raises MoefxError where no region is spread over ranks."""
    shown = {name: each for name, each in stats.items() if each.rows}
    if not shown:
        raise MoefxError("no region has rows by rank", hint="run a training call of a model on a mesh with ep first")
    parts = [svg.text(_LEFT, 22, "Rows of tokens that each rank's experts computed in the last forward",
                      'font-size="15" font-weight="bold"')]  # fmt: skip
    parts += svg.legend(_LEFT, 34, {**_COLORS, "mean of the ranks (line)": _MEAN}.items())
    for number, (name, each) in enumerate(shown.items()):
        parts += _bars(name, each, _TOP + number * _PANEL)
    return svg.write(path, _WIDTH, _TOP + len(shown) * _PANEL, parts)


def _bars(name: str, stats: RegionStats, top: int) -> Iterator[str]:
    """Two bars for every rank, and a line at the mean."""
    most, mean = max(*stats.rows_at_home, *stats.rows, 1), sum(stats.rows) / len(stats.rows)
    step = (_WIDTH - _LEFT - _MARGIN) / len(stats.rows)
    bar, floor = min(_BAR, step / 2.5), top + 24 + _HEIGHT
    busiest = max(stats.rows_at_home) / (mean or 1), max(stats.rows) / (mean or 1)
    yield svg.text(_LEFT, top + 12, f"{name}: the busiest rank has {busiest[0]:.2f} of the mean at home, "
                   f"{busiest[1]:.2f} with {stats.copies} copies", 'font-weight="bold"')  # fmt: skip
    for tick in svg.ticks(most, 4):
        y = floor - _HEIGHT * tick / most
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _MARGIN}" stroke="#e5e5e5"/>'
        yield svg.text(_LEFT - 8, y + 4, f"{tick:g}{' rows' if tick else ''}", 'text-anchor="end" fill="#555"')
    every = math.ceil(len(f"rank {stats.ranks[-1]}") * 8 / step)  # as many names as there is room for
    for place, (rank, *both) in enumerate(zip(stats.ranks, stats.rows_at_home, stats.rows)):
        for number, (rows, (words, color)) in enumerate(zip(both, _COLORS.items())):
            height = _HEIGHT * rows / most
            yield (f'<rect x="{_LEFT + place * step + number * bar:.1f}" y="{floor - height:.1f}" '
                   f'width="{bar:.1f}" height="{height:.1f}" fill="{color}"><title>rank {rank}, {words}: {rows} rows'
                   "</title></rect>")  # fmt: skip
        if place % every == 0:
            yield svg.text(_LEFT + place * step, floor + 15, f"rank {rank}", 'fill="#555"')
    line = floor - _HEIGHT * mean / most
    yield f'<path d="M{_LEFT} {line:.1f}H{_WIDTH - _MARGIN}" stroke="{_MEAN}"/>'
