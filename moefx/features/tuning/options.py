"""The option `tune`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moefx.options.declare import Allowed, Group, documented, group, option, or_none

MODES = ("off", "model", "online")


@documented
@dataclass(frozen=True, repr=False)
class Tune(Group):
    """Which choices change while training goes on."""

    mode: str | os.PathLike = option(
        "off", Allowed(lambda v: isinstance(v, (str, os.PathLike)) and (str(v) in MODES or str(v).endswith(".json")),
                       f"one of {', '.join(map(repr, MODES))}, or a log that tuning.save wrote (*.json)"), """
        "off": none. "model": for batches of each size (powers of two), whatever the cost model predicts to be fastest;
        needs a machine. "online": the few that it predicts to be fastest are measured in real steps. A file that
        `tuning.save` wrote (*.json): the choices of that run, call by call.""")
    file: str | os.PathLike | None = option(
        None, or_none(Allowed(lambda v: isinstance(v, (str, os.PathLike)), "a file")), """
        Where "online" remembers what it measured, by machine and model. None: nowhere.""", told=False)


FIELDS = {None: {"tune": group(Tune, "which choices change while training goes on.")}}
