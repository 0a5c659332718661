"""Whose step is running, for errors of operators in it."""

from __future__ import annotations

import sys

from torch.optim import Optimizer


def stepping() -> str | None:
    """The optimizer whose `step` called what calls this, as words; None outside of one."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(owner, Optimizer):
            return f"the step of {type(owner).__name__}"
        frame = frame.f_back
    return None
