"""What the core calls of this room."""

from __future__ import annotations

from dataclasses import replace

from moefx.context.pass_types import Pass, PassContext
from moefx.errors import UnsupportedUse
from moefx.features.whole_blocks import cut_blocks
from moefx.features.whole_blocks.options import AUTO
from moefx.ir.level import Level
from moefx.options import Options
from moefx.rooms import Feature, Insertion, Proposal

PARTS = (2, 4)
SCHEDULER = "heuristic"  # "optsche" is for chunks of one layer


def _check(options: Options) -> None:
    asked = options.parallel.whole_blocks
    if asked == AUTO and options.machine is None:
        raise UnsupportedUse(
            "whole_blocks is 'auto', without a machine to predict by",
            hint="machine=.., see python -m moefx calibrate; or whole_blocks=True, chunks=2",
        )
    if asked and (options.chunks == 1 or (options.chunks is None and options.machine is None)):
        raise UnsupportedUse("whole_blocks cuts into as many parts as there are chunks, and there is one",
                             hint="chunks=2, or machine=.. to choose how many")  # fmt: skip


def _scheduler(options: Options) -> str | None:
    return SCHEDULER if options.parallel.whole_blocks is True else None


def _proposals(ctx: PassContext) -> tuple[Proposal, ...]:
    options, decisions = ctx.options, ctx.decisions
    sends = [number for number, facts in decisions.regions.items() if facts.way.hops]
    if options.parallel.whole_blocks != AUTO or not sends:
        return ()
    scheduler = options.scheduler or SCHEDULER
    found = []
    for n in PARTS if options.chunks is None else (options.chunks,):
        choices = {ctx.uncut(number): replace(ctx.choice(number), chunks=n, scheduler=scheduler) for number in sends}
        found.append(Proposal(f"blocks in {n} parts", choices, needs="cut-blocks"))
    return tuple(found)


FEATURE = Feature(
    "whole_blocks",
    check=_check,
    passes=(Insertion("chunk", Pass("cut-blocks", cut_blocks.run, Level.MOE, Level.MOE, optional=True, asked=True)),),
    scheduler=_scheduler,
    proposals=_proposals,
)
