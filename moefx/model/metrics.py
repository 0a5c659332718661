"""A step's metrics as one flat dict: what a logger of a training loop takes.

    load/max_over_mean, load/<layer>/max_over_mean    rows of the busiest expert over the mean; largest of all layers
    load/dead_experts, load/<layer>/dead_experts      experts that no token chose; of all layers together
    rows/dropped, rows/dropped_share                  choices that no expert computed, and of how many
    bytes/sent, bytes/moved                           to other ranks since the forward began; of these for weights
    memory/peak_bytes                                 on CUDA what torch had allocated at most, else of the process
    speed/step_s, speed/tokens_per_s                  of one forward and what follows it, and of all ranks together
    speed/mfu                                         model FLOPs utilisation of this rank
    speed/hidden_share                                of the time of exchanges, in the last `moefx.profile`
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moefx.capture.inputs import tokens_in
from moefx.errors import UnsupportedUse
from moefx.model.stats import RegionStats

CALLS = 32  # that speed is the mean of


class Pace:
    """How fast a training loop goes: when its last forwards began. What is compiled or evaluated on the way begins the
    count again."""

    def __init__(self) -> None:
        self._began: deque[tuple[float, int]] = deque(maxlen=CALLS + 1)  # seconds, tokens
        self._programs = 0

    def begin_call(self, call: tuple, programs: Collection, *, trains: bool) -> None:
        """call: (args, kwargs). programs: those that are compiled."""
        if not trains or len(programs) != self._programs:
            self._began.clear()
            self._programs = len(programs)
        if trains:
            self._began.append((time.perf_counter(), tokens_in(pytree.tree_leaves(call))))

    def mean(self) -> tuple[float, float] | None:
        """Seconds and tokens of a call; None before the second one."""
        if len(self._began) < 2:
            return None
        seconds = self._began[-1][0] - self._began[0][0]
        calls = len(self._began) - 1
        return seconds / calls, sum(tokens for _, tokens in [*self._began][:-1]) / calls


def of_step(layers: Mapping[str, RegionStats], device: torch.device) -> dict[str, float]:
    """What the layers of the last forward did, and memory."""
    found: dict[str, float] = {}
    dead = {name: float(each.load.count(0)) for name, each in layers.items()}
    if layers:
        routed = sum(each.pairs or 0 for each in layers.values())
        dropped = sum(each.dropped or 0 for each in layers.values())
        found |= {
            "load/max_over_mean": max(each.max_over_mean for each in layers.values()),
            "load/dead_experts": sum(dead.values()),
            "rows/dropped": float(dropped), "rows/dropped_share": dropped / routed if routed else 0.0,
            "bytes/sent": float(sum(each.bytes_sent for each in layers.values())),
            "bytes/moved": float(sum(each.moved_bytes for each in layers.values())),
        }  # fmt: skip
    for name, each in layers.items():
        found |= {f"load/{name}/max_over_mean": each.max_over_mean, f"load/{name}/dead_experts": dead[name]}
    if device.type == "cuda":
        return found | {"memory/peak_bytes": float(torch.cuda.max_memory_allocated(device))}
    unit = 1 if sys.platform == "darwin" else 1024
    return found | {"memory/peak_bytes": float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def of_loop(pace: Pace, readers: int, peak_s_per_token: float, profile: Any | None) -> dict[str, float]:
    """How fast the loop goes. readers: ranks with tokens of their own. peak_s_per_token: what the machine takes for the
    model's matrix products at its peak; zero: unknown. profile: the last one."""
    found: dict[str, float] = {}
    mean = pace.mean()
    if mean is not None:
        seconds, tokens = mean
        found |= {"speed/step_s": seconds, "speed/tokens_per_s": tokens * readers / seconds}
        if peak_s_per_token:
            found["speed/mfu"] = peak_s_per_token * tokens / seconds
    try:
        share = math.nan if profile is None else profile.hidden_share().measured
    except UnsupportedUse:  # nothing ran in it
        share = math.nan
    return found if math.isnan(share) else found | {"speed/hidden_share": share}
