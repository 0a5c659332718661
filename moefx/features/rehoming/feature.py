"""What the core calls of this room."""

from __future__ import annotations

from moefx.errors import MoefxError
from moefx.features.rehoming.follower import Rehoming
from moefx.model.api import CompiledModule
from moefx.options import CHECKS, Options
from moefx.rooms import Feature

HOMES = 2  # even shares of experts that a rank has room for, where they are to move


def _check(options: Options) -> None:
    every = options.placement.rehome_every
    if every and options.placement.policy is None:
        raise MoefxError(f"rehome_every is {every} without a placement, which counts what experts move by",
                         where="moefx.Options", hint="policy='balanced'")  # fmt: skip


def _homes(options: Options) -> int:
    return HOMES if options.placement.rehome_every else 1


def _follow(compiled: CompiledModule) -> Rehoming | None:
    return Rehoming(compiled) if compiled.options.placement.rehome_every else None


FEATURE = Feature("rehoming", homes=_homes, follow=_follow)
CHECKS.append(_check)
