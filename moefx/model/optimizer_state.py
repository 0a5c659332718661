"""An optimizer's state as a checkpoint has it: of those parameters that had a gradient before it was saved."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from moefx.errors import CheckpointError


@contextlib.contextmanager
def to_load_into(optimizer: Optimizer | None) -> Iterator[None]:
    """Let `torch.distributed.checkpoint` make up state of all parameters where some have none, so that there is
    something to load into, without a look at their gradients. What fails leaves the optimizer with the state it had."""
    params = [param for group in (optimizer.param_groups if optimizer else ()) for param in group["params"]]
    if optimizer is None or all(optimizer.state.get(param) for param in params if param.requires_grad):
        yield
        return
    before, grads = optimizer.state, [param.grad for param in params]
    optimizer.state = defaultdict(dict)
    for param in params:
        param.grad = None
    try:
        yield
    except BaseException:
        optimizer.state = before
        raise
    finally:
        for param, grad in zip(params, grads):
            param.grad = grad


def drop_unsaved(state: dict[str, Any], saved: Metadata) -> set[str]:
    """Take those parameters out of an optimizer's state dict of which a checkpoint has no state; their names. If it has
    none of any parameter, another kind of optimizer wrote it: nothing is taken out."""
    paths = (saved.planner_data or {}).values()
    there = {path[2] for path in paths if tuple(path[:2]) == ("optimizer", "state") and len(path) > 3}
    unsaved = set(state["state"]) - there if there else set()
    for name in unsaved:
        del state["state"][name]
    return unsaved


def check_known(unsaved: set[str], state: dict[str, Any]) -> None:
    """Raises CheckpointError if the optimizer that was saved, whose state dict this is, had none of these parameters:
    then it is not for want of a gradient that there is no state."""
    known = {name for group in state["param_groups"] for name in group["params"]}
    if strange := sorted(unsaved - known):
        raise CheckpointError(f"the optimizer that was saved did not have `{strange[0]}`",
                              hint="build it as it was when it was saved")  # fmt: skip
