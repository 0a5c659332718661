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
from moefx.planning.restoring import Restored
from moefx.report.layers import Layers
from moefx.report.one_look import PHASES, Look, Numbers
from moefx.report.words import gb

STEPS = 7  # of the search for the largest limit of the small program


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


@dataclass(frozen=True)
class Within:
    """bytes: the peak with the optimizer's state. saved: bytes that are not kept. seconds: that it costs, by graph.
    decision: by which the layers run. rows: (class with `*` for numbers of layers, its ways,
    how many) of what is not kept as eager autograd does. end: bytes in the backward's last part."""

    bytes: float
    saved: float
    seconds: Mapping[str, float]
    decision: Decision
    rows: tuple[tuple[str, str, int], ...]
    end: float = 0.0


class Tries:
    """What the planner chooses for the small program within one limit or another; what a class of values saves in it,
    it saves in every layer of the kind. numbers: of the model, with all that it keeps."""

    def __init__(self, base: Look, numbers: Numbers, counts: Counts) -> None:
        self.base, self.numbers, self.counts = base, numbers, counts
        self.known: dict[float, Within] = {}

    def within(self, limit: float, beside: float = 0.0, steps: int = STEPS) -> Within:
        """beside: bytes that are there besides, until the backward's last part. steps: of the search for the largest
        limit of the small program. Raises MoefxError where nothing fits, and says what would."""

        def tried(small: float) -> Within:
            if small not in self.known:
                self.known[small] = _tried(self.base, self.numbers, self.counts, small)
            found = self.known[small]
            return replace(found, bytes=max(found.bytes + beside, found.end))

        all_kept = tried(math.inf)
        if all_kept.bytes <= limit:
            return all_kept
        least = tried(1.0)
        if least.bytes > limit:
            raise _too_little(self.base, self.numbers, least.bytes, limit)
        best, low = least, least.decision.restoring.bytes
        high = max(self.base.numbers.get(f"peak.{name}", 0.0) for name in ("forward", "turn"))
        for _ in range(steps):
            middle = (low + high) / 2
            found = tried(middle)
            if found.bytes <= limit:
                best, low = min(best, found, key=lambda each: sum(each.seconds.values())), middle
            else:
                high = middle
        return best


def _tried(base: Look, numbers: Numbers, counts: Counts, limit: float) -> Within:
    attempt, free = base.attempt, base.decision
    found = decide(attempt.graphs, attempt.ctx, free.machine, limit=limit)
    modules = {plan.region: plan.module for plan in found.regions}
    regions = {each.name: each.region for each in attempt.ctx.decisions.restorables}
    saved = again = more = 0.0
    rows: dict[tuple[str, str], int] = {}
    for row in found.restoring.rows:
        region = regions[row.name]
        times = counts.times(modules.get(region, row.name))
        saved, more = saved + times * row.less, more + (times - 1) * row.less
        again += times * row.seconds
        if {*row.ways} != {"keep"}:
            name = f"{modules[region]} {row.role}" if region in modules else row.name
            rows[re.sub(r"\.\d+(?=\.| |$)", ".*", name), _words(row)] = times + rows.get(
                (re.sub(r"\.\d+(?=\.| |$)", ".*", name), _words(row)), 0)  # fmt: skip
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds["backward"] = again  # what waits on the host is copied beside the forward
    before = {plan.region: plan.chosen for plan in free.regions}
    for plan in found.regions:
        for name in PHASES:
            changed = getattr(plan.chosen, f"{name}_s") - getattr(before[plan.region], f"{name}_s")
            seconds[name] += counts.times(plan.module) * changed
    lift = max(numbers[f"peak.{name}"] - base.numbers[f"peak.{name}"] for name in ("forward", "turn"))
    state = numbers["bytes.master"] + numbers["bytes.optimizer"]
    end = state + numbers.get("peak.end", 0.0) if counts.is_cut else 0.0
    return Within(found.restoring.bytes + lift - more + state, saved, seconds, found,
                  tuple((*key, times) for key, times in rows.items()), end)  # fmt: skip


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
