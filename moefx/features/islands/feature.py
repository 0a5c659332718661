"""What the core calls of this room."""

from __future__ import annotations

from moefx.context.pass_types import Pass
from moefx.errors import UnsupportedUse
from moefx.features.islands import join_islands, runtime
from moefx.features.islands.follower import Accounts
from moefx.ir.level import Level
from moefx.options import Options
from moefx.rooms import Feature, Insertion


def _check(options: Options) -> None:
    missing = runtime.missing() if options.islands.wanted else None
    if missing is not None:
        raise UnsupportedUse(f"islands is True, but {missing}", hint="islands=False")


FEATURE = Feature("islands", check=_check, follow=Accounts,
                  passes=(Insertion("schedule", Pass("join-islands", join_islands.run, Level.SCHEDULED,
                                                     Level.SCHEDULED)),))  # fmt: skip
