"""Every error that moefx shows to its users: what is wrong, where, and the nearest valid choice; and its warnings."""

from __future__ import annotations

import sys
import warnings

import torch


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line that called moefx, which is none of moefx or torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("moefx", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)


class MoefxError(Exception):
    """Base of all errors of moefx. `what` happened, `where` (module, source line, rank), `hint` what to do. together:
    all ranks know that a program cannot be made, and raise at the same place. footnote: a last line."""

    together: bool = False
    footnote: str = ""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        at, hint = (f"\n  {name}: {text}" if text else "" for name, text in (("at", self.where), ("try", self.hint)))
        return f"{self.what}{at}{hint}{self.footnote}"


class MeshError(MoefxError, ValueError):
    """The device mesh cannot be used: names, sizes, or membership."""


class ModelError(MoefxError, TypeError):
    """moefx does not take this kind of model (wrapped, compiled, already distributed)."""


class CaptureError(MoefxError):
    """The model could not be captured as one graph. everywhere: on no rank."""

    everywhere: bool = False


class RaiseError(MoefxError):
    """moefx found an MoE layer but cannot express it. is_dense: nothing in the model looks like one."""

    is_dense: bool = False


class VerifyError(MoefxError, AssertionError):
    """A graph broke an invariant: a bug in a pass, found before the graph ran."""


class UnsupportedUse(MoefxError):
    """moefx refuses this use of the compiled model, because the result would be wrong."""


class ExtensionError(UnsupportedUse):
    """Your own scheduler, all-to-all or codec raised an error, or is or returns something that it must not."""


class StaleStateError(MoefxError, RuntimeError):
    """A backward needs state that is gone or has changed since its forward."""


class StaleOptimizerError(MoefxError, RuntimeError):
    """An optimizer holds parameters that `compile` replaced."""


class DivergenceError(MoefxError, RuntimeError):
    """Ranks do not run the same program or the same step."""


class CollectiveError(MoefxError, RuntimeError):
    """A collective failed or timed out; the text names rank, step, module and collective."""


class OffloadError(MoefxError, RuntimeError):
    """A copy to the host's memory or back failed, or the host has no memory for it; the text names rank and step."""


class OutOfMemoryError(MoefxError, torch.OutOfMemoryError):
    """A rank has no memory for a program; the text names the rank, the line and what is alive."""


class ScheduleError(MoefxError, ValueError):
    """A task graph, or an order of its tasks, is not legal; the text names the task and the rule that it breaks."""


class CheckpointError(MoefxError, RuntimeError):
    """A checkpoint is incomplete, damaged, or does not fit the model."""
