"""What a user can do about what takes most of a step, or of a rank's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moefx import rooms
from moefx.report.programs import Programs
from moefx.report.words import gb, percent, rate

if TYPE_CHECKING:
    from moefx.report.what_if import Plan

FEW = 0.1  # what takes a smaller share needs no remedy
GAIN = 1.02  # what brings less is no remedy
MORE = 8  # times as many micro-batches


def hints_of(plan: Plan, programs: Programs) -> Iterator[str]:
    yield from _of_time(plan, programs)
    if plan.limit is None:
        yield from _of_memory(plan, programs)


def exchanges_s(plan: Plan) -> float:
    """Of a step, seconds of regions' exchanges that nothing hides."""
    counts = [(layer.count if plan.is_extrapolated else 1, region) for layer in plan.layers for region in layer.regions]
    return plan.accumulate * sum(count * region.chosen.exposed_s for count, region in counts)


def again_s(plan: Plan) -> float:
    """Of a step, seconds that staying within the limit costs."""
    return 0.0 if plan.within is None else plan.accumulate * sum(plan.within.seconds.values())


def _of_time(plan: Plan, programs: Programs) -> Iterator[str]:
    parts = {"exposed": plan.seconds["exposed"], "optimizer": plan.seconds["optimizer"], "again": again_s(plan),
             "exchanges": exchanges_s(plan)}  # fmt: skip
    name = max(parts, key=parts.__getitem__)
    if parts[name] < FEW * plan.step_s:
        return
    share = percent(parts[name] / plan.step_s)
    accumulated = _accumulated(plan, programs)
    experts, held = programs.numbers["bytes.held_experts"], programs.numbers["bytes.held"]
    others = [*_of_rooms(plan, "time")] if held - experts > FEW * held else []
    shard = [flag for flag, _ in others]
    if name == "exposed":
        said = f"reductions and gathers that nothing hides are {share} of a step"
        shard = [" ".join(each) for each in others]
        has_copies = plan.ep * plan.esp < plan.ranks and 2 * experts > held
        spread = ["a larger --ep leaves a rank fewer gradients of experts, the larger part of them"] * has_copies
        remedies = accumulated + shard + spread
    elif name == "optimizer":
        said, remedies = f"AdamW's step is {share} of a step", accumulated + shard
    elif name == "again":
        said = f"staying within the limit of memory is {share} of a step"
        small = [f"a --batch below {plan.batch[0]} with more --accumulate"] if plan.batch[:1] > (1,) else []
        remedies = small + shard + ["a larger --ep leaves room for what is kept"] * plan.has_experts
    else:
        said = f"exchanges of experts that nothing hides are {share} of a step"
        remedies = _larger_batch(plan)
    if remedies:
        yield f"{said}: {'; '.join(remedies)}"


def _accumulated(plan: Plan, programs: Programs) -> list[str]:
    n = MORE * plan.accumulate
    seconds = sum(programs.seconds(plan.within, n).values())
    now, then = plan.tokens_per_s, MORE * plan.tokens / seconds
    if then < GAIN * now:
        return []
    more = plan.memory["gradients"] if plan.accumulate == 1 else 0.0
    room = f", where {gb(more)} more hold their sum" if plan.limit and plan.memory["peak"] + more > plan.limit else ""
    return [f"--accumulate {n} reduces gradients and steps once in {n} micro-batches: {rate(then)} instead of "
            f"{rate(now)}{room}"]  # fmt: skip


def _larger_batch(plan: Plan) -> list[str]:
    """Where the experts of most layers are faster by the sequence."""
    layer = max(plan.layers, key=lambda each: each.count if each.curves else 0)
    best = {batch: min(ways.values()) / batch for batch, ways in layer.curves.items()}
    now = best.get(plan.batch[0] if plan.batch else 0)
    later = {batch: seconds for batch, seconds in best.items() if batch > plan.batch[0]} if now else {}
    if not later or now < GAIN * min(later.values()):
        return []
    batch = min(batch for batch, seconds in later.items() if seconds <= GAIN * min(later.values()))
    return [f"with --batch {batch} its experts take {1e3 * later[batch]:.1f} ms per sequence in {layer.name} instead "
            f"of {1e3 * now:.1f} ms"]  # fmt: skip


def _of_memory(plan: Plan, programs: Programs) -> Iterator[str]:
    numbers = programs.numbers
    experts = numbers["bytes.held_experts"]
    parts = {"dense": numbers["bytes.held"] - experts, "experts": experts, "kept": plan.memory["kept"]}
    name = max(parts, key=parts.__getitem__)
    size = gb(parts[name])
    if name == "kept":
        yield (f"what is kept for the backward is the largest part of memory, {size}: --memory-limit has what is kept "
               "chosen, or a smaller --batch with more --accumulate")  # fmt: skip
    elif name == "experts":
        yield f"experts with their state are the largest part of memory, {size}: a larger --ep spreads them further"
    else:
        for flag, words in _of_rooms(plan, "memory", parts[name]):
            yield f"what is no expert is the largest part of memory with its state, {size}: {flag} {words}"


def _of_rooms(plan: Plan, kind: str, nbytes: float = 0.0) -> Iterator[tuple[str, str]]:
    """(flag, what it does) of options of rooms that are not as they are and would help. kind: see `rooms.Axis`."""
    for axis in rooms.axes():
        best, now = axis.values(plan.mesh)[0], plan.options.value_of(axis.option)
        if best not in (now, axis.default) and kind in axis.remedies:
            size = gb(nbytes * axis.ranks(now, plan.mesh) / axis.ranks(best, plan.mesh))
            yield f"--set {axis.option}={best}", axis.remedies[kind].format(size=size)
