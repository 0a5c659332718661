"""Whether a finished program stays within the limit of memory, and what to try if it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moefx.analysis.sizes import typical_sizes
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.memory import Peak
from moefx.errors import MoefxError
from moefx.planning.memory import peaks
from moefx.planning.planner import Decision


def peak_of(graphs: StepGraphs, ctx: PassContext) -> Peak:
    """Of a finished program."""
    sizes = typical_sizes(graphs.graphs.values(), ctx)
    return max(peaks(graphs, ctx, sizes).values(), key=lambda found: found.bytes)


def check_memory(graphs: StepGraphs, ctx: PassContext, misses: Sequence[Peak] = ()) -> Peak | None:
    """The peak of a finished program if it needs more than `Options.memory_limit`; None: it stays within it. misses: of
    earlier attempts. Raises MoefxError, with the least of them, if there is nothing else to choose, or these are two.
    """
    limit, decision = ctx.options.memory_limit, ctx.decisions.plan
    if limit is None:
        return None
    peak = peak_of(graphs, ctx)
    if peak.bytes <= limit:
        return None
    if decision is None or decision.restoring is None or decision.restoring.is_least or len(misses) == 2:
        least = min([*misses, peak], key=lambda found: found.bytes)
        hint = "leave chunks and keep open (None)"
        if ctx.options.machine is None:
            hint = "name a machine, by which chunks and what is kept are chosen: Options(machine=..)"
        raise MoefxError(
            f"memory_limit is {limit:.0f} bytes, and no choice that the options leave needs less than "
            f"{math.ceil(least.bytes)} bytes ({least.bytes / 1e6:.3f} MB)",
            where=f"the peak at {least.node}",
            hint=f"raise the limit, give smaller batches, or {hint}",
        )
    return peak


def next_limit(decision: Decision, misses: Sequence[Peak], limit: float) -> float:
    """The limit that estimates must keep after so many attempts that needed too much: the estimate was too low by some
    factor; the second time nothing is estimated any more, and what needs least is chosen."""
    return decision.restoring.bytes * limit / misses[-1].bytes if len(misses) == 1 else 0.0
