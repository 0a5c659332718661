"""What the core calls of this room."""

from __future__ import annotations

from moefx.errors import UnsupportedUse
from moefx.features.tuning.follower import Tuning
from moefx.model.api import CompiledModule
from moefx.options import Options
from moefx.rooms import Feature


def _check(options: Options) -> None:
    if options.tune.mode == "model" and options.machine is None:
        raise UnsupportedUse("tune is 'model', without a machine to predict by",
                             hint="machine=.., see python -m moefx calibrate; or tune='online'")  # fmt: skip


def _follow(compiled: CompiledModule) -> Tuning:
    return Tuning(compiled.options, compiled._machine, compiled._inner, compiled._ranks, lambda: compiled._runners)


FEATURE = Feature("tuning", check=_check, chooses=lambda options: options.tune.mode != "off", follow=_follow)
