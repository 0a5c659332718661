"""What the core calls of this room."""

from __future__ import annotations

from moefx.context.pass_types import Pass
from moefx.errors import UnsupportedUse
from moefx.features.whole_blocks import cut_blocks
from moefx.ir.level import Level
from moefx.options import Options
from moefx.rooms import Feature, Insertion


def _check(options: Options) -> None:
    if options.parallel.whole_blocks and (options.chunks == 1 or (options.chunks is None and options.machine is None)):
        raise UnsupportedUse("whole_blocks cuts into as many parts as there are chunks, and there is one",
                             hint="chunks=2, or machine=.. to choose how many")  # fmt: skip


FEATURE = Feature(
    "whole_blocks",
    check=_check,
    passes=(Insertion("chunk", Pass("cut-blocks", cut_blocks.run, Level.MOE, Level.MOE, optional=True, asked=True)),),
)
