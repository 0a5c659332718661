"""What a compiled model tells of its last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moefx.model import metrics
from moefx.model.stats import RegionStats
from moefx.model.valued import Valued

REPORTS: list[Callable[..., Any]] = []  # what makes a report, which stands above


class Observed(Valued):
    """A stand-in with runners, whose last calls it tells of."""

    def moe_stats(self) -> dict[str, RegionStats]:
        """Load per expert, drops and bytes of every MoE layer in the last forward, by path, except static blocks.

        This call reads from the device. It does not communicate: every rank may ask alone.
        """
        return {name: found for runner in self._runners for name, found in runner.moe_stats().items()}

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, flat, for a logger. [All names](guide/metrics.md). Reads from the device; does not
        communicate: every rank may ask alone, and has its own figures."""
        at_peak = sum(runner.last[0].program.peak_s_per_token for runner in self._runners if runner.last)
        return (metrics.of_step(self.moe_stats(), self._session.device)
                | metrics.of_loop(self._pace, self._spec.size("data"), at_peak, self._profile))  # fmt: skip

    def report(self, path: str | Path | None = None, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """What ran last, on one page: see `moefx.report.run.Report`. path: a .html or .json file to write. optimizer:
        its state counts as memory. Any rank can do it alone. Raises UnsupportedUse if nothing was compiled, MoefxError
        for another suffix, or without plotly."""
        return REPORTS[0](self, path, optimizer)
