"""What of a large model is kept for the backward, within a limit of memory, by the programs of a few of its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moefx import rooms
from moefx.context.pass_types import PassContext
from moefx.errors import MoefxError
from moefx.planning.planner import Decision, decide
from moefx.planning.restoring import Restored, template_of
from moefx.report.layers import Layers
from moefx.report.one_look import PHASES, Look, Numbers
from moefx.report.words import gb


class Counts:
    """How often the layers of the program that was compiled are in the model. is_cut: it has one of each kind, in
    order; else it is the model. kinds: (name, how many)."""

    def __init__(self, layers: Layers | None, *, is_cut: bool) -> None:
        self.layers, self.is_cut = layers, is_cut
        self.kinds = [(kind.name, len(kind)) for kind in layers.kinds] if layers else [("the model", 1)]

    def kind_of(self, path: str) -> int | None:
        """Of the layer in which a module is; None: in none."""
        if self.layers is None:
            return 0
        prefix = self.layers.path + "." if self.layers.path else ""
        found = re.match(re.escape(prefix) + r"(\d+)(?=\.|$)", path)
        if found is None:
            return None
        return int(found[1]) if self.is_cut else self.layers.kind_at(int(found[1]))

    def times(self, path: str) -> int:
        kind = self.kind_of(path) if self.is_cut else None
        return 1 if kind is None else self.kinds[kind][1]

    def by_layer(self) -> dict[str, int]:
        """{path of a layer that was compiled: `times`}."""
        if self.layers is None or not self.is_cut:
            return {}
        return {f"{self.layers.path}.{number}".lstrip("."): many for number, (_, many) in enumerate(self.kinds)}


@dataclass(frozen=True)
class Within:
    """bytes: the peak with the optimizer's state. saved: bytes that are not kept. seconds: that it costs, by graph.
    rows: (class with `*` for numbers of layers, its ways, how many) of what is not kept as eager autograd does.
    decision: by which the layers run."""

    bytes: float
    saved: float
    seconds: Mapping[str, float]
    rows: tuple[tuple[str, str, int], ...]
    decision: Decision


class Room:
    """What of a model is not kept within one limit or another: the planner chooses by the small program, of which a
    layer stands for all of its kind. numbers: of the model, with all that it keeps."""

    def __init__(self, base: Look, numbers: Numbers, counts: Counts) -> None:
        ctx = replace(base.attempt.ctx, stands_for=counts.by_layer())
        self.base = base._replace(attempt=base.attempt._replace(ctx=ctx))
        self.numbers, self.counts = numbers, counts
        self.state = numbers["bytes.master"] + numbers["bytes.optimizer"]
        peak = max(numbers.get(f"peak.{name}", 0.0) for name in ("forward", "turn"))
        kept = template_of(base.attempt.graphs, ctx, base.decision.sizes).peak({})
        self.beside = self.state + peak - kept  # all of which the small program knows nothing

    def within(self, limit: float, beside: float = 0.0) -> Within:
        """beside: bytes that are there besides, until the backward's last part. Raises MoefxError where nothing fits,
        and says what would."""
        attempt, beside = self.base.attempt, beside + self.beside
        found = decide(attempt.graphs, attempt.ctx, self.base.decision.machine, limit=max(limit - beside, 1.0))
        end = self.state + self.numbers.get("peak.end", 0.0) if self.counts.is_cut else 0.0
        most = max(found.restoring.bytes + beside, end)
        if most > limit:
            raise _too_little(self.base, self.numbers, most, limit)
        return Within(most, *self._said(found), found)

    def _said(self, found: Decision) -> tuple[float, Mapping[str, float], tuple[tuple[str, str, int], ...]]:
        """Bytes that are not kept, seconds that it costs, by graph, and the rows of `Within`."""
        modules = {plan.region: plan.module for plan in found.regions}
        regions = {each.name: each.region for each in self.base.attempt.ctx.decisions.restorables}
        saved = again = 0.0
        rows: dict[tuple[str, str], int] = {}
        for row in found.restoring.rows:
            region = regions[row.name]
            times = self.counts.times(modules.get(region, row.name))
            saved, again = saved + times * row.less, again + times * row.seconds
            if {*row.ways} != {"keep"}:
                name = f"{modules[region]} {row.role}" if region in modules else row.name
                key = re.sub(r"\.\d+(?=\.| |$)", ".*", name), _words(row)
                rows[key] = rows.get(key, 0) + times
        seconds = dict.fromkeys(PHASES, 0.0)
        seconds["backward"] = again  # what waits on the host is copied beside the forward
        before = {plan.region: plan.chosen for plan in self.base.decision.regions}
        for plan in found.regions:
            for name in PHASES:
                changed = getattr(plan.chosen, f"{name}_s") - getattr(before[plan.region], f"{name}_s")
                seconds[name] += self.counts.times(plan.module) * changed
        return saved, seconds, tuple((*key, times) for key, times in rows.items())


def _words(row: Restored) -> str:
    ways = dict.fromkeys(row.ways)
    return ", ".join(way if len(ways) == 1 else f"{row.ways.count(way)} {way}" for way in ways)


def _further(ctx: PassContext) -> Iterator[tuple[float, str]]:
    """(by how much what is no expert would shrink, what to say) of options of rooms."""
    for axis in rooms.axes():
        now, sizes = ctx.options.value_of(axis.option), ctx.mesh.root
        for value in axis.values(sizes):
            times = axis.ranks(value, sizes) / axis.ranks(now, sizes)
            if times > 1:
                yield times, f"--set {axis.option}={value} "


def _too_little(base: Look, numbers: Numbers, least: float, limit: float) -> MoefxError:
    ctx, fixed, experts = base.attempt.ctx, numbers["bytes.held"], numbers["bytes.held_experts"]
    dense, spread, ranks = fixed - experts, ctx.mesh.size("ep+esp"), math.prod(ctx.mesh.root.values())
    hints = []
    if fixed < limit:
        share = (limit - fixed) / (least - fixed)
        hints.append(f"about {share:.0%} of the tokens per rank" if share < 1 else "fewer tokens per rank")
    numbers_of_experts = [facts.experts for facts in ctx.decisions.regions.values()]
    for times, words in [(1, ""), *_further(ctx)]:
        for n in (n for n in range(spread, ranks + 1) if ranks % n == 0 and n % spread == 0):
            of_ep = all(count % n == 0 for count in numbers_of_experts)
            if dense / times + experts * spread / n + (least - fixed) <= limit and (of_ep or n == spread):
                hints.append(f"{words}--ep {n}" if n > spread else words.strip())
                break
    fit = "; or ".join(filter(None, hints)) or "more ranks to spread experts over"
    return MoefxError(
        f"a rank needs {gb(least)}, of which weights, gradients and AdamW's state are {gb(fixed)}, and there are "
        f"{gb(limit)}", where="memory_limit",
        hint=f"what would fit: {fit}; --search tries meshes and batches")  # fmt: skip
